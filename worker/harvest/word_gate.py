"""`Gate` by the words that the worker writes."""

from __future__ import annotations

import threading
import time

from worker.harvest.gate import Stopped
from worker.harvest.words import Word, Words

#: A paused lane looks again after so long, in seconds, if nobody wakes it.
_LOOK_S = 0.1


class WordGate:
    """See the module."""

    def __init__(self, words: Words) -> None:
        self._words, self._woken, self._counting = words, threading.Condition(), threading.Lock()

    def enter(self, lane: int) -> None:
        """See `Gate.enter`."""
        words = self._words
        while not self.stopped:
            if lane < words[Word.LANES]:
                words[Word.BEGAN_NS + lane] = time.monotonic_ns()
                return
            with self._woken:
                self._woken.wait(_LOOK_S)
        raise Stopped("the worker wants it")

    def leave(self, lane: int, seconds: float) -> None:
        """See `Gate.leave`."""
        words = self._words
        words[Word.BEGAN_NS + lane] = 0
        with self._counting:
            words[Word.UNITS] += 1
            words[Word.LONGEST_NS] = max(words[Word.LONGEST_NS], int(seconds * 1e9))

    @property
    def stopped(self) -> bool:
        """Whether the worker wants the job to end."""
        return self._words[Word.STOP] != 0

    def wake(self) -> None:
        """The words have changed."""
        with self._woken:
            self._woken.notify_all()
