"""Runs calls from threads on the event loop that created the mailbox, with one wake-up for calls that come together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """See the module. failed: called when a call raises; the others are still made."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._woken = False

    def put(self, call: Callable[[], None]) -> None:
        """Schedule the call, in order. Thread-safe; ignored when the loop is closed."""
        with self._lock:
            self._calls.append(call)
            wake, self._woken = not self._woken, True
        if wake:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._lock:
            calls, self._calls, self._woken = self._calls, deque(), False
        for call in calls:
            try:
                call()
            except Exception as e:
                self._failed(e)
