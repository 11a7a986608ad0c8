"""One model of a simulated node: the production core of its engine, whose loads and saves take time on the node's
channels. Decides nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from kvstore.core import events as store_ev
from kvstore.core import instructions as store_do
from loadtest.simulate.channels import Channel
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.engine import Engine, Shell
from loadtest.simulate.events import Events
from loadtest.simulate.mechanisms import Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.store import NodeStore
from loadtest.simulate.token_gaps import TokenGaps
from loadtest.simulate.turns import Coming, sequence_of
from storelink.core.load_plan import LoadRate, Source
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.engine_core import EngineCore
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.policy import Policy
from worker.core.sequence import Sequence
from worker.core.state import CoreState

_BUS_DEMAND, _BUS_HINT = (0, 0), (1, 0)
_WAITING = 1 << 30


@dataclass(frozen=True, slots=True)
class Host:
    """What a node gives each of its models. bus: from DRAM to HBM. ended: called with each complete answer. pages:
    called with the model's name, and slabs mapped and unmapped."""

    events: Events
    store: NodeStore
    bus: Channel
    has: Mechanisms
    ended: Callable[[Request], None]
    pages: Callable[[str, int, int], None] = lambda model, mapped, unmapped: None


class HostedModel:
    """See the module. make_engine: its engine in virtual time. Invariant (`validate`): the core's live sequences are
    the outstanding requests."""

    def __init__(
        self,
        kind: NodeKind,
        host: Host,
        pool: PagePool,
        make_engine: Callable[[Events, NodeKind, EngineCore, Shell], Engine] = Engine,
        ids: Iterator[int] | None = None,
    ) -> None:
        """ids: for its loads and saves, unique on the node."""
        self.kind, self.shape, self._host, self._events = kind, kind.shape, host, host.events
        has = host.has
        cache = HbmCache(pool, layer_priority=has.layer_priority, hold_hinted=not has.cooperative)
        policy = Policy(
            cache=has.keeps,
            layerwise=has.layerwise,
            layer_priority=has.layer_priority,
            plan_layers=kind.layers_modelled,
            max_batch=kind.max_batch,
            max_waiting=_WAITING,
            step_tokens=kind.step_tokens,
            mixed_step_s=kind.mixed_step_s,
        )
        ids = ids or itertools.count(1)
        self.core = EngineCore(CoreState(self.shape, cache, policy, lambda tenant: b"", kind.model, ids))
        self.core.handle(ev.StoreUp(), host.events.now)
        self._seed_rates()
        self.engine = make_engine(
            host.events, kind, self.core, Shell(self._do, self._spoke, self._over, self._is_here, self._said)
        )
        self.gaps = TokenGaps()
        self.loads: dict[int, Coming] = {}
        #: Loads that closed during the current step, which may still need their KV.
        self._closed: dict[int, Coming] = {}
        self._saves: dict[int, do.OfferSave] = {}
        self.outstanding: dict[str, tuple[Request, Sequence]] = {}

    def _seed_rates(self) -> None:
        kind, piece = self.kind, self.shape.piece_bytes
        far = self._host.has.codec
        rates = {
            Source.SSD: kind.ssd_bytes_per_s,
            Source.PEER: far * kind.link_bytes_per_s,
            Source.BLOB: far * kind.blob_bytes_per_s,
        }
        for source, rate in rates.items():
            self.core.state.rates.seed(source, LoadRate(0.005, piece / rate))
        self.core.state.rates.seed(Source.DRAM, LoadRate(0.0, piece / kind.dram_bytes_per_s))

    # ---- requests ----------------------------------------------------------------------------------------------
    def submit(self, request: Request, sources: tuple[str, ...]) -> None:
        """Take a request that fits."""
        tokens, size = request.prompt_tokens + request.answer_tokens, self.shape.chunk_tokens
        chunks = -(-tokens // size)
        kept = min(request.history_tokens, request.prompt_tokens - 1) // size * size if self._host.has.keeps else 0
        # A session's history only grows, so its chunks are identified by position.
        keys = [blake3(f"{request.session} {chunk}".encode()).digest() for chunk in range(chunks)]
        sequence = sequence_of(request, kept, keys, sources)
        self.outstanding[request.request_id] = request, sequence
        self.engine.tell(ev.Submitted(sequence))

    def _spoke(self, sequence: Sequence) -> None:
        request = self.outstanding[sequence.request.request_id][0]
        # `cached` may exceed the history: a request preempted in its prompt finds what it computed itself.
        request.first_s, request.cached_tokens = self._events.now, min(sequence.cached, request.history_tokens)

    def _said(self, sequences: list[Sequence], count: int) -> None:
        now = self._events.now
        for sequence in sequences:
            request = self.outstanding[sequence.request.request_id][0]
            if request.last_s >= 0:
                self.gaps.add((now - request.last_s) / count, count)
            request.last_s = now

    def _over(self, sequence: Sequence) -> None:
        request, _ = self.outstanding.pop(sequence.request.request_id)
        request.end_s = self._events.now
        self._host.ended(request)

    # ---- instructions of the engine's core ---------------------------------------------------------------------
    def _do(self, asked: do.Instruction) -> None:
        now, store = self._events.now, self._host.store
        match asked:
            case do.OpenLoad():
                self.loads[asked.load_id] = Coming(asked)
                wants = [(key, tuple(layers)) for key, layers in zip(asked.keys, asked.layers, strict=True)]
                kind = store_ev.LoadKind.PREFETCH if asked.hint else store_ev.LoadKind.DEMAND
                args = (asked.session, self.shape.fingerprint, wants, tuple(asked.source_nodes), asked.priority, now)
                store.handle(store_ev.LoadWanted(_named(asked.load_id), kind, *args))
            case do.HaltLoad(load_id):
                del self.loads[load_id]
                store.handle(store_ev.LoadCancelled(_named(load_id), now))
            case do.OfferSave():
                self._saves[asked.save_id] = asked
                store.handle(
                    store_ev.SaveWanted(
                        ("worker", asked.save_id), asked.session, self.shape.fingerprint, asked.keys, now
                    )
                )
            case do.Saved(save_id, ok, aborted):
                store.handle(store_ev.SaveEnded(("worker", save_id), ok, aborted, now))
            case do.TurnEnded(manifest, ended_s):
                manifest.last_use_s = ended_s
                store.handle(store_ev.TurnEnded(manifest, now))
            case do.Timed(request_id, times):
                request, _ = self.outstanding[request_id]
                if request.first_s < 0:
                    request.waits = times
            case do.MapSlabs(slabs):
                self._host.pages(self.kind.model, len(slabs), 0)
            case do.UnmapSlabs(slabs):
                self._host.pages(self.kind.model, 0, len(slabs))
            case do.Refuse(request_id):
                raise RuntimeError(f"{self.kind.model} refused {request_id}")
            case _:
                pass  # logs, and copies within HBM, take no time

    def _is_here(self, coming: do.Coming) -> bool | None:
        load = self.loads.get(coming.load_id) or self._closed.get(coming.load_id)
        if load is None:
            return None
        if all((coming.row, layer) in load.here for layer in coming.layers):
            return True
        return False if coming.load_id in self.loads else None

    # ---- answers of the store ----------------------------------------------------------------------------------
    def heard(self, said: store_do.Instruction) -> None:
        """The store's answer about this model's loads, saves and hints."""
        match said:
            case store_do.Found():
                sources = tuple(Source.DRAM if s is None else Source(s + 1) for s in said.sources)
                self.engine.tell(ev.Found(int(said.load[1]), said.chunks, sources, said.due_s))
            case store_do.Pieces():
                self._pieces(said)
            case store_do.End():
                if (load := self.loads.get(int(said.load[1]))) is not None:
                    load.ended = True
                    self._perhaps_close(load)
            case store_do.Grant():
                self._granted(said)
            case store_do.Offer():
                self.engine.tell(ev.Offered(said.session, said.keys, said.priority, said.arrival_s, said.expires_s))
            case store_do.TellInvalid():
                self.engine.tell(ev.Withdrawn(said.session))
            case _:
                pass

    def _pieces(self, given: store_do.Pieces) -> None:
        """Pieces are in the arena: copy them into HBM, layer by layer, and report them."""
        load = self.loads.get(int(given.load[1]))
        if load is None:
            return
        load.first_s = load.first_s or self._events.now
        by_layer: dict[int, list[int]] = {}
        for index, layer, _, _ in given.pieces:
            by_layer.setdefault(layer, []).append(index)
        for layer, indices in sorted(by_layer.items()):
            load.on_bus += 1
            key = _BUS_HINT if load.asked.hint else _BUS_DEMAND
            bytes_ = float(len(indices) * self.shape.piece_bytes)
            self._host.bus.send(bytes_, key, lambda layer=layer, indices=indices: self._copied(load, layer, indices))  # type: ignore[misc]

    def _copied(self, load: Coming, layer: int, indices: list[int]) -> None:
        load.on_bus -= 1
        load_id, now = load.asked.load_id, self._events.now
        if self.loads.get(load_id) is not load:
            return
        load.here.update((index, layer) for index in indices)
        load.last_s = now
        self._host.store.handle(store_ev.PiecesTaken(_named(load_id), [(index, layer) for index in indices], now))
        self.engine.tell(ev.PiecesCame(load_id, np.array(indices), np.full(len(indices), layer)))
        self._perhaps_close(load)

    def _perhaps_close(self, load: Coming) -> None:
        if load.ended and not load.on_bus and self.loads.get(load.asked.load_id) is load:
            closed = ev.LoadClosed(load.asked.load_id, len(load.here), load.first_s, load.last_s)
            if self.engine.stepping:
                self._closed[closed.load_id] = load
                self.engine.after_step.append(self._closed.clear)
            del self.loads[closed.load_id]
            self.engine.tell(closed)

    def _granted(self, grant: store_do.Grant) -> None:
        save = self._saves.pop(int(grant.save[1]))
        copied = ev.SaveCopied(save.save_id, list(grant.indices), [], list(grant.held), list(grant.refused))

        def copy() -> None:
            # The bus is full duplex: saves do not delay loads.
            seconds = len(copied.ok) * self.shape.chunk_bytes / self.kind.dram_bytes_per_s
            self._events.at(self._events.now + seconds, lambda: self.engine.tell(copied))

        if save.ahead and self.engine.stepping:
            self.engine.after_step.append(copy)
        else:
            copy()

    # ---- reports -----------------------------------------------------------------------------------------------
    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again although they had been cached or computed."""
        return self.core.admission.recomputed_tokens + sum(self.core.scheduling.recomputed_tokens.values())

    def validate(self) -> None:
        """Raise AssertionError if an invariant of the core is broken."""
        self.core.validate()
        assert self.core.live.keys() == self.outstanding.keys()


def _named(load_id: int) -> store_ev.LoadId:
    return "worker", str(load_id)
