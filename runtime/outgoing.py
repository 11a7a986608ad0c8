"""A queue of outgoing stream messages that joins messages of the same kind while they wait.

A message costs both ends far more than a few more pieces in one, so joining pays when pieces arrive faster than
messages are sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class Outgoing(Generic[M]):
    """A FIFO queue. `join(last, new)` merges `new` into the waiting `last` and returns True, or changes nothing and
    returns False."""

    def __init__(self, join: Callable[[M, M], bool]) -> None:
        self._join = join
        self._waiting: deque[M | None] = deque()
        self._some = asyncio.Event()

    def put(self, message: M | None) -> None:
        """Queues a message; None ends the stream."""
        last = self._waiting[-1] if self._waiting else None
        if message is None or last is None or not self._join(last, message):
            self._waiting.append(message)
        self._some.set()

    async def get(self) -> M | None:
        """The next message; waits for one."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popleft()
