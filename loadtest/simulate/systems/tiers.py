"""A tier of another system's node: holds the KV of whole sessions, and evicts the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from contracts.ids import SessionKey


class SessionTier:
    """See the module. left: called with each evicted session. in_use_bytes: of running requests, never evicted."""

    def __init__(self, capacity_bytes: float, left: Callable[[SessionKey], None] = lambda session: None) -> None:
        self.capacity_bytes, self._left = capacity_bytes, left
        self.in_use_bytes = self.cached_bytes = 0.0
        self._entries: OrderedDict[SessionKey, float] = OrderedDict()

    def bytes_of(self, session: SessionKey) -> float:
        """Bytes held of a session."""
        return self._entries.get(session, 0.0)

    def put(self, session: SessionKey, bytes_: float) -> bool:
        """Hold `bytes_` of a session, evicting others. False: no room; nothing of the session is held."""
        self.take(session)
        if self.in_use_bytes + bytes_ > self.capacity_bytes:
            return False
        self._make_room(bytes_)
        self._entries[session] = bytes_
        self.cached_bytes += bytes_
        return True

    def take(self, session: SessionKey) -> float:
        """Remove a session; returns its bytes."""
        held = self._entries.pop(session, 0.0)
        self.cached_bytes = self.cached_bytes - held if self._entries else 0.0
        return held

    def touch(self, session: SessionKey) -> None:
        """Mark a session as used."""
        if session in self._entries:
            self._entries.move_to_end(session)

    def reserve(self, bytes_: float) -> bool:
        """Reserve room for a running request, evicting cache. False: running requests leave no room."""
        if self.in_use_bytes + bytes_ > self.capacity_bytes:
            return False
        self._make_room(bytes_)
        self.in_use_bytes += bytes_
        return True

    def release(self, bytes_: float) -> None:
        """Release a reservation."""
        self.in_use_bytes -= bytes_
        if abs(self.in_use_bytes) < 1.0:
            self.in_use_bytes = 0.0

    def _make_room(self, bytes_: float) -> None:
        while self._entries and self.in_use_bytes + self.cached_bytes + bytes_ > self.capacity_bytes:
            session = next(iter(self._entries))
            self.take(session)
            self._left(session)

    def validate(self) -> None:
        """Raise AssertionError if it exceeds its capacity, or its sums are wrong."""
        assert self.in_use_bytes + self.cached_bytes <= self.capacity_bytes * (1 + 1e-9) + 1.0, (
            "a tier holds more than it can"
        )
        assert abs(sum(self._entries.values()) - self.cached_bytes) < 1.0 + 1e-9 * self.cached_bytes
