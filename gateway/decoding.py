"""Reads bodies: small ones at once, others in processes of their own, where they hold nobody up and end at a limit of time and memory.

`python -m gateway.decoder` is such a process. Tenants share them fairly; one of them alone never has them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import overload

from contracts.errors import BodyTooLarge, Unavailable
from gateway import metrics
from gateway.core.bodies import Tally
from gateway.openai.asked import Asked, Kind, TextKind, Told, ask
from gateway.openai.asked_wire import decode_answer, encode_question
from gateway.openai.token_requests import TokenKind, TokensAsked
from runtime import niceness
from runtime.children import ChildDied, Children, ChildrenBusy, ChildTimeout

DECODER = (sys.executable, "-m", "gateway.decoder")
#: The heaviest body of 16 MiB takes a second of a free core, but the engine may use all of them. From when a helper has it, and until then.
DEADLINE_S, WAIT_S = 30.0, 20.0
#: Bodies of one tenant that wait for a process; what they hold is bounded by the tenant's share of bytes.
_WAITING = 64
#: Address space of a process beyond what it has before it has read anything, in decoded bodies: the copies of validation.
_COPIES = 3


class Decoding:
    """Reads bodies. One event loop."""

    def __init__(self, processes: int, most_decoded_bytes: int, program: Sequence[str] = DECODER) -> None:
        """most_decoded_bytes: what one body may become (`core.bodies`). program: whose main calls `serve`."""
        # Processes that were killed while they rested, as where memory is short, cost a body one attempt each at most.
        self._tries = processes + 1
        self._children = Children(
            program,
            count=processes,
            memory_bytes=_COPIES * most_decoded_bytes,
            per_owner=_WAITING,
            nice=niceness.DECODER,
        )
        self._starting: asyncio.Future[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the processes, which takes a second, before the first large body comes; one that comes meanwhile waits."""
        self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        with contextlib.suppress(ChildDied):  # it is logged; the first large body tries again
            await self._children.start()

    @overload
    async def ask(self, kind: TextKind, body: bytes, tally: Tally, told: Told) -> Asked: ...
    @overload
    async def ask(self, kind: TokenKind, body: bytes, tally: Tally, told: Told) -> TokensAsked: ...
    async def ask(self, kind: Kind, body: bytes, tally: Tally, told: Told) -> Asked | TokensAsked:
        """What `body` asks for. Raises RequestError: InvalidRequest for what is wrong with it, Unavailable when too much waits."""
        if tally.light:
            return ask(kind, body, told)
        metrics.HEAVY.inc()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        question = encode_question(kind, body, told)
        for _ in range(self._tries):
            try:
                answer: Asked | TokensAsked = decode_answer(await self._children.call(told.tenant, question, DEADLINE_S, WAIT_S))
                return answer
            except (ChildrenBusy, ChildTimeout):
                metrics.SHED.labels("decoding").inc()
                raise Unavailable("this gateway reads as many large bodies as it can; try again", code="overloaded") from None
            except ChildDied:
                if self._closed:
                    raise Unavailable("this gateway is stopping; try again") from None
        raise BodyTooLarge("the body could not be decoded within this gateway's memory; send fewer values")

    async def close(self) -> None:
        """End the processes."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        await self._children.close()
