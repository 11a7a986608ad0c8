"""A node of another system: its tiers, with whole sessions; the channels between them; and admission to the device.

A turn's cache arrives in two parts: into DRAM from the SSD, a peer or the blob tier when the turn arrives, and from
DRAM into HBM when there is room. A request reserves HBM for prompt and answer, and begins when all of its cache is
there, as these systems have neither hints nor layer-wise loads. Admission order and batching are those of our worker
(`worker.core`). With an SSD, what DRAM keeps of an ended turn is written there too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from contracts.ids import SessionKey
from loadtest.simulate.channels import Channel
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.mean_load import MeanLoad
from loadtest.simulate.mechanisms import BLOB, DRAM, HBM, PEER, SSD, Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.systems.engine import Engine
from loadtest.simulate.systems.running import Running
from loadtest.simulate.systems.tiers import SessionTier
from scheduler.core.directory import Held
from scheduler.core.fleet import LoadReport


class OtherNode:
    """See the module. peers: the whole fleet, by name. ended: called with each complete answer. has: its tiers and
    codec. keep: the tiers that keep an ended turn's KV; default: all."""

    def __init__(
        self,
        name: str,
        kind: NodeKind,
        events: Events,
        peers: dict[str, OtherNode],
        *,
        ended: Callable[[Request], None],
        has: Mechanisms,
        keep: Callable[[OtherNode, Running], frozenset[str]] | None = None,
    ) -> None:
        self.name, self.kind, self._events, self._peers, self._told, self.has = name, kind, events, peers, ended, has
        self._keep = keep or (lambda node, sequence: has.tiers)
        self.engine = Engine(events, kind, self._spoke, self._over)
        self.hbm, self.dram = (SessionTier(size, self._changed) for size in (kind.hbm_bytes, kind.dram_bytes))
        self.ssd = SessionTier(kind.ssd_bytes if SSD in has.tiers else 0.0, self._changed)
        self.disk, self.writes = Channel(events, kind.ssd_bytes_per_s), Channel(events, kind.ssd_bytes_per_s)
        self.link = Channel(events, kind.link_bytes_per_s)
        self.bus, self.blob = Channel(events, kind.dram_bytes_per_s), Channel(events, kind.blob_bytes_per_s)
        self.token_bytes = kind.shape.token_bytes
        self.outstanding: dict[str, Running] = {}
        self._waiting: list[tuple[tuple[int, float, int], Running]] = []
        self._running = self._arrivals = 0
        self._dirty: set[SessionKey] = set()
        self._ended_ids: list[str] = []
        #: HBM reserved for requests that are migrating here.
        self.incoming_bytes = 0.0
        self._load = MeanLoad(events)

    # ---- residency ---------------------------------------------------------------------------------------------
    def tokens_in(self, tier: SessionTier, session: SessionKey) -> int:
        """Tokens of the session's prefix in `tier`."""
        return round(tier.bytes_of(session) / self.token_bytes)

    def _changed(self, session: SessionKey) -> None:
        self._dirty.add(session)

    def held(self) -> list[tuple[SessionKey, Held]]:
        """A store's report: sessions whose residency changed since the last call."""
        changed, self._dirty = self._dirty, set()
        found = []
        for session in sorted(changed, key=lambda s: s.session_id):
            dram = self.tokens_in(self.dram, session)
            tokens = max(dram, self.tokens_in(self.ssd if DRAM in self.has.tiers else self.hbm, session))
            found.append((session, Held(tokens, tokens * self.token_bytes, dram)))
        return found

    # ---- turns -------------------------------------------------------------------------------------------------
    def submit(self, request: Request, sources: tuple[str, ...]) -> None:
        """Take a turn that was placed here. Raises ValueError if it can never fit."""
        tokens = request.prompt_tokens + request.answer_tokens
        need = tokens * self.token_bytes
        if need > self.kind.hbm_bytes:
            raise ValueError(f"a request of {tokens} tokens does not fit a node's HBM; use --length-scale")
        self._arrivals += 1
        sequence = Running(request, self._arrivals, self._events.now, self.engine.steps, self.kind.max_tokens, need)
        self.outstanding[request.request_id] = sequence
        self._load.changed(len(self.outstanding))
        chunk, kept = self.kind.shape.chunk_tokens, 0
        if self.has.keeps:
            kept = min(request.history_tokens, request.prompt_tokens - 1) // chunk * chunk
            self._gather(sequence, kept, sources)
        hbm_tokens = int(self.kind.hbm_bytes // self.token_bytes)
        heapq.heappush(self._waiting, (sequence.order(kept, self.engine.pace, hbm_tokens, self._running), sequence))
        self._admit()

    def _gather(self, sequence: Running, wanted: int, sources: tuple[str, ...]) -> None:
        """Fetch what is not in DRAM or HBM."""
        session = sequence.request.session
        near = max(self.tokens_in(self.hbm, session), self.tokens_in(self.dram, session))
        if BLOB not in self.has.tiers:
            there = [peer.tokens_in(peer.dram, session) for peer in self._peers_of(sources)]
            wanted = min(wanted, max(near, self.tokens_in(self.ssd, session), *there))
        for tier in (self.hbm, self.dram, self.ssd):
            tier.touch(session)
        if wanted > near:
            parts = self._parts(session, near, wanted, sources)
            left = [len(parts)]

            def came() -> None:
                left[0] -= 1
                if not left[0]:
                    self._came(sequence, wanted, parts)

            sequence.awaits += 1
            for way, bytes_ in parts:
                way.send(bytes_, (0, sequence.request.priority), came)
        sequence.load_tokens = wanted
        sequence.found = wanted // self.kind.shape.chunk_tokens

    def _peers_of(self, sources: tuple[str, ...]) -> list[OtherNode]:
        return [self._peers[name] for name in sources] if PEER in self.has.tiers else []

    def _parts(
        self, session: SessionKey, near: int, wanted: int, sources: tuple[str, ...]
    ) -> list[tuple[Channel, float]]:
        """Bytes by channel for tokens `near` to `wanted`: from the SSD, then from the first peer that has more, then
        from the blob tier."""
        parts: list[tuple[Channel, float]] = []
        own = min(wanted, max(near, self.tokens_in(self.ssd, session)))
        if own > near:
            parts.append((self.disk, (own - near) * self.token_bytes / self.has.codec))
        there = next((n for peer in self._peers_of(sources) if (n := peer.tokens_in(peer.dram, session)) > own), own)
        have = min(wanted, there)
        if have > own:
            parts.append((self.link, (have - own) * self.token_bytes / self.has.codec))
        if wanted > have:
            parts.append((self.blob, (wanted - have) * self.token_bytes / self.has.codec))
        return parts

    def _came(self, sequence: Running, tokens: int, parts: list[tuple[Channel, float]]) -> None:
        """A turn's cache has arrived in DRAM."""
        if self.has.decode_bytes_per_s:
            self.engine.disturb(sum(bytes_ for _, bytes_ in parts) * self.has.codec / self.has.decode_bytes_per_s)
        session, bytes_ = sequence.request.session, float(tokens * self.token_bytes)
        if self.dram.bytes_of(session) < bytes_:
            self.dram.put(session, bytes_)
        self._changed(session)
        self._arrived(sequence)

    def _arrived(self, sequence: Running) -> None:
        sequence.awaits -= 1
        if sequence.admitted and not sequence.awaits:
            self._start(sequence)

    def _admit(self) -> None:
        """Admit waiting requests by priority and due time. None overtakes one that does not fit, as large ones would
        starve."""
        while self._waiting and self._running < self.kind.max_batch:
            sequence = self._waiting[0][1]
            session = sequence.request.session
            held = self.hbm.take(session)
            if not self.hbm.reserve(sequence.need_bytes):
                if held:
                    self.hbm.put(session, held)
                return
            heapq.heappop(self._waiting)
            self._running += 1
            sequence.admitted = True
            bytes_ = sequence.load_tokens * self.token_bytes - held
            if bytes_ > 0:
                sequence.awaits += 1
                self.bus.send(bytes_, (0, sequence.request.priority), lambda s=sequence: self._arrived(s))  # type: ignore[misc]
            elif not sequence.awaits:
                self._start(sequence)

    def _start(self, sequence: Running) -> None:
        sequence.prefilled = sequence.request.cached_tokens = sequence.load_tokens
        self.engine.join(sequence)

    def _spoke(self, sequence: Running) -> None:
        sequence.request.first_s = self._events.now

    def _over(self, sequence: Running) -> None:
        """An answer is complete. Its KV was written to its tiers while it was computed."""
        request = sequence.request
        request.end_s = self._events.now
        del self.outstanding[request.request_id]
        self._load.changed(len(self.outstanding))
        self._ended_ids.append(request.request_id)
        self._running -= 1
        self._free(sequence)
        self._told(request)
        self._admit()

    def _free(self, sequence: Running) -> None:
        self.hbm.release(sequence.need_bytes)
        if not self.has.keeps:
            return
        request, chunk = sequence.request, self.kind.shape.chunk_tokens
        bytes_ = float((request.prompt_tokens + request.answer_tokens) // chunk * chunk * self.token_bytes)
        keep = self._keep(self, sequence)
        for name, tier in ((HBM, self.hbm), (DRAM, self.dram)):
            if name in keep:
                tier.put(request.session, bytes_)
            else:
                tier.take(request.session)
        if SSD in self.has.tiers and DRAM in keep:
            self._write(request.session, bytes_)
        self._changed(request.session)

    def _write(self, session: SessionKey, bytes_: float) -> None:
        """Write what the SSD lacks of a session."""

        def written() -> None:
            if bytes_ > self.ssd.bytes_of(session):
                self.ssd.put(session, bytes_)
                self._changed(session)

        if (new := bytes_ - self.ssd.bytes_of(session)) > 0:
            self.writes.send(new / self.has.codec, (0, 0), written)

    # ---- live migration ----------------------------------------------------------------------------------------
    def expect(self, bytes_: float) -> bool:
        """Reserve HBM for a migrating request. False: no room."""
        if self._running >= self.kind.max_batch or not self.hbm.reserve(bytes_):
            return False
        self.incoming_bytes += bytes_
        return True

    def unexpect(self, bytes_: float) -> None:
        """Release the reservation: the request ended on its old node."""
        self.incoming_bytes -= bytes_
        self.hbm.release(bytes_)
        self._admit()

    def hand_over(self, sequence: Running) -> None:
        """Remove a request that has moved to another node."""
        del self.outstanding[sequence.request.request_id]
        self._load.changed(len(self.outstanding))
        self.hbm.release(sequence.need_bytes)
        self._running -= 1
        self._admit()

    def receive(self, sequence: Running) -> None:
        """Take over a migrated request, in its reserved HBM."""
        self._arrivals += 1
        sequence.arrival, sequence.request.node = self._arrivals, self.name
        self.incoming_bytes -= sequence.need_bytes
        self.outstanding[sequence.request.request_id] = sequence
        self._load.changed(len(self.outstanding))
        self._running += 1
        self.engine.take(sequence)

    @property
    def queued_bytes(self) -> float:
        """HBM that the first waiting request needs."""
        return self._waiting[0][1].need_bytes if self._waiting else 0.0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._running

    # ---- reports -----------------------------------------------------------------------------------------------
    def load(self) -> tuple[LoadReport, list[str], list[str]]:
        """A worker's report: its load, ids of its requests, and ids of those that ended since the last call."""
        self.engine.catch_up()
        kind, pace, piece = self.kind, self.engine.pace, self.kind.shape.piece_bytes
        by_priority = pace.outstanding_s(self.outstanding.values(), kind.shape.chunk_tokens)
        load = LoadReport(
            running=self._running,
            waiting=len(self._waiting),
            outstanding_s=sum(by_priority.values()),
            request_s=pace.request_s,
            hbm_pages_total=int(kind.hbm_bytes // piece),
            hbm_pages_free=int((kind.hbm_bytes - self.hbm.in_use_bytes) // piece),
            prefill_token_s=pace.prefill_token_s,
            by_priority=by_priority,
        )
        ended, self._ended_ids = self._ended_ids, []
        return load, list(self.outstanding), ended

    def mean_load(self, window_s: float) -> float:
        """Mean number of requests since the last call."""
        return self._load.take(window_s)

    def validate(self) -> None:
        """Raise AssertionError if a tier exceeds its capacity, or sums are wrong."""
        for tier in (self.hbm, self.dram, self.ssd):
            tier.validate()
        self.engine.validate()
        in_use = self.incoming_bytes + sum(s.need_bytes for s in self.outstanding.values() if s.admitted)
        assert abs(in_use - self.hbm.in_use_bytes) < 1.0 + 1e-9 * in_use, (
            f"{self.name}: {self.hbm.in_use_bytes} bytes of HBM in use, not {in_use}"
        )
        assert self._running + len(self._waiting) == len(self.outstanding)
