"""Hints for sessions that are about to come back: after an answer that calls tools, or while a step before the request
runs. For hooks that know sessions, but neither agents nor runs (those: `workflow.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from upbeat.client import HintClient
from upbeat.forking import renew_in_children
from upbeat.pace import Pace

#: Hinted sessions whose request has not come; above this the oldest is forgotten.
MAX_OPEN = 10_000


class Returns:
    """Hints of sessions, from any thread, each with the usual delay of its step. Expiry withdraws those that did not
    come true."""

    def __init__(self, client: HintClient, *, priority: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self._priority, self._clock = priority, clock
        self._pace = Pace()
        #: Session id to (step, time of the hint).
        self._open: dict[str, tuple[str, float]] = {}
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Create this process's lock."""
        self._lock = threading.Lock()

    def asks(self, session_id: str) -> None:
        """The session's request is sent now."""
        now = self._clock()
        with self._lock:
            came_true = self._open.pop(session_id, None)
            if came_true is not None:
                self._pace.note((came_true[0],), now - came_true[1])

    def will_ask(self, session_id: str, after: str, *, model_id: str | None = None) -> None:
        """The session's request follows this step (`tool_calls`, the name of a retriever)."""
        now = self._clock()
        with self._lock:
            expected_s = self._pace.expected_s((after,))
            self._open[session_id] = (after, now)
            if len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
        self.client.advise(session_id, model_id=model_id, expected_arrival=expected_s, priority=self._priority)

    def withdraw(self, session_id: str) -> None:
        """The request will not come: withdraw its hint, if there is one."""
        with self._lock:
            known = self._open.pop(session_id, None)
        if known is not None:
            self.client.invalidate(session_id)
