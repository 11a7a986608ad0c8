"""A tier of one node: which sessions' KV it holds, how many of its layers, and who goes first when it is full.

Victims as in the store and the worker (`kvstore.core.eviction`, `worker.core.victims`), a session at a time: whose hint ended or was
withdrawn, then the unadvised, then the advised, the least urgent first; within these the highest layers of all sessions, then the least
recently used (SYMPHONY, section 3.4). Layers go in `bands`; with one band a session goes whole, which is layer priority switched off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from contracts.ids import SessionKey

DOUBTED, PLAIN = 0, 1
#: The rank of an advised session is this less its priority.
_ADVISED = 1 << 20
#: Ranks above this are of advised sessions.
HELD = _ADVISED >> 1


def advised(priority: int) -> int:
    """The rank of a session that a hint of this priority brought."""
    return _ADVISED - priority


@dataclass(slots=True)
class _Entry:
    """bytes: of the session's whole prefix. level: bands of it that are here, the lowest ones."""

    bytes: float
    rank: int
    level: int


class Tier:
    """See the module. `left` is told what was evicted whole. In bytes; `in_use_bytes` belong to running requests and are never evicted.

    hold_advised: running requests do not displace what a live hint brought (cooperative management switched off).
    """

    def __init__(
        self,
        capacity_bytes: float,
        left: Callable[[SessionKey], None] = lambda session: None,
        bands: int = 1,
        hold_advised: bool = False,
    ) -> None:
        self.capacity_bytes, self._left, self.bands, self.hold_advised = capacity_bytes, left, bands, hold_advised
        self.in_use_bytes = self.cached_bytes = 0.0
        self._entries: dict[SessionKey, _Entry] = {}
        #: By rank: by level less one, the sessions of which so many bands are here, the least recently used first.
        self._ranks: dict[int, list[OrderedDict[SessionKey, None]]] = {}
        self._rank_bytes: dict[int, float] = {}

    def bytes_of(self, session: SessionKey) -> float:
        """The size of what it holds of this session, were all its layers here; 0: nothing."""
        entry = self._entries.get(session)
        return 0.0 if entry is None else entry.bytes

    def share_of(self, session: SessionKey) -> float:
        """The share of the layers that are here."""
        entry = self._entries.get(session)
        return 0.0 if entry is None else entry.level / self.bands

    def rank_of(self, session: SessionKey) -> int:
        """How it stands; of one that is not here as if it were plain."""
        entry = self._entries.get(session)
        return PLAIN if entry is None else entry.rank

    def put(self, session: SessionKey, bytes_: float, rank: int = PLAIN) -> bool:
        """Hold so much of a session, as many layers as better ones leave room for. False: there is none; the session is not held."""
        self.take(session)
        over = self.in_use_bytes + self.cached_bytes + bytes_ - self.capacity_bytes
        if over > 0 and self.bands == 1 and sum(self._rank_bytes[r] for r in self._able(rank)) < over:
            return False
        self._hold(session, _Entry(bytes_, rank, self.bands))
        self._make_room(0.0, rank)
        return session in self._entries

    def _hold(self, session: SessionKey, entry: _Entry) -> None:
        levels = self._ranks.get(entry.rank)
        if levels is None:
            levels = self._ranks[entry.rank] = [OrderedDict() for _ in range(self.bands)]
            self._rank_bytes[entry.rank] = 0.0
        levels[entry.level - 1][session] = None
        self._entries[session] = entry
        held = entry.bytes * entry.level / self.bands
        self._rank_bytes[entry.rank] += held
        self.cached_bytes += held

    def take(self, session: SessionKey) -> float:
        """Give up what is held of a session; returns how much that was."""
        entry = self._entries.pop(session, None)
        if entry is None:
            return 0.0
        del self._ranks[entry.rank][entry.level - 1][session]
        held = entry.bytes * entry.level / self.bands
        self._freed(entry.rank, held)
        return held

    def _freed(self, rank: int, bytes_: float) -> None:
        self.cached_bytes -= bytes_
        self._rank_bytes[rank] -= bytes_
        if not any(self._ranks[rank]):
            del self._ranks[rank], self._rank_bytes[rank]
            if not self._ranks:
                self.cached_bytes = 0.0

    def touch(self, session: SessionKey, rank: int) -> None:
        """It was used, or its rank changes."""
        entry = self._entries.get(session)
        if entry is not None:
            self.take(session)
            self._hold(session, _Entry(entry.bytes, rank, entry.level))

    def reserve(self, bytes_: float, *, by_force: bool = False) -> bool:
        """Room for a running request; whatever is cached gives way. False: others in use fill it, or hold it (`hold_advised`). by_force:
        what is held gives way too, as nothing else would ever end the wait."""
        if self.in_use_bytes + bytes_ > self.capacity_bytes:
            return False
        hold, self.hold_advised = self.hold_advised, self.hold_advised and not by_force
        able, self.hold_advised = self._make_room(bytes_, None), hold
        if not able:
            return False
        self.in_use_bytes += bytes_
        return True

    def release(self, bytes_: float) -> None:
        """The running request is over."""
        self.in_use_bytes -= bytes_
        if abs(self.in_use_bytes) < 1.0:
            self.in_use_bytes = 0.0

    def _able(self, rank: int | None) -> list[int]:
        """Ranks that may be evicted for one of `rank`, the worst first: none that is better; plain sessions may evict anyone. None: for a
        running request."""
        if rank is None:
            return [r for r in sorted(self._ranks) if not self.hold_advised or r < HELD]
        return [r for r in sorted(self._ranks) if rank == PLAIN or r <= rank]

    def _make_room(self, bytes_: float, rank: int | None) -> bool:
        """Evict until so much is free. False, and nothing is changed: that is impossible."""
        over = self.in_use_bytes + self.cached_bytes + bytes_ - self.capacity_bytes
        if over <= 0:
            return True
        able = self._able(rank)
        if sum(self._rank_bytes[r] for r in able) < over - 1.0:
            return False
        for r in able:
            for level in range(self.bands, 0, -1):
                while over > 0 and r in self._ranks and self._ranks[r][level - 1]:
                    over -= self._peel(r, level)
        return True

    def _peel(self, rank: int, level: int) -> float:
        """The highest layers here of the least recently used session go; returns how much that frees."""
        session = next(iter(self._ranks[rank][level - 1]))
        entry = self._entries[session]
        self.take(session)
        if level > 1:
            self._hold(session, _Entry(entry.bytes, rank, level - 1))
        else:
            self._left(session)
        return entry.bytes / self.bands

    def validate(self) -> None:
        """Raise AssertionError when it holds more than it can, or its tables disagree."""
        assert self.in_use_bytes + self.cached_bytes <= self.capacity_bytes * (1 + 1e-9) + 1.0, "a tier holds more than it can"
        listed = {s: (r, n + 1) for r, levels in self._ranks.items() for n, level in enumerate(levels) for s in level}
        assert listed == {s: (e.rank, e.level) for s, e in self._entries.items()}
        held = sum(e.bytes * e.level / self.bands for e in self._entries.values())
        assert abs(held - self.cached_bytes) < 1.0 + 1e-9 * self.cached_bytes
