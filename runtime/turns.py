"""Round robin over owners for a few places, so that one owner's work delays another's by one turn. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Work that waits for one of `places`; first in, first out per owner.

    Invariants: at most `places` run, at most `running_each` per owner; at most `waiting_each` per owner wait;
    `_waiting` has no owner without work, and the owner served longest ago is first.
    """

    def __init__(self, places: int, running_each: int, waiting_each: int) -> None:
        self.places, self.running_each, self.waiting_each = places, running_each, waiting_each
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._running: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Number of waiting pieces of work."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Number of running pieces of work."""
        return self._running.total()

    def ask(self, owner: str, work: T) -> bool:
        """Queues `work`. Returns False, changing nothing, when `waiting_each` of this owner wait already."""
        if len(self._waiting.get(owner, ())) >= self.waiting_each:
            return False
        self._waiting.setdefault(owner, deque()).append(work)
        return True

    def start(self) -> tuple[str, T] | None:
        """Starts the next piece of work and returns it with its owner; None when no place is free or no owner may have
        it."""
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
        """Frees one of the owner's places."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]

    def withdraw(self, owner: str, work: T) -> bool:
        """Removes waiting work; False when it is not waiting."""
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
