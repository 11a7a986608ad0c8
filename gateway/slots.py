"""Limits concurrent requests for text: each takes a slot, waits briefly for one, or gets 503. `core.slots` decides who
is next."""

from __future__ import annotations

import asyncio

from contracts.errors import Unavailable
from gateway import metrics
from gateway.core.slots import Place, Slots


class Turnstile:
    """Pass what `enter` returns to `leave`, also after a failure."""

    def __init__(self, slots: Slots, wait_s: float) -> None:
        """wait_s: how long a request may wait; 0: not at all."""
        self._slots, self._wait_s = slots, wait_s
        self._turns: dict[int, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._turns)

    async def enter(self, tenant: str, priority: int) -> Place:
        """A slot. Raises Unavailable when none becomes free in time, when too many requests wait, or after `close`."""
        place = self._slots.ask(tenant, priority)
        if place is None:
            raise _full()
        if place.state == "held":
            return place
        if not self._wait_s:
            self.leave(place)
            raise _full()
        turn = self._turns[place.number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as e:
            # Also returns a slot that was granted at this moment.
            self.leave(place)
            if isinstance(e, TimeoutError):
                raise _full() from None
            raise
        finally:
            del self._turns[place.number]
        return place

    def leave(self, place: Place) -> None:
        """The request has ended: give its slot to the next."""
        for let_in in self._slots.leave(place):
            turn = self._turns[let_in.number]
            if not turn.done():
                turn.set_result(None)

    def close(self) -> None:
        """Fail all waiting requests: the gateway stops."""
        for turn in self._turns.values():
            if not turn.done():
                turn.set_exception(Unavailable("this gateway is stopping; try again"))


def _full() -> Unavailable:
    metrics.SHED.labels("requests").inc()
    return Unavailable("this gateway answers as many requests as it can; try again", code="overloaded")
