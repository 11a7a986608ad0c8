"""A node of another system: its tiers, sums of what sessions have in them; the ways between them; and who is admitted to the device.

A turn's cache comes in two parts: into DRAM from a peer or the blob tier as soon as the turn is there, and from DRAM into HBM once there is
room for it. A request reserves HBM for its prompt and its answer, and begins when all of its cache is there: the systems that run here have
neither hints nor loads by layers. Who is next, and who computes, is as in our own worker (`worker.core`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from contracts.ids import SessionKey
from loadtest.simulate.channels import Channel
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.mean_load import MeanLoad
from loadtest.simulate.mechanisms import BLOB, DRAM, HBM, PEER, Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.systems.engine import Engine
from loadtest.simulate.systems.running import Running
from loadtest.simulate.systems.tiers import Tier
from scheduler.core.directory import Held
from scheduler.core.fleet import Load


class OtherNode:
    """See the module. peers: by name, of the whole fleet. ended: told of each answer that is complete, before its client is. has: the
    tiers it has, and its codec. keep: which tiers keep a turn's KV when it has ended; all that it has, unless a system decides that."""

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
        self.hbm, self.dram = Tier(kind.hbm_bytes), Tier(kind.dram_bytes, self._changed)
        self.link, self.disk = Channel(events, kind.link_bytes_per_s), Channel(events, kind.ssd_bytes_per_s)
        self.bus, self.blob = Channel(events, kind.dram_bytes_per_s), Channel(events, kind.blob_bytes_per_s)
        self.token_bytes = kind.shape.token_bytes
        self.outstanding: dict[str, Running] = {}
        self._waiting: list[tuple[tuple[int, float, int], Running]] = []
        self._running = self._arrivals = 0
        self._dirty: set[SessionKey] = set()
        self._ended_ids: list[str] = []
        #: Of HBM, reserved for requests that are on their way here (`migrations`).
        self.incoming_bytes = 0.0
        self._load = MeanLoad(events)

    # ---- what it holds -----------------------------------------------------------------------------------------
    def tokens_in(self, tier: Tier, session: SessionKey) -> int:
        """Tokens of the session's prefix in one of its tiers."""
        return round(tier.bytes_of(session) / self.token_bytes)

    def _changed(self, session: SessionKey) -> None:
        self._dirty.add(session)

    def held(self) -> list[tuple[SessionKey, Held]]:
        """What a store would report: sessions of which it holds more or less than when last asked."""
        changed, self._dirty = self._dirty, set()
        found = []
        for session in sorted(changed, key=lambda s: s.session_id):
            tokens = self.tokens_in(self.dram, session)
            found.append((session, Held(tokens, tokens * self.token_bytes, tokens)))
        return found

    # ---- turns -------------------------------------------------------------------------------------------------
    def submit(self, request: Request, sources: tuple[str, ...]) -> None:
        """A turn was placed here. Raises ValueError when it can never fit."""
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
        """Send for what is not in DRAM or HBM."""
        session = sequence.request.session
        near = max(self.tokens_in(self.hbm, session), self.tokens_in(self.dram, session))
        if BLOB not in self.has.tiers:
            there = [peer.tokens_in(peer.dram, session) for peer in self._peers_of(sources)]
            wanted = min(wanted, max(near, *there, 0))
        for tier in (self.hbm, self.dram):
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

    def _parts(self, session: SessionKey, near: int, wanted: int, sources: tuple[str, ...]) -> list[tuple[Channel, float]]:
        """Bytes by way for tokens `near` to `wanted`: from the first peer that has more, then from the blob tier."""
        parts: list[tuple[Channel, float]] = []
        there = next((n for peer in self._peers_of(sources) if (n := peer.tokens_in(peer.dram, session)) > near), near)
        have = min(wanted, there)
        if have > near:
            parts.append((self.link, (have - near) * self.token_bytes / self.has.codec))
        if wanted > have:
            parts.append((self.blob, (wanted - have) * self.token_bytes / self.has.codec))
        return parts

    def _came(self, sequence: Running, tokens: int, parts: list[tuple[Channel, float]]) -> None:
        """A turn's cache is in DRAM."""
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
        """Whoever has room on the device, by priority and when it is due. Nobody passes one that does not fit: large ones would starve."""
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
        """An answer is complete: its KV is where it is kept, and was written there meanwhile."""
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
        self._changed(request.session)

    # ---- requests that move while they decode (`migrations`) ---------------------------------------------------
    def expect(self, bytes_: float) -> bool:
        """Reserve HBM for one that may come. False: there is none."""
        if self._running >= self.kind.max_batch or not self.hbm.reserve(bytes_):
            return False
        self.incoming_bytes += bytes_
        return True

    def unexpect(self, bytes_: float) -> None:
        """It has ended where it was."""
        self.incoming_bytes -= bytes_
        self.hbm.release(bytes_)
        self._admit()

    def hand_over(self, sequence: Running) -> None:
        """It has left for another node."""
        del self.outstanding[sequence.request.request_id]
        self._load.changed(len(self.outstanding))
        self.hbm.release(sequence.need_bytes)
        self._running -= 1
        self._admit()

    def receive(self, sequence: Running) -> None:
        """It has come, into the HBM that was reserved for it."""
        self._arrivals += 1
        sequence.arrival, sequence.request.node = self._arrivals, self.name
        self.incoming_bytes -= sequence.need_bytes
        self.outstanding[sequence.request.request_id] = sequence
        self._load.changed(len(self.outstanding))
        self._running += 1
        self.engine.take(sequence)

    @property
    def queued_bytes(self) -> float:
        """What the first of those that wait needs."""
        return self._waiting[0][1].need_bytes if self._waiting else 0.0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._running

    # ---- reports -----------------------------------------------------------------------------------------------
    def load(self) -> tuple[Load, list[str], list[str]]:
        """What a worker would report: its load, the requests that are here, and those that ended since it was last asked."""
        self.engine.catch_up()
        kind, pace, piece = self.kind, self.engine.pace, self.kind.shape.piece_bytes
        by_priority = pace.outstanding_s(self.outstanding.values(), kind.shape.chunk_tokens)
        load = Load(
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
        """Requests here, a mean over the time since it was last asked."""
        return self._load.take(window_s)

    def validate(self) -> None:
        """Raise AssertionError when a tier holds more than it can, or the device's sums are wrong."""
        for tier in (self.hbm, self.dram):
            tier.validate()
        self.engine.validate()
        in_use = self.incoming_bytes + sum(s.need_bytes for s in self.outstanding.values() if s.admitted)
        assert abs(in_use - self.hbm.in_use_bytes) < 1.0 + 1e-9 * in_use, (
            f"{self.name}: {self.hbm.in_use_bytes} bytes of HBM in use, not {in_use}"
        )
        assert self._running + len(self._waiting) == len(self.outstanding)
