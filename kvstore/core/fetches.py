"""Which read starts next: a queue per source, ordered by `prefetch.rank`, a few running at a time.

A piece is in at most one fetch, however many loads want it; a more urgent load that joins raises the fetch's rank.
Slots are reserved when a fetch starts, not when it is queued. A demand fetch that finds no room waits, and running
prefetches are cancelled for it, lowest rank first (`make_way`); other fetches are given up. The shell ends cancelled
reads early where it can; their slots stay reserved until they have ended. A cancelled piece that a request wants by
then is read again.

Invariants (`validate`): `_by_piece` names exactly the pieces that are QUEUED or LOADING; a running fetch's pieces all
have slots.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from contracts.kv import KvShape
from contracts.memory.victim_order import Rank
from kvstore.core.events import Fault, LoadKind, SourceKind
from kvstore.core.eviction import under
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import CancelFetch, Counted, Fetch, FetchPiece, Instruction
from kvstore.core.ledger import Ledger
from kvstore.core.meter import Meter
from kvstore.core.pacing import ReadPacer
from kvstore.core.prefetch import OPTIONAL, FetchRank
from kvstore.core.rates import BLOB, SSD, Source
from kvstore.core.room import Room
from kvstore.core.state import PieceState
from kvstore.core.usefulness import Usefulness

#: Most running fetches by source. For the SSD more than `FileIo.depth`, so that its thread always has the next ones.
RUNNING_LIMIT = {SourceKind.SSD: 24, SourceKind.PEER: 4, SourceKind.BLOB: 16}

#: So many fetches without pieces may always be in a queue.
_EMPTY = 128

PieceRef = tuple[Chunk, int]
#: (chunk, layer, offset at the peer, checksum)
Planned = tuple[Chunk, int, int, int]


class _Fetch:
    __slots__ = (
        "began",
        "cancelled",
        "kind",
        "lease",
        "load_kind",
        "moved_before",
        "number",
        "offsets",
        "peer",
        "pieces",
        "rank",
        "running",
        "shape",
        "stalled",
    )

    def __init__(
        self,
        number: int,
        kind: SourceKind,
        shape: KvShape,
        pieces: list[Planned],
        rank: FetchRank,
        load_kind: LoadKind,
        lease: str,
        peer: str,
    ) -> None:
        self.number = number
        self.kind = kind
        self.shape = shape
        self.pieces = pieces
        self.rank = rank
        self.load_kind = load_kind
        self.lease = lease
        self.peer = peer
        self.running = False
        self.stalled = False
        self.cancelled = False
        self.offsets: list[int] = []
        self.began = 0.0
        self.moved_before = 0

    @property
    def source(self) -> Source:
        """What is read."""
        return Source(self.kind, self.peer)

    @property
    def late(self) -> bool:
        """Whether it ranks behind the hints that are in time."""
        return self.rank[2]

    def bytes_of(self, pieces: int) -> int:
        """Bytes of `pieces` of its pieces."""
        return pieces * self.shape.piece_bytes


class Fetches:
    """See the module. `arrived(pieces, source, now)` and `lost(pieces, source, fault, now)` are called as fetches end;
    `read(lease, n)` when n pieces of a lease are no longer being read. `awaited(key, layer)`: whether a load still
    waits for the piece."""

    def __init__(
        self,
        index: Index,
        ledger: Ledger,
        room: Room,
        usefulness: Usefulness,
        meter: Meter,
        pace: ReadPacer,
        out: list[Instruction],
        arrived: Callable[[Sequence[PieceRef], SourceKind, float], None],
        lost: Callable[[Sequence[PieceRef], SourceKind, Fault, float], None],
        read: Callable[[str, int], None],
        awaited: Callable[[bytes, int], bool],
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._room = room
        self._usefulness = usefulness
        self._meter = meter
        self._pace = pace
        self._out = out
        self._arrived = arrived
        self._lost = lost
        self._read = read
        self._awaited = awaited
        self._by_piece: dict[tuple[bytes, int], _Fetch] = {}
        self._heaps: dict[SourceKind, list[tuple[FetchRank, int, _Fetch]]] = {kind: [] for kind in SourceKind}
        self._running: dict[int, _Fetch] = {}
        self._count = dict.fromkeys(SourceKind, 0)
        self._empty = dict.fromkeys(SourceKind, 0)  #: fetches without pieces that may be in the heap
        self._numbers = 0
        #: When the next paced prefetch may start; None: none waits.
        self.resume_at: float | None = None

    def plan(
        self,
        kind: SourceKind,
        shape: KvShape,
        pieces: Iterable[Planned],
        rank: FetchRank,
        load_kind: LoadKind,
        *,
        lease: str = "",
        peer: str = "",
    ) -> None:
        """Queue one read of pieces that are ABSENT or EXPECTED; they become QUEUED. lease: the caller has counted its
        pieces as being read."""
        self._numbers += 1
        fetch = _Fetch(self._numbers, kind, shape, list(pieces), rank, load_kind, lease, peer)
        for chunk, layer, _, _ in fetch.pieces:
            self._index.set_piece(chunk, layer, PieceState.QUEUED)
            self._by_piece[chunk.key, layer] = fetch
        self._queue(fetch, len(fetch.pieces))
        self._push(fetch)

    def source_of(self, key: bytes, layer: int) -> Source | None:
        """The source of a QUEUED or LOADING piece; None for any other."""
        fetch = self._by_piece.get((key, layer))
        return fetch.source if fetch is not None else None

    def lift(self, key: bytes, layer: int, rank: FetchRank, load_kind: LoadKind) -> None:
        """Another load wants a piece that is QUEUED or LOADING: raise its fetch to that load's rank."""
        fetch = self._by_piece[key, layer]
        if load_kind is LoadKind.DEMAND and fetch.load_kind in OPTIONAL:
            for chunk, _, _, _ in fetch.pieces:
                self._usefulness.overtaken(chunk)
        self._queue(fetch, -len(fetch.pieces))
        fetch.load_kind, before = min(fetch.load_kind, load_kind), fetch.rank
        fetch.rank = min(fetch.rank, rank)
        self._queue(fetch, len(fetch.pieces))
        if fetch.rank < before and not fetch.running:
            self._push(fetch)

    def drop(self, chunk: Chunk, layers: Iterable[int]) -> None:
        """Remove pieces that no load wants from their fetches, unless those have started."""
        gone: dict[int, tuple[_Fetch, set[int]]] = {}
        for layer in layers:
            fetch = self._by_piece.get((chunk.key, layer))
            if fetch is None or fetch.running:
                continue
            del self._by_piece[chunk.key, layer]
            self._index.set_piece(chunk, layer, PieceState.ABSENT)
            gone.setdefault(fetch.number, (fetch, set()))[1].add(layer)
        for fetch, left in gone.values():
            fetch.pieces = [p for p in fetch.pieces if p[0] is not chunk or p[1] not in left]
            self._leave(fetch, len(left))
            if not fetch.pieces:
                self._forget(fetch.kind)

    def pump(self, now: float) -> None:
        """Start queued fetches, within RUNNING_LIMIT, room and pace."""
        self.resume_at = None
        for kind, heap in self._heaps.items():
            while heap and self._count[kind] < RUNNING_LIMIT[kind]:
                rank, _, fetch = heap[0]
                if fetch.running or not fetch.pieces or rank != fetch.rank:
                    heapq.heappop(heap)
                    continue
                paced = fetch.load_kind in OPTIONAL
                if paced and (wait_s := self._pace.wait_s(now)):
                    # Everything behind it is prefetch too.
                    self.resume_at = now + wait_s
                    break
                below = (
                    None
                    if fetch.load_kind is LoadKind.DEMAND
                    else under(Rank.ADVISED, fetch.rank[1] if paced else math.inf)
                )
                offsets = self._room.reserve([(chunk, layer) for chunk, layer, _, _ in fetch.pieces], now, below=below)
                if offsets is None and fetch.load_kind is LoadKind.DEMAND:
                    self.make_way(fetch.shape.piece_bytes * len(fetch.pieces))
                    break
                heapq.heappop(heap)
                if offsets is None:
                    self._give_up(fetch, now)
                else:
                    if paced:
                        self._pace.started(fetch.bytes_of(len(fetch.pieces)), now)
                    self._start(fetch, offsets)

    def _start(self, fetch: _Fetch, offsets: list[int]) -> None:
        fetch.running, fetch.offsets = True, offsets
        self._running[fetch.number] = fetch
        self._count[fetch.kind] += 1
        size = fetch.bytes_of(len(fetch.pieces))
        fetch.began, fetch.moved_before = self._meter.now, self._meter.rates.moved(fetch.source)
        wire = []
        for (chunk, layer, remote, checksum), offset in zip(fetch.pieces, offsets, strict=True):
            self._index.set_piece(chunk, layer, PieceState.LOADING, offset)
            chunk.sums[layer] = checksum
            wire.append(FetchPiece(chunk.key, layer, offset, remote, checksum))
        self._out.append(
            Fetch(
                fetch.number,
                fetch.kind,
                fetch.shape,
                tuple(wire),
                fetch.lease,
                fetch.peer,
                self._meter.give_up_s(fetch.source, size),
            )
        )

    def _give_up(self, fetch: _Fetch, now: float) -> None:
        gone = [(chunk, layer) for chunk, layer, _, _ in fetch.pieces]
        for chunk, layer in gone:
            del self._by_piece[chunk.key, layer]
            self._index.set_piece(chunk, layer, PieceState.ABSENT)
        fetch.pieces = []
        self._out.append(Counted("fetches_without_room"))
        self._leave(fetch, len(gone))
        self._lost(gone, fetch.kind, Fault.NO_ROOM, now)

    def make_way(self, wanted_bytes: int) -> None:
        """Cancel running prefetches, lowest rank first, until `wanted_bytes` are being returned. Best effort: their
        slabs may not fit; the caller asks again when they have ended."""
        optional = [f for f in self._running.values() if f.load_kind in OPTIONAL and not f.stalled]
        coming = sum(f.shape.piece_bytes * len(f.pieces) for f in optional if f.cancelled)
        for fetch in sorted((f for f in optional if not f.cancelled), key=lambda f: f.rank, reverse=True):
            if coming >= wanted_bytes:
                return
            fetch.cancelled = True
            coming += fetch.shape.piece_bytes * len(fetch.pieces)
            self._out.extend((CancelFetch(fetch.number), Counted("prefetches_cancelled")))

    def stalled(self, number: int, now: float) -> None:
        """The fetch takes too long: its pieces are lost to it; its slots stay reserved until `done`."""
        fetch = self._running.get(number)
        if fetch is None or fetch.stalled:
            return
        fetch.stalled = True
        self._meter.stalled(fetch.source, fetch.bytes_of(len(fetch.pieces)), fetch.began)
        gone = []
        for chunk, layer, _, _ in fetch.pieces:
            del self._by_piece[chunk.key, layer]
            self._index.set_piece(chunk, layer, PieceState.ABSENT)
            gone.append((chunk, layer))
        self._out.append(Counted("fetches_stalled"))
        self._leave(fetch, len(gone))
        self._lost(gone, fetch.kind, Fault.UNAVAILABLE, now)

    def done(self, number: int, faults: dict[int, Fault], now: float, sums: Mapping[int, int]) -> None:
        """The fetch ended. Pieces without a fault become READY; the others are reported lost, by fault. sums: by index,
        checksums of pieces that a codec decoded."""
        fetch = self._running.pop(number, None)
        if fetch is None:
            return
        self._count[fetch.kind] -= 1
        if fetch.stalled:
            for offset in fetch.offsets:
                self._ledger.abort(offset)
            return
        self._meter.fetched(
            fetch.source, fetch.bytes_of(len(fetch.pieces)), fetch.began, fetch.moved_before, faults.values()
        )
        good: list[PieceRef] = []
        bad: dict[Fault, list[PieceRef]] = {}
        again: list[Planned] = []
        for i, (chunk, layer, _, _) in enumerate(fetch.pieces):
            del self._by_piece[chunk.key, layer]
            if i in faults:
                self._ledger.abort(fetch.offsets[i])
                self._index.set_piece(chunk, layer, PieceState.ABSENT)
                if faults[i] is Fault.CANCELLED and fetch.load_kind not in OPTIONAL and self._awaited(chunk.key, layer):
                    again.append(fetch.pieces[i])
                else:
                    bad.setdefault(faults[i], []).append((chunk, layer))
            else:
                self._ledger.finish(fetch.offsets[i])
                chunk.sums[layer] = sums.get(i, chunk.sums[layer])
                self._index.set_piece(chunk, layer, PieceState.READY, fetch.offsets[i])
                self._usefulness.read(chunk, layer, fetch.kind, fetch.load_kind)
                good.append((chunk, layer))
        if again:
            self.plan(fetch.kind, fetch.shape, again, fetch.rank, fetch.load_kind, lease=fetch.lease, peer=fetch.peer)
        self._leave(fetch, len(fetch.pieces) - len(again))
        self._queue(fetch, -len(again))
        if good:
            self._arrived(good, fetch.kind, now)
        for fault in sorted(bad):
            self._lost(bad[fault], fetch.kind, fault, now)

    def divert(self, kind: SourceKind, now: float) -> None:
        """The source has degraded: queued reads that have not started are reported lost."""
        gone: list[PieceRef] = []
        for fetch in [f for _, _, f in self._heaps[kind] if not f.running]:
            for chunk, layer, _, _ in fetch.pieces:
                del self._by_piece[chunk.key, layer]
                self._index.set_piece(chunk, layer, PieceState.ABSENT)
                gone.append((chunk, layer))
            self._leave(fetch, len(fetch.pieces))
            fetch.pieces = []
        self._heaps[kind].clear()
        if gone:
            self._lost(gone, kind, Fault.UNAVAILABLE, now)

    def depth(self, kind: SourceKind) -> int:
        """Queued and running reads of this source; one whose rank was raised may count twice."""
        return self._count[kind] + len(self._heaps[kind])

    def _forget(self, kind: SourceKind) -> None:
        """A queued fetch has lost its pieces. When half of the queue may be such fetches, take them out."""
        heap = self._heaps[kind]
        self._empty[kind] += 1
        if 2 * self._empty[kind] > len(heap) + _EMPTY:
            heap[:] = [(rank, n, f) for rank, n, f in heap if f.pieces and not f.running and rank == f.rank]
            heapq.heapify(heap)
            self._empty[kind] = 0

    def _leave(self, fetch: _Fetch, pieces: int) -> None:
        self._queue(fetch, -pieces)
        if fetch.lease:
            self._read(fetch.lease, pieces)

    def _queue(self, fetch: _Fetch, pieces: int) -> None:
        optional = fetch.load_kind in OPTIONAL
        self._meter.rates.queue(fetch.source, fetch.bytes_of(pieces), optional=optional, late=optional and fetch.late)

    def _push(self, fetch: _Fetch) -> None:
        heapq.heappush(self._heaps[fetch.kind], (fetch.rank, fetch.number, fetch))

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        moving = (PieceState.QUEUED, PieceState.LOADING)
        expected = {
            (c.key, layer) for c in self._index.resident.values() for layer, s in enumerate(c.states) if s in moving
        }
        assert expected == set(self._by_piece)
        for (key, layer), fetch in self._by_piece.items():
            chunk = self._index.chunks[key]
            assert (chunk.states[layer] is PieceState.LOADING) == fetch.running
            assert any(p[0] is chunk and p[1] == layer for p in fetch.pieces)
        for source in (SSD, BLOB):
            ahead = sum(fetch.bytes_of(1) for fetch in self._by_piece.values() if fetch.source == source)
            assert self._meter.rates.ahead(source) == ahead
        for kind in SourceKind:
            assert self._count[kind] == sum(f.kind is kind for f in self._running.values())
