"""A tier of one node: which sessions' KV it holds, whole prefixes, and who goes first when it is full.

Victims as in the store (`kvstore.core.eviction`), a session at a time: whose hint ended or was withdrawn, then the unadvised, then the
advised, the least urgent first; within these the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from contracts.ids import SessionKey

DOUBTED, PLAIN = 0, 1
#: The rank of an advised session is this less its priority.
_ADVISED = 1 << 20


def advised(priority: int) -> int:
    """The rank of a session that a hint of this priority brought."""
    return _ADVISED - priority


class Tier:
    """See the module. `left` is told what was evicted. In bytes; `in_use_bytes` belong to running requests and are never evicted."""

    def __init__(self, capacity_bytes: float, left: Callable[[SessionKey], None] = lambda session: None) -> None:
        self.capacity_bytes, self._left = capacity_bytes, left
        self.in_use_bytes = self.cached_bytes = 0.0
        self._ranks: dict[int, OrderedDict[SessionKey, float]] = {}
        self._rank_bytes: dict[int, float] = {}
        self._rank_of: dict[SessionKey, int] = {}

    def bytes_of(self, session: SessionKey) -> float:
        """What it holds of this session; 0: nothing."""
        rank = self._rank_of.get(session)
        return 0.0 if rank is None else self._ranks[rank][session]

    def put(self, session: SessionKey, bytes_: float, rank: int = PLAIN) -> bool:
        """Hold so much of a session. False: there is no room without evicting a better one; then all is as before but for the session."""
        self.take(session)
        if not self._make_room(bytes_, rank):
            return False
        self._hold(session, bytes_, rank)
        return True

    def _hold(self, session: SessionKey, bytes_: float, rank: int) -> None:
        self._ranks.setdefault(rank, OrderedDict())[session] = bytes_
        self._rank_of[session] = rank
        self._rank_bytes[rank] = self._rank_bytes.get(rank, 0.0) + bytes_
        self.cached_bytes += bytes_

    def take(self, session: SessionKey) -> float:
        """Give up what is held of a session; returns how much that was."""
        rank = self._rank_of.pop(session, None)
        if rank is None:
            return 0.0
        bytes_ = self._ranks[rank].pop(session)
        self._freed(rank, bytes_)
        return bytes_

    def _freed(self, rank: int, bytes_: float) -> None:
        self.cached_bytes -= bytes_
        self._rank_bytes[rank] -= bytes_
        if not self._ranks[rank]:
            del self._ranks[rank], self._rank_bytes[rank]

    def touch(self, session: SessionKey, rank: int) -> None:
        """It was used, or its rank changes."""
        if session in self._rank_of:
            self._hold(session, self.take(session), rank)

    def reserve(self, bytes_: float) -> bool:
        """Room for a running request; whatever is cached gives way. False: others in use fill it."""
        if self.in_use_bytes + bytes_ > self.capacity_bytes:
            return False
        self._make_room(bytes_, None)
        self.in_use_bytes += bytes_
        return True

    def release(self, bytes_: float) -> None:
        """The running request is over."""
        self.in_use_bytes -= bytes_
        if abs(self.in_use_bytes) < 1.0:
            self.in_use_bytes = 0.0

    def _make_room(self, bytes_: float, rank: int | None) -> bool:
        """Evict until so much is free, nobody of a better rank than `rank`; plain sessions and None may evict anyone."""
        over = self.in_use_bytes + self.cached_bytes + bytes_ - self.capacity_bytes
        if over <= 0:
            return True
        if self.in_use_bytes + bytes_ > self.capacity_bytes:
            return False
        able = [r for r in sorted(self._ranks) if rank is None or rank == PLAIN or r <= rank]
        if sum(self._rank_bytes[r] for r in able) < over:
            return False
        for r in able:
            held = self._ranks[r]
            while held and over > 0:
                session, freed = held.popitem(last=False)
                del self._rank_of[session]
                over -= freed
                self._freed(r, freed)
                self._left(session)
        return True

    def validate(self) -> None:
        """Raise AssertionError when it holds more than it can, or its tables disagree."""
        assert self.in_use_bytes + self.cached_bytes <= self.capacity_bytes * (1 + 1e-9) + 1.0, "a tier holds more than it can"
        held = {session: bytes_ for sessions in self._ranks.values() for session, bytes_ in sessions.items()}
        assert held.keys() == self._rank_of.keys() and abs(sum(held.values()) - self.cached_bytes) < 1.0 + 1e-9 * self.cached_bytes
