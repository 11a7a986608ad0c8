"""Detects a stalled engine: when its thread last made progress, and when the running step should have ended.

The engine's thread writes, others read. Each field is one word; a stale read only shifts the result slightly.
"""

from __future__ import annotations


class Progress:
    """See the module. Times are the device clock's."""

    def __init__(self) -> None:
        self._seen_s = self._due_s = 0.0
        self._rests = True

    def rests(self) -> None:
        """The engine waits for an event; no progress is expected."""
        self._rests = True

    def seen(self, now: float) -> None:
        """The engine made progress: took events, computed a layer, or waited briefly for KV."""
        self._seen_s, self._rests = now, False

    def step(self, now: float, expected_s: float) -> None:
        """A step of `expected_s` seconds begins."""
        self._due_s = now + expected_s
        self.seen(now)

    def stepped(self, now: float) -> None:
        """The step has ended."""
        self._due_s = now
        self.seen(now)

    def stalled_s(self, now: float) -> float:
        """Seconds without progress, counted from when the step should have ended."""
        return 0.0 if self._rests else max(now - max(self._seen_s, self._due_s), 0.0)
