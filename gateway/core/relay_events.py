"""Splits an engine's stream of server-sent events at the ends of events.

Callers get whole events only, byte for byte. So when an engine is lost in the middle of an event, the error event that
follows is not glued to half of another.
"""

from __future__ import annotations

#: A longer event is passed on in parts.
MOST_HELD_BYTES = 1 << 20


class Events:
    """One stream. Invariant: the unfinished event that is held has at most `MOST_HELD_BYTES`."""

    def __init__(self) -> None:
        self._held = bytearray()
        #: The last bytes that were passed on end within an event.
        self.torn = False

    def push(self, piece: bytes) -> bytes:
        """What can be passed on after another piece: whole events, unless one is too long."""
        if not self._held and piece.endswith(b"\n\n"):
            self.torn = False
            return piece
        searched = max(0, len(self._held) - 3)
        self._held += piece
        ready = max(_end(self._held, b"\n\n", searched), _end(self._held, b"\r\n\r\n", searched))
        if not ready and len(self._held) > MOST_HELD_BYTES:
            self.torn = True
            return self._take(len(self._held))
        if ready:
            self.torn = False
        return self._take(ready)

    def rest(self) -> bytes:
        """What is held, at the end of a complete stream."""
        return self._take(len(self._held))

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert len(self._held) <= MOST_HELD_BYTES

    def _take(self, length: int) -> bytes:
        taken = bytes(self._held[:length])
        del self._held[:length]
        return taken


def _end(held: bytearray, separator: bytes, searched: int) -> int:
    """Where the last event ends; 0: none does."""
    found = held.rfind(separator, searched)
    return 0 if found < 0 else found + len(separator)


def data_of(events: bytes) -> list[bytes]:
    """The data of each event that has some."""
    if events.startswith(b"data: ") and events.endswith(b"\n\n") and events.count(b"\n") == 2 and b"\r" not in events:
        return [events[6:-2]]  # what nearly every piece of a stream is
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n")
    found = []
    for event in events.split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            found.append(b"\n".join(lines))
    return found
