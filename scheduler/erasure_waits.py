"""Who waits for the stores' answers to erasures. An answer costs one look at its own session's erasure, however many
others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from scheduler.core.erasures import Erasure


@dataclass(eq=False, slots=True)
class _Wait:
    """erasure: the session's latest, with the stores told of it. waiting: calls that wait for it or for one that it
    replaced."""

    erasure: Erasure
    told: Collection[str]
    waiting: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ErasureWaits:
    """See the module. Invariant: a session is kept only while somebody waits for it and its wait is not over."""

    def __init__(self, connected: Collection[str]) -> None:
        """connected: the names of the connected stores, kept up to date by the caller."""
        self._connected = connected
        self._waits: dict[SessionKey, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._waits

    async def wait(self, session: SessionKey, erasure: Erasure, told: Collection[str], timeout_s: float) -> Erasure:
        """Wait until those of the told stores that are still connected have answered. Returns the erasure they have
        answered: the session's latest, because stores' answers count for that one only."""
        wait = self._waits.setdefault(session, _Wait(erasure, told))
        wait.erasure, wait.told, wait.waiting = erasure, told, wait.waiting + 1
        self._look(session, wait)
        try:
            async with asyncio.timeout(timeout_s):
                await wait.over.wait()
        except TimeoutError:
            pass
        finally:
            wait.waiting -= 1
            if not wait.waiting and self._waits.get(session) is wait:
                del self._waits[session]
        return wait.erasure

    def heard(self, session: SessionKey) -> None:
        """A store has answered the session's erasure, and its `words` have that."""
        if (wait := self._waits.get(session)) is not None:
            self._look(session, wait)

    def store_left(self, name: str) -> None:
        """The store is not connected any more: nobody waits for it, unless no store has taken the erasure yet. Then one
        that comes back in time is told again, and answers."""
        for session, wait in list(self._waits.items()):
            if name in wait.told and wait.erasure.taken:
                self._look(session, wait)

    def _look(self, session: SessionKey, wait: _Wait) -> None:
        """End the wait if it is over."""
        if all(name in wait.erasure.words for name in wait.told if name in self._connected):
            wait.over.set()
            del self._waits[session]
