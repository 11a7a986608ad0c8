"""A tier of another system's node: which sessions' KV it holds whole; the least recently used goes first when it is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from contracts.ids import SessionKey


class Tier:
    """See the module. `left` is told what was evicted. In bytes; `in_use_bytes` belong to running requests and are never evicted."""

    def __init__(self, capacity_bytes: float, left: Callable[[SessionKey], None] = lambda session: None) -> None:
        self.capacity_bytes, self._left = capacity_bytes, left
        self.in_use_bytes = self.cached_bytes = 0.0
        self._entries: OrderedDict[SessionKey, float] = OrderedDict()

    def bytes_of(self, session: SessionKey) -> float:
        """What it holds of this session."""
        return self._entries.get(session, 0.0)

    def put(self, session: SessionKey, bytes_: float) -> bool:
        """Hold so much of a session. False: there is no room for it; the session is not held."""
        self.take(session)
        if self.in_use_bytes + bytes_ > self.capacity_bytes:
            return False
        self._make_room(bytes_)
        self._entries[session] = bytes_
        self.cached_bytes += bytes_
        return True

    def take(self, session: SessionKey) -> float:
        """Give up what is held of a session; returns how much that was."""
        held = self._entries.pop(session, 0.0)
        self.cached_bytes = self.cached_bytes - held if self._entries else 0.0
        return held

    def touch(self, session: SessionKey) -> None:
        """It was used."""
        if session in self._entries:
            self._entries.move_to_end(session)

    def reserve(self, bytes_: float) -> bool:
        """Room for a running request; whatever is cached gives way. False: others in use fill it."""
        if self.in_use_bytes + bytes_ > self.capacity_bytes:
            return False
        self._make_room(bytes_)
        self.in_use_bytes += bytes_
        return True

    def release(self, bytes_: float) -> None:
        """The running request is over."""
        self.in_use_bytes -= bytes_
        if abs(self.in_use_bytes) < 1.0:
            self.in_use_bytes = 0.0

    def _make_room(self, bytes_: float) -> None:
        while self._entries and self.in_use_bytes + self.cached_bytes + bytes_ > self.capacity_bytes:
            session = next(iter(self._entries))
            self.take(session)
            self._left(session)

    def validate(self) -> None:
        """Raise AssertionError when it holds more than it can, or its sums disagree."""
        assert self.in_use_bytes + self.cached_bytes <= self.capacity_bytes * (1 + 1e-9) + 1.0, "a tier holds more than it can"
        assert abs(sum(self._entries.values()) - self.cached_bytes) < 1.0 + 1e-9 * self.cached_bytes
