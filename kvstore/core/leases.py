"""Which pieces other nodes' stores have committed to bring, and when a lease counts as broken.

A lease is opened for one load; any load may wait for its pieces. It ends when nothing more is expected and nothing is
being read under it. A peer that does not answer in time, or falls silent, is given up.

Invariant (`validate`): exactly the EXPECTED pieces are leased, each by one open lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set

from kvstore.core.events import Fault, LoadKind, SourceKind, Want
from kvstore.core.fetches import Fetches, PieceRef, Planned
from kvstore.core.index import Index
from kvstore.core.instructions import AskPeer, Counted, Instruction, ReleasePeer
from kvstore.core.meter import Meter
from kvstore.core.prefetch import rank
from kvstore.core.rates import Source
from kvstore.core.state import PieceState

#: A lease is given up when its peer has not answered, or has then sent nothing, for this long.
ANSWER_S = 2.0
SILENCE_S = 3.0
#: A lease older than this is checked: another source may be sooner by now.
_LATE_S = 0.5
#: Most bytes of one read under a lease.
_READ_BYTES = 8 << 20


class Lease:
    """One open lease. `reading`: pieces of it that are queued or being read. `kind`, `priority`: of its most urgent
    load."""

    __slots__ = (
        "answered",
        "arrival",
        "began",
        "delivered",
        "disk_before",
        "due",
        "expected",
        "fingerprint",
        "kind",
        "name",
        "on_disk",
        "order",
        "peer",
        "priority",
        "progress",
        "reading",
        "wants",
    )

    def __init__(self, name: str, peer: str, fingerprint: bytes, wants: tuple[Want, ...], now: float) -> None:
        self.name = name
        self.peer = peer
        self.fingerprint = fingerprint
        self.wants = wants
        self.expected: set[tuple[bytes, int]] = set()
        self.reading = 0
        self.answered = False
        self.progress = now
        self.kind = LoadKind.ADVISED
        self.priority = 0
        self.arrival = float("inf")
        self.order = 0
        self.began = now  #: when it was opened, then when it was answered
        self.delivered = 0  #: pieces that the peer has announced as readable
        self.on_disk: frozenset[int] = frozenset()  #: indices of the chunks that the peer must read from its own SSD
        self.disk_before = 0
        self.due: dict[bytes, float] = {}  #: by chunk: when the peer expects it in its arena


class Leases:
    """See the module. `lost(pieces, source, fault, now)` is called for pieces that a peer will not bring."""

    def __init__(
        self,
        index: Index,
        fetches: Fetches,
        meter: Meter,
        out: list[Instruction],
        lost: Callable[[Sequence[PieceRef], SourceKind, Fault, float], None],
    ) -> None:
        self._index = index
        self._fetches = fetches
        self._meter = meter
        self._out = out
        self._lost = lost
        self._open: dict[str, Lease] = {}
        self._leased: dict[tuple[bytes, int], Lease] = {}
        self._numbers = 0

    def ask(
        self,
        peer: str,
        fingerprint: bytes,
        wants: Sequence[Want],
        kind: LoadKind,
        priority: int,
        arrival: float,
        order: int,
        now: float,
    ) -> str:
        """Open a lease. Returns its name."""
        self._numbers += 1
        lease = Lease(f"lease-{self._numbers}", peer, fingerprint, tuple(wants), now)
        lease.kind, lease.priority, lease.arrival, lease.order = kind, priority, arrival, order
        self._open[lease.name] = lease
        self._out.append(AskPeer(lease.name, peer, fingerprint, lease.wants))
        return lease.name

    def peer_of(self, name: str) -> str:
        """The lease's peer; empty when it is not open."""
        return self._open[name].peer if name in self._open else ""

    def holds(
        self, name: str, indices: Sequence[int], in_dram: frozenset[int], due_s: Mapping[int, float], now: float
    ) -> bool:
        """The peer's answer: pieces that are ABSENT here become EXPECTED. due_s: by index, seconds until the peer
        expects the chunk in its arena. False when the lease is not open, or was answered before."""
        lease = self._open.get(name)
        if lease is None or lease.answered:
            return False
        lease.answered, lease.progress, lease.began = True, now, now
        lease.on_disk = frozenset(indices) - in_dram
        lease.disk_before = self._meter.rates.moved(Source(SourceKind.PEER, lease.peer, on_disk=True))
        shape = self._index.shapes.get(lease.fingerprint)
        for i in indices:
            if shape is None or not 0 <= i < len(lease.wants):
                continue
            key, layers = lease.wants[i]
            chunk = self._index.chunk(key, shape)
            if chunk is None or chunk.doomed:
                continue
            lease.due[key] = now + due_s.get(i, 0.0 if i in in_dram else math.inf)
            for layer in layers:
                if chunk.state(layer) is PieceState.ABSENT:
                    self._index.set_piece(chunk, layer, PieceState.EXPECTED)
                    lease.expected.add((key, layer))
                    self._leased[key, layer] = lease
        self._close_if_done(lease)
        return True

    def ready(self, name: str, pieces: Sequence[tuple[int, int, int, int]], now: float) -> None:
        """The peer announces readable pieces, (index, layer, offset, checksum): plan fetches of those still
        expected."""
        lease = self._open.get(name)
        shape = self._index.shapes.get(lease.fingerprint) if lease else None
        if lease is None or shape is None:
            return
        lease.progress = now
        batch: list[Planned] = []
        from_disk = 0
        for i, layer, offset, checksum in pieces:
            if not 0 <= i < len(lease.wants):
                continue
            key = lease.wants[i][0]
            if (key, layer) not in lease.expected:
                continue
            lease.expected.discard((key, layer))
            del self._leased[key, layer]
            from_disk += i in lease.on_disk
            batch.append((self._index.chunks[key], layer, offset, checksum))
        lease.delivered += len(batch)
        if from_disk:
            source = Source(SourceKind.PEER, lease.peer, on_disk=True)
            self._meter.rates.observe(source, from_disk * shape.piece_bytes, lease.disk_before, now - lease.began, now)
        per_read = max(1, _READ_BYTES // shape.piece_bytes)
        for start in range(0, len(batch), per_read):
            part = batch[start : start + per_read]
            lease.reading += len(part)
            where = rank(
                lease.kind,
                layer=part[0][1],
                priority=lease.priority,
                arrival=lease.arrival,
                order=lease.order,
                position=start,
            )
            self._fetches.plan(SourceKind.PEER, shape, part, where, lease.kind, lease=name, peer=lease.peer)

    def ended(self, name: str, answered: bool, now: float) -> None:
        """The peer sends nothing more; pieces still expected are lost."""
        lease = self._open.get(name)
        if lease is None:
            return
        if not answered:
            self._out.append(Counted("peer_failures"))
        lease.answered = True
        self._break(lease, now)

    def read(self, name: str, pieces: int) -> None:
        """`pieces` pieces of the lease are no longer being read."""
        lease = self._open.get(name)
        if lease is not None:
            lease.reading -= pieces
            self._close_if_done(lease)

    def lift(self, key: bytes, layer: int, kind: LoadKind, priority: int) -> None:
        """Another load waits for an EXPECTED piece: the lease takes over its urgency."""
        lease = self._leased[key, layer]
        if kind < lease.kind:
            lease.kind, lease.priority = kind, priority

    def expected_from(self, key: bytes, layer: int, now: float) -> tuple[str, float]:
        """The peer of an EXPECTED piece, and the seconds until it expects the piece in its arena (infinity:
        unknown)."""
        lease = self._leased[key, layer]
        return lease.peer, max(lease.due.get(key, now) - now, 0.0)

    def drop(self, key: bytes, layer: int) -> None:
        """No load waits for the EXPECTED piece any more: it becomes ABSENT."""
        lease = self._leased.pop((key, layer), None)
        if lease is not None:
            lease.expected.discard((key, layer))
            self._index.set_piece(self._index.chunks[key], layer, PieceState.ABSENT)
            self._close_if_done(lease)

    def close_unanswered(self, name: str) -> None:
        """Close the lease unless it was answered: the load that asked is gone."""
        lease = self._open.get(name)
        if lease is not None and not lease.answered:
            self._close(lease)

    def is_open(self, name: str) -> bool:
        """Whether the lease is open."""
        return name in self._open

    @property
    def count(self) -> int:
        """Number of open leases."""
        return len(self._open)

    def overdue(self, now: float) -> list[str]:
        """Names of leases whose peers have not answered in time. Breaks leases whose peers fell silent."""
        late = [lease.name for lease in self._open.values() if not lease.answered and now - lease.progress > ANSWER_S]
        for lease in [x for x in self._open.values() if x.answered and x.expected and now - x.progress > SILENCE_S]:
            self._out.append(Counted("peer_failures"))
            self._break(lease, now)
        return late

    def late(self, now: float) -> list[tuple[str, float]]:
        """Leases with pieces outstanding after _LATE_S, and the estimated seconds until they are complete: in
        proportion to what has come, or as long again when nothing has."""
        found = []
        for lease in self._open.values():
            elapsed = now - lease.began
            if lease.answered and lease.expected and elapsed > _LATE_S:
                share = len(lease.expected) / lease.delivered if lease.delivered else 1.0
                found.append((lease.name, elapsed * share))
        return found

    def expected(self, name: str) -> list[tuple[bytes, int]]:
        """The (key, layer) of pieces still expected, lowest layers first."""
        return sorted(self._open[name].expected, key=lambda piece: (piece[1], piece[0]))

    def leave(self, name: str, keys: Set[bytes], now: float) -> None:
        """Stop expecting these chunks: the peer is too slow."""
        lease = self._open[name]
        self._out.append(Counted("peers_left"))
        self._break(lease, now, [piece for piece in lease.expected if piece[0] in keys])

    def _break(self, lease: Lease, now: float, pieces: Sequence[tuple[bytes, int]] | None = None) -> None:
        """These pieces (None: all) will not come from the peer."""
        gone: list[PieceRef] = []
        for key, layer in sorted(lease.expected if pieces is None else pieces, key=lambda e: (e[1], e[0])):
            del self._leased[key, layer]
            lease.expected.discard((key, layer))
            chunk = self._index.chunks[key]
            self._index.set_piece(chunk, layer, PieceState.ABSENT)
            gone.append((chunk, layer))
        self._close_if_done(lease)
        if gone:
            self._lost(gone, SourceKind.PEER, Fault.UNAVAILABLE, now)

    def _close_if_done(self, lease: Lease) -> None:
        if lease.answered and not lease.expected and lease.reading <= 0:
            self._close(lease)

    def _close(self, lease: Lease) -> None:
        if self._open.pop(lease.name, None) is not None:
            self._out.append(ReleasePeer(lease.name, lease.peer))

    def validate(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        expected = {
            (c.key, i)
            for c in self._index.resident.values()
            for i, s in enumerate(c.states)
            if s is PieceState.EXPECTED
        }
        assert expected == set(self._leased)
        for piece, lease in self._leased.items():
            assert lease is self._open[lease.name] and piece in lease.expected
        for lease in self._open.values():
            assert all(self._leased[p] is lease for p in lease.expected)
            assert not lease.answered or lease.expected or lease.reading > 0
