"""The one thread that works on a store, in turns by tenant. It knows nothing of the store: that of responses, or the
files for fine-tuning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from contracts.errors import RateLimited
from runtime.thread_turns import ThreadTurns

#: Reads, and changes that a caller asks for, of one tenant that may wait or run.
WAITING = 1024
T = TypeVar("T")


class StoreThread:
    """See the module. One event loop."""

    def __init__(self, what: str = "stored responses") -> None:
        """what: it works on, for callers who are told to wait."""
        self._what = what
        self._turns = ThreadTurns(what)
        #: By tenant: the calls without a result yet that may be refused; at most `WAITING`.
        self._refusable: Counter[str] = Counter()

    async def run(self, tenant: str, work: Callable[[], T], *, always: bool = False) -> T:
        """See `ThreadTurns.run`. always: however many calls of this tenant wait: what was computed is kept. Raises
        RateLimited when too many wait, Unavailable when it is closed."""
        if always:
            return await self._turns.run(tenant, work)
        if self._refusable[tenant] >= WAITING:
            raise RateLimited(f"{WAITING} calls for your {self._what} wait already; try again when they are done")
        self._refusable[tenant] += 1
        try:
            return await self._turns.run(tenant, work)
        finally:
            self._refusable[tenant] -= 1
            if not self._refusable[tenant]:
                del self._refusable[tenant]

    async def close(self, last: Callable[[], object]) -> None:
        """See `ThreadTurns.close`."""
        await self._turns.close(last)
