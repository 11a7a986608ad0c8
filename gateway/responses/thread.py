"""The one thread that works on a store, in turns by tenant: one tenant's work delays another's by one piece.

It knows nothing of the store: that of responses, or the files for fine-tuning. Work has to be short; whoever has much
of it asks for several turns.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from contracts.errors import RateLimited, Unavailable
from runtime.turns import Turns

#: Reads, and changes that a caller asks for, of one tenant that may wait or run.
WAITING = 1024
T = TypeVar("T")
_Asked = tuple[Callable[[], Any], asyncio.Future[Any]]


class StoreThread:
    """See the module. One event loop."""

    def __init__(self, what: str = "stored responses") -> None:
        """what: it works on, for callers who are told to wait."""
        self._what = what
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=what)
        self._turns: Turns[_Asked] = Turns(1, 1, sys.maxsize)
        #: By owner: the calls without a result yet that may be refused; at most `WAITING`.
        self._refusable: Counter[str] = Counter()
        #: Calls without a result yet, with their owners, and the work that goes on.
        self._asked: set[tuple[str, _Asked]] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self, owner: str, work: Callable[[], T], *, always: bool = False) -> T:
        """What `work` returns or raises. always: however many calls of this owner wait: what was computed is kept.
        Cancelling a waiting call removes it. Raises RateLimited when too many wait, Unavailable when it is closed."""
        if self._closed:
            raise _stopping()
        if always:
            return await self._turn(owner, work)
        if self._refusable[owner] >= WAITING:
            raise RateLimited(f"{WAITING} calls for your {self._what} wait already; try again when they are done")
        self._refusable[owner] += 1
        try:
            return await self._turn(owner, work)
        finally:
            self._refusable[owner] -= 1
            if not self._refusable[owner]:
                del self._refusable[owner]

    async def _turn(self, owner: str, work: Callable[[], T]) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        asked = (work, result)
        self._turns.ask(owner, asked)
        self._asked.add((owner, asked))
        self._next()
        try:
            return await result
        finally:
            self._asked.discard((owner, asked))
            self._turns.withdraw(owner, asked)

    def _next(self) -> None:
        while not self._closed and (started := self._turns.start()) is not None:
            task = asyncio.ensure_future(self._run(*started))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _run(self, owner: str, asked: _Asked) -> None:
        work, result = asked
        try:
            made = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except Exception as error:
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(made)
        finally:
            self._turns.finish(owner)
            self._next()

    async def close(self, last: Callable[[], object]) -> None:
        """Calls that wait raise Unavailable; what runs ends, and then `last` is done. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for owner, asked in self._asked:
            if self._turns.withdraw(owner, asked) and not asked[1].done():
                asked[1].set_exception(_stopping())
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._pool, last)
        self._pool.shutdown(wait=False)


def _stopping() -> Unavailable:
    return Unavailable("this gateway is stopping; try again")
