"""Threads that do work in turns by owner, so that one owner's work delays another's by one piece."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from contracts.errors import Unavailable
from runtime import niceness
from runtime.turns import Turns

T = TypeVar("T")
_Asked = tuple[Callable[[], Any], asyncio.Future[Any]]


class ThreadTurns:
    """See the module. Work has to be short; whoever has much of it asks for several turns. One event loop.

    threads: of them, one owner has `running_each` at most. waiting_each: calls of an owner that may wait. nice: added
    to the threads' niceness.
    """

    def __init__(
        self, name: str, threads: int = 1, running_each: int = 1, waiting_each: int = sys.maxsize, nice: int = 0
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, name, niceness.step_back, (nice,))
        self._turns: Turns[_Asked] = Turns(threads, running_each, waiting_each)
        #: Calls without a result yet, with their owners, and the work that goes on.
        self._asked: set[tuple[str, _Asked]] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Cancelling a waiting call removes it. Raises asyncio.QueueFull when too many
        of this owner wait, Unavailable when it is closed."""
        if self._closed:
            raise _stopping()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        asked = (work, result)
        if not self._turns.ask(owner, asked):
            raise asyncio.QueueFull
        self._asked.add((owner, asked))
        self._next()
        try:
            return await result
        finally:
            self._asked.discard((owner, asked))
            if result.cancelled():
                self._turns.withdraw(owner, asked)

    def _next(self) -> None:
        while not self._closed and (started := self._turns.start()) is not None:
            owner, (work, result) = started
            done = asyncio.get_running_loop().run_in_executor(self._pool, work)
            task = asyncio.ensure_future(self._finish(owner, done, result))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _finish(self, owner: str, done: asyncio.Future[Any], result: asyncio.Future[Any]) -> None:
        try:
            made = await done
        except BaseException as error:  # panics of Rust libraries are no Exception
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(made)
        finally:
            self._turns.finish(owner)
            self._next()

    def stop(self) -> None:
        """Calls that wait raise Unavailable, as later ones do; what runs ends by itself. Idempotent."""
        self._refuse()
        self._pool.shutdown(wait=False)

    async def close(self, last: Callable[[], object]) -> None:
        """As `stop`, but waits for what runs, and then does `last` on a thread. Idempotent."""
        if self._closed:
            return
        self._refuse()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._pool, last)
        self._pool.shutdown(wait=False)

    def _refuse(self) -> None:
        self._closed = True
        for owner, asked in self._asked:
            if self._turns.withdraw(owner, asked) and not asked[1].done():
                asked[1].set_exception(_stopping())


def _stopping() -> Unavailable:
    return Unavailable("this process is stopping; try again")
