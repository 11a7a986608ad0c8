"""A node with the production cores of engine (`engine`) and store (`store`). It makes their instructions take time, and
decides nothing.

To save time, pieces are larger than on real nodes (`turns.coarse`), so evictions, loads and prefix matches are coarser.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from contracts.ids import SessionKey
from kvstore.core import events as store_ev
from kvstore.core import instructions as store_do
from loadtest.simulate.channels import Channel
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.hosted import Host, HostedModel
from loadtest.simulate.mean_load import MeanLoad
from loadtest.simulate.mechanisms import ALL, PEER, Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.store import Blob, NodeStore, Ways
from loadtest.simulate.turns import most_tokens, slabs
from scheduler.core.directory import Held
from scheduler.core.fleet import LoadReport
from worker.core.pages import PagePool


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
            name, kind, [self.shape], events, ways, blob_tier, stores, has, self._disturb
        )
        self.store.owners["worker"] = self
        host = Host(events, self.store, self.bus, has, self._over)
        self.hosted = HostedModel(kind, host, PagePool(*slabs(kind), self.shape.layers))
        self.core, self.engine, self.outstanding = self.hosted.core, self.hosted.engine, self.hosted.outstanding
        self._ended_ids: list[str] = []
        self._load = MeanLoad(events)

    def _disturb(self, seconds: float) -> None:
        self.engine.disturb(seconds)

    # ---- residency ---------------------------------------------------------------------------------------------
    def _residency(self, session: SessionKey) -> tuple[int, int]:
        index = self.store.core.index
        manifest = index.manifests.get(session)
        if manifest is None:
            return 0, 0
        dram, ssd = (index.residency(manifest.keys, tier).tokens for tier in ("dram", "ssd"))
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
        tokens = request.prompt_tokens + request.answer_tokens
        if tokens > most_tokens(self.kind):
            raise ValueError(f"a request of {tokens} tokens does not fit a node's HBM; use --length-scale")
        self._load.changed(len(self.outstanding) + 1)
        self.hosted.submit(request, self._peers(sources))

    def _peers(self, sources: tuple[str, ...]) -> tuple[str, ...]:
        return sources if PEER in self.has.tiers else ()

    def _over(self, request: Request) -> None:
        self._load.changed(len(self.outstanding))
        self._ended_ids.append(request.request_id)
        self._told(request)

    # ---- answers of the store ----------------------------------------------------------------------------------
    def answer(self, said: store_do.Instruction) -> None:
        """See `store.Owner`. The engine gets it after the store's present instructions."""
        self._events.at(self._events.now, lambda: self.hosted.heard(said))

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
        """See `HostedModel.recomputed_tokens`."""
        return self.hosted.recomputed_tokens

    def validate(self) -> None:
        """Raise AssertionError if a core's invariant is broken."""
        self.store.core.validate()
        self.hosted.validate()
