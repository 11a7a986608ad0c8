"""A stream of placement requests to one scheduler, which batches requests and answers.

A unary call would cost both ends more than the decision. When the stream breaks, its pending requests fail; the next
request opens another stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc

from contracts.v1 import scheduler_pb2 as pb

#: Requests per message. The scheduler decides them without doing anything else in between.
_TOGETHER = 32
#: Unanswered messages at a time. Later requests share the next message, so a busy scheduler gets fewer and longer ones.
_UNANSWERED = 1
#: Seconds for which `tell` collects requests.
_TELL_S = 0.02


class Placing:
    """Asks one scheduler through `stub`."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._stream: _Stream | None = None
        self._told: list[pb.PlaceRequest] = []
        self._closed = False

    async def ask(self, request: pb.PlaceRequest, timeout_s: float) -> pb.PlaceAnswer:
        """The scheduler's answer. Raises TimeoutError when there is none in time, which also ends the stream;
        ConnectionError when the scheduler cannot be reached or another request's timeout has ended the stream."""
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._stub)
        stream = self._stream
        asked = stream.ask(request)
        late = asyncio.get_running_loop().call_later(timeout_s, _expire, asked)
        try:
            return await asked
        except TimeoutError:
            stream.give_up("another request to it timed out")
            raise
        finally:
            late.cancel()

    def tell(self, request: pb.PlaceRequest) -> None:
        """Like `ask`, without waiting for the answer. Sent in a batch after a short delay."""
        if not self._told:
            asyncio.get_running_loop().call_later(_TELL_S, self._tell)
        self._told.append(request)

    def _tell(self) -> None:
        told, self._told = self._told, []
        if self._closed:
            return
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._stub)
        for request in told:
            self._stream.ask(request).add_done_callback(lambda asked: asked.cancelled() or asked.exception())

    async def close(self) -> None:
        """End the stream; pending requests raise ConnectionError."""
        self._closed = True
        if self._stream is not None:
            await self._stream.close()


def _expire(asked: asyncio.Future[pb.PlaceAnswer]) -> None:
    if not asked.done():
        asked.set_exception(TimeoutError())


class _Stream:
    """One Place call. _asked: futures of the pending answers, in order of the requests; _unsent: requests not yet in a
    message."""

    def __init__(self, stub: Any) -> None:
        self.ended = False
        self._asked: deque[asyncio.Future[pb.PlaceAnswer]] = deque()
        self._unsent: list[pb.PlaceRequest] = []
        self._some = asyncio.Event()
        self._window = asyncio.Semaphore(_UNANSWERED)
        self._reading = asyncio.ensure_future(self._read(stub))

    def ask(self, request: pb.PlaceRequest) -> asyncio.Future[pb.PlaceAnswer]:
        answer: asyncio.Future[pb.PlaceAnswer] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._unsent.append(request)
        self._some.set()
        return answer

    def give_up(self, why: str) -> None:
        self.ended = True
        self._reading.cancel()
        self._fail(why)

    async def close(self) -> None:
        self.give_up("it is no longer asked")
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    def _fail(self, why: str) -> None:
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(ConnectionError(why))

    async def _read(self, stub: Any) -> None:
        async def questions() -> AsyncIterator[pb.PlaceRequests]:
            while await self._window.acquire() and await self._some.wait():
                together = self._unsent[:_TOGETHER]
                del self._unsent[:_TOGETHER]
                if not self._unsent:
                    self._some.clear()
                yield pb.PlaceRequests(requests=together)

        why = "it ended the stream"
        try:
            async for message in stub.Place(questions()):
                self._window.release()
                for answer in message.answers:
                    asked = self._asked.popleft()
                    if not asked.done():  # it may have timed out or been cancelled
                        asked.set_result(answer)
        except grpc.aio.AioRpcError as e:
            why = f"{e.code().name}: {e.details()}"
        finally:
            self.ended = True
            self._fail(why)
