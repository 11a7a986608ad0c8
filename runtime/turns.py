"""Who is next when several owners want a few places: round robin over owners, so that what one asks for delays the others by one turn.

Pure: the shell that has the places asks, and says when one is free again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Work that waits for one of `places`, in each owner's own order.

    Invariants: at most `places` run, of them at most `running_each` of one owner; at most `waiting_each` of one owner wait; `_waiting`
    has no owner without work, and the owner that was served longest ago is first.
    """

    def __init__(self, places: int, running_each: int, waiting_each: int) -> None:
        self.places, self.running_each, self.waiting_each = places, running_each, waiting_each
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._running: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Pieces of work that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Pieces of work that have a place."""
        return self._running.total()

    def ask(self, owner: str, work: T) -> bool:
        """Let `work` wait for its turn, or nothing when too much of this owner waits already."""
        if len(self._waiting.get(owner, ())) >= self.waiting_each:
            return False
        self._waiting.setdefault(owner, deque()).append(work)
        return True

    def start(self) -> tuple[str, T] | None:
        """The next piece of work and its owner, which has a place from now on; None when no place is free or nobody may have it."""
        if self.running >= self.places:
            return None
        owner = next((o for o in self._waiting if self._running[o] < self.running_each), None)
        if owner is None:
            return None
        work = self._waiting[owner].popleft()
        self._running[owner] += 1
        self._waiting.move_to_end(owner)
        if not self._waiting[owner]:
            del self._waiting[owner]
        return owner, work

    def finish(self, owner: str) -> None:
        """One of the owner's places is free again."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]

    def withdraw(self, owner: str, work: T) -> bool:
        """Forget work that waits; False when it has started or never asked."""
        mine = self._waiting.get(owner)
        if mine is None or work not in mine:
            return False
        mine.remove(work)
        if not mine:
            del self._waiting[owner]
        return True

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert self.running <= self.places
        assert all(0 < n <= self.running_each for n in self._running.values())
        assert all(0 < len(mine) <= self.waiting_each for mine in self._waiting.values())
