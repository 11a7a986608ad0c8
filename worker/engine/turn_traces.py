"""Spans of traced requests in the worker: preparing, waiting, loading KV, prefill, decoding, saving.

A request's stays in phases (`worker.core.turn_times`) become spans: neighbours of one kind are one, so a request that
is preempted or restarted waits, loads or computes several times. Recorded when the first token is there, and at the
end. Used on the engine's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts import trace_context
from contracts.request import Output
from contracts.trace_context import TraceContext
from contracts.turn_times import Phase
from runtime.spans import Kind, Span, Value
from runtime.tracing import Tracer
from worker.core.events import Found, SaveCopied
from worker.core.sequence import Sequence

#: The span's name, by phase.
_NAMES = {
    Phase.QUEUE: "queue",
    Phase.MEMORY: "queue",
    Phase.LOCATE: "kv load",
    Phase.LOAD_DRAM: "kv load",
    Phase.LOAD_SSD: "kv load",
    Phase.LOAD_PEER: "kv load",
    Phase.LOAD_BLOB: "kv load",
    Phase.OTHERS: "prefill",
    Phase.COMPUTE: "prefill",
    Phase.SLOWED: "prefill",
    Phase.DECODE: "decode",
}
#: Spans of phases of one request, and saves that are remembered; others are left out.
_MOST_SPANS, _MOST_SAVES = 32, 4096


@dataclass(slots=True)
class _Live:
    sequence: Sequence
    parent: TraceContext
    context: TraceContext
    began_s: float
    accepted_s: float
    tokens: int = 0
    first_s: float = 0.0
    #: Tokens that the store could bring, by tier, as it said last.
    by_tier: Counter[str] = field(default_factory=Counter)


class TurnTraces:
    """See the module. live: traced requests by id, until they end."""

    def __init__(self, tracer: Tracer, model: str, chunk_tokens: int) -> None:
        self._tracer, self._model, self._chunk_tokens = tracer, model, chunk_tokens
        self.live: dict[str, _Live] = {}
        #: By save, its span, the span above, when it was offered, its chunks.
        self._saves: dict[int, tuple[TraceContext, TraceContext, float, int]] = {}

    def accepted(self, sequence: Sequence, received_s: float, now: float) -> None:
        """The engine has a traced request. received_s: when the worker got it."""
        parent = trace_context.from_wire(sequence.request.trace)
        if parent is None:
            return
        sequence.times.stays = []
        began_s = min(received_s, now) if received_s else now
        context = self._tracer.child(parent)
        self.live[sequence.request.request_id] = _Live(sequence, parent, context, began_s, now)
        if began_s < now:
            self._record("prepare", context, began_s, now, {})

    def wire(self, request_id: str) -> str:
        """For the store; empty: not traced."""
        one = self.live.get(request_id)
        return one.context.to_wire() if one is not None else ""

    def found(self, event: Found) -> None:
        """The store has said what it can bring of a load."""
        for one in self.live.values():
            if one.sequence.load_id == event.load_id:
                sources = (source.name.lower() for source in event.sources[: event.chunks])
                one.by_tier = Counter(sources)

    def spoke(self, output: Output, now: float) -> None:
        """A request has got tokens, perhaps the last."""
        if (one := self.live.get(output.request_id)) is None:
            return
        one.tokens += len(output.tokens)
        if not one.first_s:
            one.first_s = self._phases(one, output) or now
        if output.finish_reason is not None:
            self._end(output.request_id, one, now, {"gen_ai.response.finish_reasons": [output.finish_reason]})

    def gone(self, request_id: str, why: str, now: float) -> None:
        """A request ended without its last token."""
        if (one := self.live.get(request_id)) is not None:
            self._end(request_id, one, now, {"error.type": why}, "" if why == "cancelled" else why)

    # ---- saves -------------------------------------------------------------------------------------------------
    def saving(self, save_id: int, request_id: str, chunks: int, now: float) -> str:
        """Chunks of a request are offered to the store. Returns the text for it; empty: not traced."""
        one = self.live.get(request_id)
        if one is None or len(self._saves) >= _MOST_SAVES:
            return ""
        context = self._tracer.child(one.context)
        self._saves[save_id] = context, one.context, now, chunks
        return context.to_wire()

    def saved(self, event: SaveCopied, now: float) -> None:
        """The copies into the arena have ended."""
        if (save := self._saves.pop(event.save_id, None)) is None:
            return
        context, above, began_s, chunks = save
        attributes: dict[str, Value] = {
            "upbeat.kv.tokens": chunks * self._chunk_tokens,
            "upbeat.kv.copied_tokens": len(event.ok) * self._chunk_tokens,
            "upbeat.kv.held_tokens": len(event.held) * self._chunk_tokens,
            "upbeat.kv.refused_tokens": len(event.refused) * self._chunk_tokens,
        }
        self._tracer.record(Span("kv save", context, above.span_id, began_s, now, attributes=attributes))

    # ---- spans -------------------------------------------------------------------------------------------------
    def _phases(self, one: _Live, output: Output) -> float:
        """Record the phases until the first token. Returns their end; 0: there are none."""
        sequence = one.sequence
        cached = min(output.cached_tokens, sequence.prompt_tokens)
        in_hbm = min(sequence.cached_here, cached)
        load: dict[str, Value] = {f"upbeat.kv.{tier}_tokens": n * self._chunk_tokens for tier, n in one.by_tier.items()}
        load |= {"upbeat.kv.hbm_tokens": in_hbm, "upbeat.kv.loaded_tokens": cached - in_hbm}
        prefill: dict[str, Value] = {"upbeat.computed_tokens": sequence.prompt_tokens - cached}
        about, ended = {"kv load": load, "prefill": prefill}, 0.0
        for name, began_s, ended_s in _joined(sequence.times.stays or ()):
            self._record(name, one.context, began_s, ended_s, about.get(name, {}))
            ended = ended_s
        sequence.times.stays = None
        return ended

    def _end(self, request_id: str, one: _Live, now: float, attributes: dict[str, Value], error: str = "") -> None:
        del self.live[request_id]
        sequence = one.sequence
        if one.first_s:
            self._record("decode", one.context, one.first_s, now, {"gen_ai.usage.output_tokens": one.tokens})
        elif sequence.times.stays:
            for name, began_s, ended_s in _joined(sequence.times.stays):
                self._record(name, one.context, began_s, ended_s, {})
        attributes |= {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": sequence.prompt_tokens,
            "gen_ai.usage.output_tokens": one.tokens,
            "upbeat.request_id": request_id,
        }
        self._tracer.record(
            Span(
                "worker.generate", one.context, one.parent.span_id, one.began_s, now, Kind.SERVER, attributes,
                error=error,
            )
        )  # fmt: skip

    def _record(
        self, name: str, above: TraceContext, began_s: float, ended_s: float, attributes: dict[str, Value]
    ) -> None:
        self._tracer.record(
            Span(name, self._tracer.child(above), above.span_id, began_s, ended_s, attributes=attributes)
        )


def _joined(stays: Iterable[tuple[Phase, float, float]]) -> list[tuple[str, float, float]]:
    """Stays as (name, begin, end); neighbours with one name are one."""
    found: list[tuple[str, float, float]] = []
    for phase, began_s, ended_s in stays:
        name = _NAMES[phase]
        if found and found[-1][0] == name:
            found[-1] = name, found[-1][1], ended_s
        elif len(found) < _MOST_SPANS:
            found.append((name, began_s, ended_s))
    return found
