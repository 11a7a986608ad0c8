"""What a store records of single requests: log lines with their ids, and spans of traced ones.

A load's span begins when it is asked for and ends when its last piece is in the arena; a save's two (SSD, blob) begin
when the worker has copied the chunks and end with the last write; a hint's begins when it comes and ends when its
session is in the arena. Nothing here decides anything, and everything is bounded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from contracts import trace_context
from contracts.convert import session_from_wire
from contracts.ids import SessionKey
from contracts.trace_context import TraceContext
from contracts.v1 import kvstore_pb2 as pb
from kvstore.core.events import BlobWritten, Event, LoadId, SaveId, SsdWritten, Wrote
from kvstore.core.hints import ADVISORY
from kvstore.core.instructions import End, Found, Grant, Pieces
from kvstore.metrics import log
from kvstore.owners import Owner
from runtime import tracing
from runtime.clock import Clock
from runtime.spans import Kind, Span, Value

#: Hints, saves and chunks being written that are remembered; further ones get no span.
_MOST_HINTS, _MOST_SAVES, _MOST_KEYS = 4096, 4096, 65_536
#: A save whose chunks are not written by then gets its span as it is, in seconds.
_UNWRITTEN_S = 300.0


@dataclass(slots=True)
class _Load:
    request_id: str
    context: TraceContext | None
    began_s: float
    wanted: int
    name: str
    found: int = 0
    by_source: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Save:
    request_id: str
    context: TraceContext
    keys: list[bytes]
    granted: tuple[int, ...] = ()


@dataclass(slots=True)
class _Writing:
    save: _Save
    tier: str
    began_s: float
    chunks: int
    left: int
    outcomes: Counter[str] = field(default_factory=Counter)


class StoreTraces:
    """See the module. Also the owner of the loads that hints begin (`owners.Owner`), which only looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._tracer = clock, tracing.tracer()
        self._loads: dict[LoadId, _Load] = {}
        self._saves: dict[SaveId, _Save] = {}
        self._hints: dict[SessionKey, tuple[TraceContext, float]] = {}
        #: Loads of traced hints, which their session's turn ends.
        self._hinted: dict[SessionKey, LoadId] = {}
        self._writing: dict[tuple[str, bytes], _Writing] = {}

    # ---- loads -------------------------------------------------------------------------------------------------
    def load(self, ident: LoadId, asked: pb.LoadRequest) -> None:
        """A worker asks for chunks. For a turn, that ends the load of its session's hint."""
        hint = asked.load_class == pb.PREFETCH
        context = trace_context.from_wire(asked.trace) if self._tracer is not None else None
        name = "store.prefetch" if hint else "store.load"
        self._loads[ident] = _Load(asked.request_id[:256], context, self._clock.now(), len(asked.chunks), name)
        if self._hinted and not hint:
            self._overtaken(session_from_wire(asked.session), "turn")

    def told(self, instruction: Found | End | Grant | Pieces) -> None:
        """A worker is told something about its load or save."""
        match instruction:
            case Found():
                self._found(instruction)
            case End(ident, usable):
                self._ended(ident, usable)
            case Grant():
                self._granted(instruction)

    def answer(self, instruction: Found | Pieces | End | Grant) -> None:
        """See `owners.Owner`: of a load that a hint began."""
        if isinstance(instruction, Found) and instruction.session is not None:
            hint = self._hints.pop(instruction.session, None)
            if hint is not None:
                self._overtaken(instruction.session, "another hint")
                self._hinted[instruction.session] = instruction.load
                self._loads[instruction.load] = _Load("", hint[0], hint[1], instruction.chunks, "store.prefetch")
        self.told(instruction)

    def advised(self, session: SessionKey, trace: str) -> None:
        """A hint came for this session."""
        context = trace_context.from_wire(trace) if self._tracer is not None else None
        self._hints.pop(session, None)
        if context is None:
            return
        for known in (self._hints, self._hinted):
            while len(known) >= _MOST_HINTS:
                oldest = next(iter(known))
                self._overtaken(oldest, "forgotten")
                self._hints.pop(oldest, None)
        self._hints[session] = context, self._clock.now()

    def cancelled(self, ident: LoadId, why: str = "cancelled") -> None:
        """A worker wants nothing more of its load."""
        if (load := self._loads.pop(ident, None)) is not None:
            self._record(load, why, 0)

    def _overtaken(self, session: SessionKey, by: str) -> None:
        """The load of the session's hint goes on no more, if there is one."""
        if (ident := self._hinted.pop(session, None)) is not None:
            self.cancelled(ident, by)

    def gone(self, owner: str) -> None:
        """A worker is gone."""
        for ident in [ident for ident in self._loads if ident[0] == owner]:
            self.cancelled(ident)
        for save in [save for save in self._saves if save[0] == owner]:
            del self._saves[save]

    def _found(self, told: Found) -> None:
        if (load := self._loads.get(told.load)) is not None:
            load.found = told.chunks
            load.by_source = Counter("dram" if source is None else source.name.lower() for source in told.sources)
            if load.request_id and log.is_enabled_for(logging.DEBUG):
                log.debug(
                    "load", request=load.request_id, wanted=load.wanted, found=load.found, sources=dict(load.by_source)
                )

    def _ended(self, ident: LoadId, usable: int) -> None:
        if (load := self._loads.pop(ident, None)) is None:
            return
        if usable < load.found and load.request_id:
            log.info("a load ended short", request=load.request_id, found=load.found, usable=usable)
        self._record(load, "ended", usable)

    def _record(self, load: _Load, end: str, usable: int) -> None:
        if self._tracer is None or load.context is None:
            return
        attributes: dict[str, Value] = {
            "upbeat.kv.wanted_chunks": load.wanted,
            "upbeat.kv.found_chunks": load.found,
            "upbeat.kv.usable_chunks": usable,
            "upbeat.kv.end": end,
        }
        attributes.update({f"upbeat.kv.{source}_chunks": count for source, count in load.by_source.items()})
        if load.request_id:
            attributes["upbeat.request_id"] = load.request_id
        self._span(load.name, load.context, load.began_s, attributes)

    # ---- saves -------------------------------------------------------------------------------------------------
    def save(self, ident: SaveId, asked: pb.SaveRequest) -> None:
        """A worker offers chunks. Only traced ones are remembered."""
        context = trace_context.from_wire(asked.trace) if self._tracer is not None else None
        if context is not None and len(self._saves) < _MOST_SAVES:
            self._saves[ident] = _Save(asked.request_id[:256], context, list(asked.keys))
        if asked.request_id:
            log.debug("save", request=asked.request_id[:256], chunks=len(asked.keys))

    def copied(self, ident: SaveId, ok: Iterable[int]) -> None:
        """The worker has copied these of the granted chunks: they will be written."""
        save = self._saves.pop(ident, None)
        if save is None:
            return
        keys = [save.keys[i] for i in ok if i in save.granted]
        if not keys or len(self._writing) + 2 * len(keys) > _MOST_KEYS:
            return
        now = self._clock.now()
        self._give_up(now)
        for tier in ("ssd", "blob"):
            writing = _Writing(save, tier, now, len(keys), len(keys))
            for key in keys:
                self._writing[tier, key] = writing

    def reporting(self, report: Callable[[Event], None]) -> Callable[[Event], None]:
        """`report`, which also tells `written`; itself while traces are off."""
        if self._tracer is None:
            return report

        def both(event: Event) -> None:
            if isinstance(event, SsdWritten | BlobWritten):
                self.written(event)
            report(event)

        return both

    def written(self, event: SsdWritten | BlobWritten) -> None:
        """A write to a slower tier has ended."""
        tier = "ssd" if isinstance(event, SsdWritten) else "blob"
        writing = self._writing.pop((tier, event.key), None)
        if writing is None:
            return
        writing.left -= 1
        writing.outcomes["written" if event.outcome is Wrote.OK else event.outcome.name.lower()] += 1
        if not writing.left:
            self._wrote(writing)

    def _granted(self, grant: Grant) -> None:
        if (save := self._saves.get(grant.save)) is not None:
            save.granted = grant.indices
            if not grant.indices:
                del self._saves[grant.save]

    def _give_up(self, now: float) -> None:
        """Record saves that wait too long; the oldest come first."""
        late: dict[int, _Writing] = {}
        for place, writing in list(self._writing.items()):
            if now - writing.began_s < _UNWRITTEN_S:
                break
            del self._writing[place]
            late[id(writing)] = writing
        for writing in late.values():
            writing.outcomes["unwritten"] = writing.left
            self._wrote(writing)

    def _wrote(self, writing: _Writing) -> None:
        attributes: dict[str, Value] = {
            "upbeat.kv.tier": writing.tier,
            "upbeat.kv.chunks": writing.chunks,
            "upbeat.request_id": writing.save.request_id,
        }
        attributes.update({f"upbeat.kv.{outcome}_chunks": count for outcome, count in writing.outcomes.items()})
        self._span("store.write_back", writing.save.context, writing.began_s, attributes)

    def _span(self, name: str, above: TraceContext, began_s: float, attributes: dict[str, Value]) -> None:
        tracer = self._tracer
        assert tracer is not None, "nothing is remembered without one"
        tracer.record(
            Span(name, tracer.child(above), above.span_id, began_s, self._clock.now(), Kind.SERVER, attributes)
        )

    def owners(self) -> dict[str, Owner]:
        """Itself, for the loads that hints begin; none while traces are off."""
        return {} if self._tracer is None else {ADVISORY: self}
