"""Decodes bodies: small ones on the event loop, others in helper processes with limits on time and memory.

A helper is `python -m gateway.decoder`. Tenants share the helpers fairly; one tenant never occupies all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from contracts.errors import BodyTooLarge, Unavailable
from gateway import metrics
from gateway.asked_wire import decode_answer, encode_question, encode_reading
from gateway.asking import Kind, ask
from gateway.core.bodies import Tally
from gateway.core.relay_answers import Reading
from gateway.openai.asked import Told
from gateway.translating import Stored
from runtime import niceness
from runtime.children import ChildDied, Children, ChildrenBusy, ChildTimeout
from runtime.thread_turns import ThreadTurns

T = TypeVar("T")

DECODER = (sys.executable, "-m", "gateway.decoder")
#: Seconds a helper may take, and seconds a body may wait for a helper. The heaviest body of 16 MiB takes one second of
#: a free core, but the engine may use all cores.
DEADLINE_S, WAIT_S = 30.0, 20.0
#: Bodies of one tenant that may wait for a helper. The tenant's share bounds their bytes.
_WAITING = 64
#: A helper's address space beyond its initial size, in decoded bodies: validation makes copies.
_COPIES = 3


class Decoding:
    """Decodes bodies for one event loop."""

    def __init__(self, processes: int, most_decoded_bytes: int, program: Sequence[str] = DECODER) -> None:
        """most_decoded_bytes: decoded size of one body at most (`core.bodies`). program: the helper, which calls
        `runtime.child.serve`."""
        # Each idle helper that was killed meanwhile (when memory is short) costs a body one attempt.
        self._tries = processes + 1
        self._children = Children(
            program,
            count=processes,
            memory_bytes=_COPIES * most_decoded_bytes,
            per_owner=_WAITING,
            nice=niceness.DECODER,
        )
        self._starting: asyncio.Future[None] | None = None
        self._beside = ThreadTurns("translate", waiting_each=_WAITING, nice=niceness.DECODER)
        self._closed = False

    def start(self) -> None:
        """Start the helpers, which takes a second, before the first large body arrives; a body that arrives meanwhile
        waits."""
        self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        with contextlib.suppress(ChildDied):  # already logged; the first large body tries again
            await self._children.start()

    async def ask(self, kind: Kind, body: bytes, tally: Tally, told: Told, stored: Stored | None = None) -> Any:
        """The request in `body`, a `Question`. stored: what it names of stored responses; `tally` counts that too.
        Raises InvalidRequest for an invalid body, BodyTooLarge when decoding takes too much memory, Unavailable when
        too many bodies wait."""
        if tally.light:
            return ask(kind, body, told, stored)
        return await self._helped(told.tenant, encode_question(kind, body, told, stored))

    async def read(self, tenant: str, reading: Reading, body: bytes, tally: Tally) -> Reading:
        """`reading` after a whole answer of an engine. Raises BodyTooLarge and Unavailable as `ask` does."""
        if tally.light:
            reading.whole(body)
            return reading
        found: Reading = await self._helped(tenant, encode_reading(reading, body))
        return found

    async def beside(self, tenant: str, tally: Tally, work: Callable[[], T]) -> T:
        """What `work` on a body makes of it, on a thread if the body is large; tenants take turns. Raises what `work`
        does, and Unavailable when too many wait."""
        if tally.light:
            return work()
        try:
            return await self._beside.run(tenant, work)
        except asyncio.QueueFull:
            metrics.SHED.labels("decoding").inc()
            raise _overloaded() from None

    async def _helped(self, tenant: str, question: bytes) -> Any:
        """A helper's answer."""
        metrics.HEAVY.inc()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        for _ in range(self._tries):
            try:
                return decode_answer(await self._children.call(tenant, question, DEADLINE_S, WAIT_S))
            except (ChildrenBusy, ChildTimeout):
                metrics.SHED.labels("decoding").inc()
                raise _overloaded() from None
            except ChildDied:
                if self._closed:
                    raise Unavailable("this gateway is stopping; try again") from None
        raise BodyTooLarge("the body could not be decoded within this gateway's memory; send fewer values")

    async def close(self) -> None:
        """Stop the helpers and the thread."""
        self._closed = True
        self._beside.stop()
        if self._starting is not None:
            self._starting.cancel()
        await self._children.close()


def _overloaded() -> Unavailable:
    return Unavailable("this gateway reads as many large bodies as it can; try again", code="overloaded")
