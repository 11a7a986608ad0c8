"""Decides whose request body is sent to a worker next: small bodies first, in one piece, then large ones in turn.

So nobody waits behind a large body for longer than one message.
"""

from __future__ import annotations

from collections import deque

from contracts.http_flights import PIECE_BYTES


class BodyTurns:
    """The bodies on their way to one worker, by the number of their flight. Invariant: a large body has bytes left."""

    def __init__(self) -> None:
        self._small: deque[tuple[int, bytes]] = deque()
        #: The next one first: the body, and the bytes of it already sent.
        self._large: dict[int, tuple[bytes, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def add(self, flight: int, body: bytes) -> None:
        """Another body to send, perhaps an empty one."""
        if len(body) <= PIECE_BYTES:
            self._small.append((flight, body))
        else:
            self._large[flight] = body, 0

    def drop(self, flight: int) -> None:
        """Send no more of a body."""
        if self._large.pop(flight, None) is None:
            self._small = deque(waiting for waiting in self._small if waiting[0] != flight)

    def next(self, room: int) -> tuple[int, bytes, bool] | None:
        """Remove and return the next piece of at most `room` bytes: its flight, and whether it is the last one. None:
        nothing fits. room: 1 to `PIECE_BYTES`."""
        if self._small:
            return (*self._small.popleft(), True) if len(self._small[0][1]) <= room else None
        if not self._large:
            return None
        flight = next(iter(self._large))
        body, at = self._large.pop(flight)
        end = at + room
        if end < len(body):
            self._large[flight] = body, end
        return flight, body[at:end], end >= len(body)

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert all(0 <= at < len(body) for body, at in self._large.values())
