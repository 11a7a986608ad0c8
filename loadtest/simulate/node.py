"""A node: its tiers, the ways between them, who is admitted to the device, and the reports that a worker and a store would send.

A turn's cache comes in two parts: into DRAM from the SSD, a peer or the blob tier (as soon as the turn is there, or before when a hint said
so), and from DRAM into HBM (once there is room for it). Both run under the compute of earlier layers: what is not waited for is as long as
the rest of the prompt takes to compute. Where computing a cache again is sooner done than loading it, it is computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from contracts.ids import SessionKey
from kvstore.core.prefetch import is_late
from loadtest.simulate import hiding
from loadtest.simulate.channels import Channel, Fetch, Key, takes_s
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.engine import Engine
from loadtest.simulate.events import Events
from loadtest.simulate.mechanisms import ALL, BANDS, BLOB, DRAM, HBM, PEER, SSD, Mechanisms
from loadtest.simulate.sequences import Request, Running
from loadtest.simulate.tiers import DOUBTED, PLAIN, Tier, advised
from scheduler.core.directory import Held
from scheduler.core.fleet import Load

#: What requests wait for goes before what hints want.
_DEMAND, _HINTED = 0, 1


class Node:
    """See the module. peers: by name, of the whole fleet. ended: told of each answer that is complete, before its client is. has: the
    mechanisms it has. keep: which tiers keep a turn's KV when it has ended; all that it has, unless another system decides that."""

    def __init__(
        self,
        name: str,
        kind: NodeKind,
        events: Events,
        peers: dict[str, Node],
        *,
        ended: Callable[[Request], None],
        has: Mechanisms = ALL,
        keep: Callable[[Node, Running], frozenset[str]] | None = None,
    ) -> None:
        self.name, self.kind, self._events, self._peers, self._told, self.has = name, kind, events, peers, ended, has
        self._keep = keep or (lambda node, sequence: has.tiers)
        self.engine = Engine(events, kind, self._spoke, self._over)
        self.hbm = Tier(kind.hbm_bytes, bands=BANDS if has.layer_priority else 1, hold_advised=not has.cooperative)
        self.dram, self.ssd = Tier(kind.dram_bytes, self._changed), Tier(kind.ssd_bytes, self._changed)
        self.link, self.disk = Channel(events, kind.link_bytes_per_s), Channel(events, kind.ssd_bytes_per_s)
        self.bus, self.blob = Channel(events, kind.dram_bytes_per_s), Channel(events, kind.blob_bytes_per_s)
        self.token_bytes = kind.shape.token_bytes
        self.outstanding: dict[str, Running] = {}
        self._waiting: list[tuple[tuple[int, float, int], Running]] = []
        self._running = self._arrivals = 0
        self._fetches: dict[SessionKey, Fetch] = {}
        #: Sessions that a hint brought, or brings, here: their rank, and until when.
        self._hints: dict[SessionKey, tuple[int, float]] = {}
        self._dirty: set[SessionKey] = set()
        self._ended_ids: list[str] = []
        #: Of HBM, reserved for requests that are on their way here (`migrations`).
        self.incoming_bytes = 0.0
        #: Request-seconds here, for load over time; and outcomes that explain results.
        self._area = self._area_since = 0.0
        self.recomputed_tokens = self.wasted_bytes = 0.0

    # ---- what it holds -----------------------------------------------------------------------------------------
    def tokens_in(self, tier: Tier, session: SessionKey) -> int:
        """Tokens of the session's prefix in one of its tiers."""
        return round(tier.bytes_of(session) / self.token_bytes)

    def tokens_here(self, session: SessionKey) -> int:
        """In DRAM or on the SSD."""
        return round(max(self.dram.bytes_of(session), self.ssd.bytes_of(session)) / self.token_bytes)

    def _changed(self, session: SessionKey) -> None:
        self._dirty.add(session)

    def held(self) -> list[tuple[SessionKey, Held]]:
        """What the store reports: sessions of which it holds more or less than when last asked."""
        changed, self._dirty = self._dirty, set()
        return [
            (session, Held(tokens, tokens * self.token_bytes, min(self.tokens_in(self.dram, session), tokens)))
            for session in changed
            for tokens in (self.tokens_here(session),)
        ]

    # ---- turns -------------------------------------------------------------------------------------------------
    def submit(self, request: Request, sources: tuple[str, ...]) -> None:
        """A turn was placed here. Raises ValueError when it can never fit."""
        need = (request.prompt_tokens + request.answer_tokens) * self.token_bytes
        if need > self.kind.hbm_bytes:
            raise ValueError(
                f"a request of {request.prompt_tokens + request.answer_tokens} tokens does not fit a node's HBM; use --length-scale"
            )
        self._arrivals += 1
        self._count_load()
        sequence = Running(request, self._arrivals, self._events.now, self.engine.steps, self.kind.max_tokens, need)
        self.outstanding[request.request_id] = sequence
        chunk, kept = self.kind.shape.chunk_tokens, 0
        if self.has.keeps:
            kept = min(request.history_tokens, request.prompt_tokens - 1) // chunk * chunk
            self._gather(sequence, kept, sources)
        hbm_tokens = int(self.kind.hbm_bytes // self.token_bytes)
        heapq.heappush(self._waiting, (sequence.order(kept, self.engine.pace, hbm_tokens, self._running), sequence))
        self._admit()

    def _gather(self, sequence: Running, wanted: int, sources: tuple[str, ...]) -> None:
        """Decide how much of its cache is used, and send for what is not in DRAM or HBM."""
        session = sequence.request.session
        if BLOB not in self.has.tiers:
            there = [self._peers[name].tokens_here(session) for name in sources] if PEER in self.has.tiers else []
            wanted = min(wanted, max(self.tokens_in(self.hbm, session), self.tokens_here(session), *there))
        for tier in (self.hbm, self.dram, self.ssd):
            # What a hint brought stands as it stood until its request has room (worker.core.standings).
            tier.touch(session, self._hints[session][0] if tier is self.hbm and session in self._hints else PLAIN)
        self._hints.pop(session, None)
        in_hbm = self.tokens_in(self.hbm, session) if self.hbm.share_of(session) == 1.0 else 0
        near = min(wanted, max(in_hbm, self.tokens_in(self.dram, session)))
        fetch = self._fetches.get(session)
        if fetch is not None and fetch.tokens > near and hiding.is_worth_waiting(self.kind, fetch, near, min(wanted, fetch.tokens)):
            near = min(wanted, fetch.tokens)
            fetch.rank = PLAIN
            self._await(fetch, sequence, self._hidden_s(sequence, near))
        elif wanted > near and fetch is None:
            hidden_s = self._hidden_s(sequence, wanted)
            parts = self._parts(session, near, wanted, sources)
            if takes_s(parts, (_DEMAND, 0)) - hidden_s <= self.kind.costs.prefill_s(wanted - near, near):
                fetch = self._fetch(session, wanted, PLAIN, parts, (_DEMAND, sequence.request.priority), hidden_s)
                self._await(fetch, sequence, 0.0)
                near = wanted
        if fetch is not None and not fetch.waits:
            self._fetches.pop(session).cancel()  # what its hint wanted comes too late
        self.recomputed_tokens += wanted - near
        sequence.load_tokens = near
        sequence.found = near // self.kind.shape.chunk_tokens

    def _hidden_s(self, sequence: Running, cached: int) -> float:
        return hiding.below_hbm_s(self.kind, self.has, sequence.request.prompt_tokens - cached, cached)

    def _await(self, fetch: Fetch, sequence: Running, hidden_s: float) -> None:
        for way, job in fetch.jobs:
            way.promote(job, (_DEMAND, sequence.request.priority), hidden_s)
        sequence.awaits += 1
        fetch.waits.append(lambda: self._arrived(sequence))

    def _arrived(self, sequence: Running) -> None:
        sequence.awaits -= 1
        if sequence.admitted and not sequence.awaits:
            self._start(sequence)

    def _admit(self) -> None:
        """Whoever has room on the device, by priority and when it is due. Nobody passes one that does not fit: large ones would starve."""
        while self._waiting and self._running < self.kind.max_batch:
            sequence = self._waiting[0][1]
            session = sequence.request.session
            rank, had, share = self.hbm.rank_of(session), self.hbm.bytes_of(session), self.hbm.share_of(session)
            held = self.hbm.take(session)
            if not self.hbm.reserve(sequence.need_bytes, by_force=not self._running):
                if held:
                    self.hbm.put(session, had, rank)
                return
            heapq.heappop(self._waiting)
            self._running += 1
            sequence.admitted = True
            bytes_ = sequence.load_tokens * self.token_bytes - held
            if bytes_ > 0:
                sequence.awaits += 1
                key = (_DEMAND, sequence.request.priority)
                rest = sequence.request.prompt_tokens - sequence.load_tokens
                hidden_s = hiding.into_hbm_s(self.kind, self.has, rest, sequence.load_tokens, bytes_ / self.bus.bytes_per_s, share)
                self.bus.send(bytes_, key, lambda s=sequence: self._arrived(s), hidden_s)  # type: ignore[misc]
            elif not sequence.awaits:
                self._start(sequence)

    def _start(self, sequence: Running) -> None:
        sequence.prefilled = sequence.request.cached_tokens = sequence.load_tokens
        self.engine.join(sequence)

    def _spoke(self, sequence: Running) -> None:
        sequence.request.first_s = self._events.now

    def _over(self, sequence: Running) -> None:
        """An answer is complete: its KV stays in HBM as cached, and is in DRAM and on the SSD, where it was written meanwhile."""
        request = sequence.request
        self._count_load()
        request.end_s = self._events.now
        del self.outstanding[request.request_id]
        self._ended_ids.append(request.request_id)
        self._running -= 1
        self._free(sequence)
        self._told(request)
        self._admit()

    def _free(self, sequence: Running) -> None:
        """Its HBM is free again, and its KV is where it is kept."""
        self.hbm.release(sequence.need_bytes)
        if not self.has.keeps:
            return
        request, chunk = sequence.request, self.kind.shape.chunk_tokens
        bytes_ = float((request.prompt_tokens + request.answer_tokens) // chunk * chunk * self.token_bytes)
        keep = self._keep(self, sequence)
        for name, tier in ((HBM, self.hbm), (DRAM, self.dram), (SSD, self.ssd)):
            if name in keep:
                tier.put(request.session, bytes_)
            else:
                tier.take(request.session)
        self._changed(request.session)

    # ---- bringing caches ---------------------------------------------------------------------------------------
    def _parts(self, session: SessionKey, near: int, wanted: int, sources: tuple[str, ...]) -> list[tuple[Channel, float]]:
        """Bytes by way for tokens `near` to `wanted`: from the own SSD, then from the peer that has most, then from the blob tier."""
        parts: list[tuple[Channel, float]] = []
        have = max(near, min(wanted, self.tokens_here(session)))
        if have > near:
            parts.append((self.disk, float((have - near) * self.token_bytes)))
        peer = next((self._peers[name] for name in sources if self._peers[name].tokens_here(session) > have), None)
        if peer is not None and PEER in self.has.tiers:
            there = min(wanted, peer.tokens_here(session))
            bytes_ = float((there - have) * self.token_bytes)
            parts.append((self.link, bytes_ / self.has.codec))
            if peer.tokens_in(peer.dram, session) < there:
                parts.append((peer.disk, bytes_))
            have = there
        if wanted > have:
            parts.append((self.blob, float((wanted - have) * self.token_bytes) / self.has.codec))
        return parts

    def _fetch(
        self, session: SessionKey, tokens: int, rank: int, parts: list[tuple[Channel, float]], key: Key, hidden_s: float = 0.0
    ) -> Fetch:
        fetch = self._fetches[session] = Fetch(tokens, rank, parts, left=len(parts))
        layers = self.kind.shape.layers
        for way, bytes_ in parts:
            hidden = min(hidden_s, bytes_ / way.bytes_per_s * (1 - 1 / layers))
            fetch.jobs.append((way, way.send(bytes_, key, lambda: self._part_came(session, fetch), hidden)))
        return fetch

    def _part_came(self, session: SessionKey, fetch: Fetch) -> None:
        fetch.left -= 1
        if fetch.left or fetch.cancelled:
            return
        del self._fetches[session]
        bytes_ = float(fetch.tokens * self.token_bytes)
        if self.has.decode_bytes_per_s:
            coded = sum(size for way, size in fetch.sizes if way in (self.link, self.blob)) * self.has.codec
            self.engine.disturb(coded / self.has.decode_bytes_per_s)
        if self.dram.bytes_of(session) < bytes_:
            self.dram.put(session, bytes_, fetch.rank)
        if SSD in self.has.tiers and self.ssd.bytes_of(session) < bytes_:
            self.ssd.put(session, bytes_)
        self._changed(session)
        for go_on in fetch.waits:
            go_on()
        if not fetch.waits and fetch.rank > PLAIN:
            self._offer(session, fetch.rank)

    # ---- hints -------------------------------------------------------------------------------------------------
    def prefetch(
        self, session: SessionKey, priority: int, expires_s: float, tokens: int, sources: tuple[str, ...], arrival_s: float | None = None
    ) -> None:
        """The scheduler's command for a hint: bring `tokens` of the session's cache up at once, as far as better ones leave room."""
        rank, wanted = advised(priority), tokens // self.kind.shape.chunk_tokens * self.kind.shape.chunk_tokens
        self._hints[session] = (rank, expires_s)
        self._events.at(expires_s, lambda: self._expired(session, expires_s))
        fetch = self._fetches.get(session)
        if fetch is not None and not fetch.waits:
            fetch.rank = rank
        if fetch is not None or not wanted:
            return
        self.dram.touch(session, rank)
        near = self.tokens_in(self.dram, session)
        parts = self._parts(session, near, wanted, sources) if wanted > near else []
        if parts:
            late = arrival_s is not None and is_late(takes_s(parts, (_HINTED, priority, False)), arrival_s - self._events.now)
            self._fetch(session, wanted, rank, parts, (_HINTED, priority, late))
        else:
            self._offer(session, rank)

    def _offer(self, session: SessionKey, rank: int) -> None:
        """What is in DRAM goes on into free HBM (cooperative management, section 3.4 of the paper)."""
        bytes_ = self.dram.bytes_of(session)
        had = self.hbm.bytes_of(session) * self.hbm.share_of(session)
        if session not in self._hints:
            return
        if bytes_ <= had:
            self.hbm.touch(session, rank)
            return
        self.bus.send(bytes_ - had, (_HINTED, -rank), lambda: self._in_hbm(session, bytes_))

    def _in_hbm(self, session: SessionKey, bytes_: float) -> None:
        if session in self._hints and self.dram.bytes_of(session) >= bytes_:
            self.hbm.put(session, bytes_, self._hints[session][0])

    def withdraw(self, session: SessionKey) -> None:
        """The hint is void, or went to another node: what it brought may go first, what is still to come does not."""
        if self._hints.pop(session, None) is not None:
            self._doubt(session)

    def _expired(self, session: SessionKey, expires_s: float) -> None:
        if self._hints.get(session, (0, 0.0))[1] == expires_s:
            self.withdraw(session)

    def _doubt(self, session: SessionKey) -> None:
        for tier in (self.hbm, self.dram):
            tier.touch(session, DOUBTED)
        fetch = self._fetches.get(session)
        if fetch is not None and not fetch.waits:
            self._fetches.pop(session).cancel()

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
        self._count_load()
        del self.outstanding[sequence.request.request_id]
        self.hbm.release(sequence.need_bytes)
        self._running -= 1
        self._admit()

    def receive(self, sequence: Running) -> None:
        """It has come, into the HBM that was reserved for it."""
        self._count_load()
        self._arrivals += 1
        sequence.arrival, sequence.request.node = self._arrivals, self.name
        self.incoming_bytes -= sequence.need_bytes
        self.outstanding[sequence.request.request_id] = sequence
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

    @property
    def pages(self) -> tuple[int, int]:
        """Of HBM, in pieces: all, and those that no running request uses."""
        piece = self.kind.shape.piece_bytes
        return int(self.kind.hbm_bytes // piece), int((self.kind.hbm_bytes - self.hbm.in_use_bytes) // piece)

    # ---- reports -----------------------------------------------------------------------------------------------
    def load(self) -> tuple[Load, list[str], list[str]]:
        """What the worker reports: its load, the requests that are here, and those that ended since it was last asked."""
        self.engine.catch_up()
        kind, pace = self.kind, self.engine.pace
        sequences = self.outstanding.values()
        by_priority = pace.outstanding_s(sequences, kind.shape.chunk_tokens)
        total, free = self.pages
        load = Load(
            running=self._running,
            waiting=len(self._waiting),
            outstanding_s=sum(by_priority.values()),
            request_s=pace.request_s,
            hbm_pages_total=total,
            hbm_pages_free=free,
            prefill_token_s=pace.prefill_token_s,
            by_priority=by_priority,
        )
        ended, self._ended_ids = self._ended_ids, []
        return load, list(self.outstanding), ended

    def _count_load(self) -> None:
        now = self._events.now
        self._area += (now - self._area_since) * len(self.outstanding)
        self._area_since = now

    def mean_load(self, window_s: float) -> float:
        """Requests here, a mean over the time since it was last asked."""
        self._count_load()
        area, self._area = self._area, 0.0
        return area / window_s

    def validate(self) -> None:
        """Raise AssertionError when a tier holds more than it can, or the device's sums are wrong."""
        for tier in (self.hbm, self.dram, self.ssd):
            tier.validate()
        self.engine.validate()
        in_use = self.incoming_bytes + sum(s.need_bytes for s in self.outstanding.values() if s.admitted)
        assert abs(in_use - self.hbm.in_use_bytes) < 1.0 + 1e-9 * in_use, (
            f"{self.name}: {self.hbm.in_use_bytes} bytes of HBM in use, not {in_use}"
        )
        assert self._running + len(self._waiting) == len(self.outstanding)
