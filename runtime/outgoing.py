"""What waits to be sent on a stream: messages that say the same kind of thing are joined for as long as they wait.

A message costs both ends far more than a few pieces more in one, and while pieces come faster than messages are sent there are several.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class Outgoing(Generic[M]):
    """In order. `join(last, new)` puts `new` into `last`, which waits, and is true; or is false, with nothing changed."""

    def __init__(self, join: Callable[[M, M], bool]) -> None:
        self._join = join
        self._waiting: deque[M | None] = deque()
        self._some = asyncio.Event()

    def put(self, message: M | None) -> None:
        """Queue it; None ends the stream."""
        last = self._waiting[-1] if self._waiting else None
        if message is None or last is None or not self._join(last, message):
            self._waiting.append(message)
        self._some.set()

    async def get(self) -> M | None:
        """The next, once there is one."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popleft()
