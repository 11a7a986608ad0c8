"""The sidecar's gRPC server: the worker of its device, whose model is reached by HTTP only."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from contracts.errors import RequestError, Unavailable, to_wire
from contracts.frames import MOST_STEPS, Commands, StepFrame, Unreadable, encode_steps
from contracts.request import Failed, GenerateRequest
from contracts.v1 import worker_pb2, worker_pb2_grpc
from runtime import telemetry
from sidecar.calls import Call
from sidecar.core.flights import Flights
from sidecar.relay import Relay

log = telemetry.logger("sidecar.service")
#: Refusals that wait to be sent on one stream; a gateway that reads none gets no more of them.
_MOST_WAITING = 4096


class SidecarServer(worker_pb2_grpc.WorkerServicer):
    """See the module. relay: set before it serves."""

    def __init__(self, model: str, flights: Flights) -> None:
        self.relay: Relay
        self.draining = False
        self._model, self._flights = model, flights
        self._streams: set[asyncio.Queue[StepFrame]] = set()

    async def Http(
        self, request_iterator: AsyncIterator[worker_pb2.HttpUps], context: Any
    ) -> AsyncIterator[worker_pb2.HttpDowns]:
        """See the proto."""
        async with contextlib.aclosing(Call(self.relay).answer(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def Stream(
        self, request_iterator: AsyncIterator[worker_pb2.Frame], context: Any
    ) -> AsyncIterator[worker_pb2.Frame]:
        """A gateway keeps it open to know that the node is there, and hears on it when the node leaves. A request on it
        is refused."""
        frames: asyncio.Queue[StepFrame] = asyncio.Queue(_MOST_WAITING)
        self._streams.add(frames)
        if self.draining:
            frames.put_nowait(StepFrame(leaving=True))
        reader = asyncio.ensure_future(self._read(request_iterator, frames))
        try:
            while not reader.done():
                waiting = asyncio.ensure_future(frames.get())
                await asyncio.wait([waiting, reader], return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    break
                steps = [waiting.result()]
                while len(steps) < MOST_STEPS and not frames.empty():
                    steps.append(frames.get_nowait())
                for payload in encode_steps(steps):
                    yield worker_pb2.Frame(payload=payload)
        finally:
            self._streams.discard(frames)
            reader.cancel()

    async def _read(self, frames: AsyncIterator[worker_pb2.Frame], answers: asyncio.Queue[StepFrame]) -> None:
        commands = Commands()
        async for frame in frames:
            try:
                taken: Sequence[Any] = commands.take(frame.payload)
            except ValueError as e:
                log.error("bad frame", error=str(e))
                continue
            for command in taken:
                if isinstance(command, GenerateRequest | Unreadable):
                    refused = Failed(command.request_id, to_wire(self._by_http()))
                    await answers.put(StepFrame(failed=[refused]))

    def _by_http(self) -> RequestError:
        return Unavailable(
            f"{self._model} runs in a vLLM server, which is reached by Worker.Http, not by token frames; run the same "
            "version of Upbeat in every process"
        )

    async def Tokenize(self, request: worker_pb2.TokenizeRequest, context: Any) -> worker_pb2.TokenizeReply:
        """Refused: the server's own route is reached by Http."""
        return worker_pb2.TokenizeReply(refused=json.dumps(to_wire(self._by_http())))

    async def Detokenize(self, request: worker_pb2.DetokenizeRequest, context: Any) -> worker_pb2.DetokenizeReply:
        """Refused: the server's own route is reached by Http."""
        return worker_pb2.DetokenizeReply(refused=json.dumps(to_wire(self._by_http())))

    async def drain(self) -> None:
        """Tell gateways that this node leaves, refuse new requests, and return when those in flight have ended."""
        self.draining = True
        for frames in tuple(self._streams):
            with contextlib.suppress(asyncio.QueueFull):
                frames.put_nowait(StepFrame(leaving=True))
        while len(self._flights):  # noqa: ASYNC110 - ends with other calls
            await asyncio.sleep(0.05)
