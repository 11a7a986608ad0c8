"""Threads that render and tokenise prompts, in turns by tenant. Small prompts never wait for large ones.

Rendering holds the interpreter's lock and takes milliseconds; tokenising releases it and takes half a second per
megabyte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from contracts.context import text_bytes
from contracts.errors import Unavailable
from contracts.request import GenerateRequest
from runtime import niceness
from runtime.turns import Turns

T = TypeVar("T")
#: Largest small prompt, in bytes of text or token ids.
SMALL = 64 << 10
#: What a message costs beside its text, in bytes of text: a template runs for each.
_MESSAGE = 64
#: Threads for small and for large prompts, each, and limit of a tenant's waiting prompts.
_THREADS, WAITING = 2, 4096


class _Lane:
    """A pool of threads with a queue per tenant. One event loop."""

    def __init__(self, name: str, nice: int = 0) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, name, niceness.step_back, (nice,))
        self._turns: Turns[tuple[Callable[[], Any], asyncio.Future[Any]]] = Turns(_THREADS, _THREADS - 1, WAITING)

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        asked = (work, result)
        if not self._turns.ask(owner, asked):
            raise Unavailable("too many of this tenant's prompts wait to be read; try again", code="overloaded")
        self._next()
        try:
            return await result
        finally:
            self._turns.withdraw(owner, asked)

    def _next(self) -> None:
        while (started := self._turns.start()) is not None:
            asyncio.ensure_future(self._run(*started))  # noqa: RUF006 - it answers through the future

    async def _run(self, owner: str, asked: tuple[Callable[[], Any], asyncio.Future[Any]]) -> None:
        work, result = asked
        try:
            made = await asyncio.get_running_loop().run_in_executor(self._pool, work)
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
        self._pool.shutdown(wait=False, cancel_futures=True)


class Tokenising:
    """Runs work on prompts. One event loop."""

    def __init__(self) -> None:
        self._small = _Lane("tokenise")
        self._large = _Lane("tokenise-large", niceness.TOKENISER)

    async def run(self, tenant: str, amount: int, work: Callable[[], T]) -> T:
        """Runs `work` on a prompt of about `amount` bytes of text or token ids. Raises Unavailable when too many of the
        tenant's prompts wait."""
        lane = self._small if amount <= SMALL else self._large
        return await lane.run(tenant, work)

    def stop(self) -> None:
        """Ends the threads."""
        self._small.stop()
        self._large.stop()


def size(request: GenerateRequest) -> int:
    """About the work of a request's prompt, in bytes of text, or its number of token ids."""
    if request.prompt_tokens is not None:
        return len(request.prompt_tokens)
    if request.prompt is not None:
        return text_bytes(request.prompt)
    called = request.tool_use.tools if request.tool_use is not None else ""
    return len(called) + sum(map(_message_size, request.messages or ()))


def _message_size(message: dict[str, Any]) -> int:
    content, calls = message.get("content"), message.get("tool_calls")
    return _MESSAGE + (text_bytes(content) if isinstance(content, str) else 0) + (len(str(calls)) if calls else 0)
