"""Whether the engine gets on: when its thread was last seen to do something, and by when the step that runs should have ended.

The engine's thread writes, others read: each field is one word, and a reader that sees one of them a moment late is wrong by that moment.
"""

from __future__ import annotations


class Progress:
    """See the module. Times are the device clock's."""

    def __init__(self) -> None:
        self._seen_s = self._due_s = 0.0
        self._rests = True

    def rests(self) -> None:
        """The engine waits for an event: it owes nothing."""
        self._rests = True

    def seen(self, now: float) -> None:
        """It did something: took events, computed a layer, waited a moment for KV that is on its way."""
        self._seen_s, self._rests = now, False

    def step(self, now: float, expected_s: float) -> None:
        """A step begins that should take so long."""
        self._due_s = now + expected_s
        self.seen(now)

    def stepped(self, now: float) -> None:
        """It has ended."""
        self._due_s = now
        self.seen(now)

    def stalled_s(self, now: float) -> float:
        """How long it has done nothing beyond the time at which its step should have ended."""
        return 0.0 if self._rests else max(now - max(self._seen_s, self._due_s), 0.0)
