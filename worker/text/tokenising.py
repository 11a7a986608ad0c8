"""Threads that render and tokenise prompts, in turns by tenant. Small prompts never wait for large ones.

Rendering holds the interpreter's lock and takes milliseconds; tokenising releases it and takes half a second per
megabyte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from contracts.context import text_bytes
from contracts.errors import Unavailable
from contracts.request import GenerateRequest
from runtime import niceness
from runtime.thread_turns import ThreadTurns

T = TypeVar("T")
#: Largest small prompt, in bytes of text or token ids.
SMALL = 64 << 10
#: What a message costs beside its text, in bytes of text: a template runs for each.
_MESSAGE = 64
#: Threads for small and for large prompts, each, and limit of a tenant's waiting prompts.
_THREADS, WAITING = 2, 4096


class Tokenising:
    """Runs work on prompts. One event loop."""

    def __init__(self) -> None:
        self._small = ThreadTurns("tokenise", _THREADS, _THREADS - 1, WAITING)
        self._large = ThreadTurns("tokenise-large", _THREADS, _THREADS - 1, WAITING, niceness.TOKENISER)

    async def run(self, tenant: str, amount: int, work: Callable[[], T]) -> T:
        """Runs `work` on a prompt of about `amount` bytes of text or token ids. Raises Unavailable when too many of the
        tenant's prompts wait, or the worker stops."""
        lane = self._small if amount <= SMALL else self._large
        try:
            return await lane.run(tenant, work)
        except asyncio.QueueFull:
            raise Unavailable(
                "too many of this tenant's prompts wait to be read; try again", code="overloaded"
            ) from None

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
