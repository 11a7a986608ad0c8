"""A node with the production cores of engine (`engine`) and store (`store`). It makes their instructions take time, and
decides nothing.

To save time, pieces are larger than on real nodes (`turns.coarse`), so evictions, loads and prefix matches are coarser.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from blake3 import blake3

from contracts.ids import SessionKey
from kvstore.core import events as store_ev
from kvstore.core import instructions as store_do
from loadtest.simulate.channels import Channel
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.engine import Engine
from loadtest.simulate.events import Events
from loadtest.simulate.mean_load import MeanLoad
from loadtest.simulate.mechanisms import ALL, PEER, Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.store import Blob, NodeStore, Ways
from loadtest.simulate.turns import Coming, most_tokens, sequence_of, slabs
from scheduler.core.directory import Held
from scheduler.core.fleet import LoadReport
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


class SimulatedNode:
    """See the module. ended: called with each complete answer. has: its mechanisms. Invariants: those of its cores
    (`validate`)."""

    def __init__(
        self,
        name: str,
        kind: NodeKind,
        events: Events,
        *,
        ended: Callable[[Request], None],
        has: Mechanisms = ALL,
        blob_tier: Blob,
        stores: dict[str, NodeStore],
    ) -> None:
        self.name, self.kind, self._events, self._told, self.has = name, kind, events, ended, has
        self.shape, self.token_bytes = kind.shape, kind.shape.token_bytes
        self.link, self.disk = Channel(events, kind.link_bytes_per_s), Channel(events, kind.ssd_bytes_per_s)
        self.bus, self.blob = Channel(events, kind.dram_bytes_per_s), Channel(events, kind.blob_bytes_per_s)
        ways = Ways(self.disk, self.link, self.blob)
        self.store = stores[name] = NodeStore(
            name, kind, self.shape, events, ways, blob_tier, stores, has, self._disturb
        )
        self.store.owners["worker"] = self
        pool = PagePool(*slabs(kind), self.shape.layers)
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
        self.core = EngineCore(CoreState(self.shape, cache, policy, lambda tenant: b"", kind.model))
        self.core.handle(ev.StoreUp(), events.now)
        self._seed_rates()
        self.engine = Engine(
            events, kind, self.core, execute=self._do, spoke=self._spoke, ended=self._over, is_here=self._is_here
        )
        self.loads: dict[int, Coming] = {}
        #: Loads that closed during the current step, which may still need their KV.
        self._closed: dict[int, Coming] = {}
        self._saves: dict[int, do.OfferSave] = {}
        self.outstanding: dict[str, tuple[Request, Sequence]] = {}
        self._ended_ids: list[str] = []
        self._load = MeanLoad(events)

    def _disturb(self, seconds: float) -> None:
        self.engine.disturb(seconds)

    def _seed_rates(self) -> None:
        kind, piece = self.kind, self.shape.piece_bytes
        far = self.has.codec
        rates = {
            Source.SSD: kind.ssd_bytes_per_s,
            Source.PEER: far * kind.link_bytes_per_s,
            Source.BLOB: far * kind.blob_bytes_per_s,
        }
        for source, rate in rates.items():
            self.core.state.rates.seed(source, LoadRate(0.005, piece / rate))
        self.core.state.rates.seed(Source.DRAM, LoadRate(0.0, piece / kind.dram_bytes_per_s))

    # ---- residency ---------------------------------------------------------------------------------------------
    def _residency(self, session: SessionKey) -> tuple[int, int]:
        index = self.store.core.index
        manifest = index.manifests.get(session)
        if manifest is None:
            return 0, 0
        dram, ssd = index.residency(manifest.keys, "dram").tokens, index.residency(manifest.keys, "ssd").tokens
        return max(dram, ssd), dram

    def held(self) -> list[tuple[SessionKey, Held]]:
        """Sessions whose residency changed since the last call, with what the store holds of each."""
        index = self.store.core.index
        changed, index.dirty = index.dirty, set()
        found = []
        for session in sorted(changed, key=lambda s: s.session_id):
            tokens, dram = self._residency(session)
            found.append((session, Held(tokens, tokens * self.token_bytes, dram)))
        return found

    # ---- turns -------------------------------------------------------------------------------------------------
    def submit(self, request: Request, sources: tuple[str, ...]) -> None:
        """Take a turn that was placed here. Raises ValueError if it can never fit."""
        tokens, size = request.prompt_tokens + request.answer_tokens, self.shape.chunk_tokens
        chunks = -(-tokens // size)
        if tokens > most_tokens(self.kind):
            raise ValueError(f"a request of {tokens} tokens does not fit a node's HBM; use --length-scale")
        kept = min(request.history_tokens, request.prompt_tokens - 1) // size * size if self.has.keeps else 0
        # A session's history only grows, so its chunks are identified by position.
        keys = [blake3(f"{request.session} {chunk}".encode()).digest() for chunk in range(chunks)]
        sequence = sequence_of(request, kept, keys, self._peers(sources))
        self.outstanding[request.request_id] = request, sequence
        self._load.changed(len(self.outstanding))
        self.engine.tell(ev.Submitted(sequence))

    def _peers(self, sources: tuple[str, ...]) -> tuple[str, ...]:
        return sources if PEER in self.has.tiers else ()

    def _spoke(self, sequence: Sequence) -> None:
        request = self.outstanding[sequence.request.request_id][0]
        # `cached` may exceed the history: a request preempted in its prompt finds what it computed itself.
        request.first_s, request.cached_tokens = self._events.now, min(sequence.cached, request.history_tokens)

    def _over(self, sequence: Sequence) -> None:
        request, _ = self.outstanding[sequence.request.request_id]
        request.end_s = self._events.now
        del self.outstanding[request.request_id]
        self._load.changed(len(self.outstanding))
        self._ended_ids.append(request.request_id)
        self._told(request)

    # ---- instructions of the engine's core ---------------------------------------------------------------------
    def _do(self, asked: do.Instruction) -> None:
        now = self._events.now
        match asked:
            case do.OpenLoad():
                self.loads[asked.load_id] = Coming(asked)
                wants = [(key, tuple(layers)) for key, layers in zip(asked.keys, asked.layers, strict=True)]
                kind = store_ev.LoadKind.PREFETCH if asked.hint else store_ev.LoadKind.DEMAND
                args = (asked.session, self.shape.fingerprint, wants, tuple(asked.source_nodes), asked.priority, now)
                self.store.handle(store_ev.LoadWanted(_named(asked.load_id), kind, *args))
            case do.HaltLoad(load_id):
                del self.loads[load_id]
                self.store.handle(store_ev.LoadCancelled(_named(load_id), now))
            case do.OfferSave():
                self._saves[asked.save_id] = asked
                self.store.handle(
                    store_ev.SaveWanted(
                        ("worker", asked.save_id), asked.session, self.shape.fingerprint, asked.keys, now
                    )
                )
            case do.Saved(save_id, ok, aborted):
                self.store.handle(store_ev.SaveEnded(("worker", save_id), ok, aborted, now))
            case do.TurnEnded(manifest, ended_s):
                manifest.last_use_s = ended_s
                self.store.handle(store_ev.TurnEnded(manifest, now))
            case do.Timed(request_id, times):
                request, _ = self.outstanding[request_id]
                if request.first_s < 0:
                    request.waits = times
            case do.Refuse(request_id):
                raise RuntimeError(f"{self.name} refused {request_id}")
            case _:
                pass  # memory and logs need no simulation

    def _is_here(self, coming: do.Coming) -> bool | None:
        load = self.loads.get(coming.load_id) or self._closed.get(coming.load_id)
        if load is None:
            return None
        if all((coming.row, layer) in load.here for layer in coming.layers):
            return True
        return False if coming.load_id in self.loads else None

    # ---- answers of the store ----------------------------------------------------------------------------------
    def answer(self, said: store_do.Instruction) -> None:
        """See `store.Owner`. The engine gets it after the store's present instructions."""
        self._events.at(self._events.now, lambda: self._heard(said))

    def _heard(self, said: store_do.Instruction) -> None:
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
            self.bus.send(bytes_, key, lambda layer=layer, indices=indices: self._copied(load, layer, indices))  # type: ignore[misc]

    def _copied(self, load: Coming, layer: int, indices: list[int]) -> None:
        load.on_bus -= 1
        load_id, now = load.asked.load_id, self._events.now
        if self.loads.get(load_id) is not load:
            return
        load.here.update((index, layer) for index in indices)
        load.last_s = now
        self.store.handle(store_ev.PiecesTaken(_named(load_id), [(index, layer) for index in indices], now))
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

    # ---- hints -------------------------------------------------------------------------------------------------
    def prefetch(
        self,
        session: SessionKey,
        priority: int,
        expires_s: float,
        tokens: int,
        sources: tuple[str, ...],
        arrival_s: float | None = None,
    ) -> None:
        """Carry out the scheduler's command to prefetch for a hint."""
        now = self._events.now
        lead_s = math.inf if arrival_s is None else max(arrival_s - now, 0.0)
        self.store.handle(store_ev.Advised(session, priority, lead_s, expires_s - now, self._peers(sources), now))

    def withdraw(self, session: SessionKey) -> None:
        """The hint ended, or moved to another node."""
        self.store.handle(store_ev.Invalidated(session, self._events.now))

    # ---- reports -----------------------------------------------------------------------------------------------
    def load(self) -> tuple[LoadReport, list[str], list[str]]:
        """A worker's report: its load, ids of its requests, and ids of those that ended since the last call."""
        self.engine.catch_up()
        counts = self.core.counts()
        load = LoadReport(
            running=counts.running,
            waiting=counts.waiting,
            outstanding_s=sum(counts.outstanding_s.values()),
            request_s=counts.request_s,
            hbm_pages_total=counts.pages_total,
            hbm_pages_free=counts.pages_free,
            prefill_token_s=counts.prefill_token_s,
            by_priority=counts.outstanding_s,
        )
        ended, self._ended_ids = self._ended_ids, []
        return load, list(self.outstanding), ended

    def mean_load(self, window_s: float) -> float:
        """Mean number of requests since the last call."""
        return self._load.take(window_s)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again although they had been cached or computed."""
        return self.core.admission.recomputed_tokens + sum(self.core.scheduling.recomputed_tokens.values())

    def validate(self) -> None:
        """Raise AssertionError if a core's invariant is broken."""
        self.store.core.validate()
        self.core.validate()
        assert self.core.live.keys() == self.outstanding.keys()


def _named(load_id: int) -> store_ev.LoadId:
    return "worker", str(load_id)
