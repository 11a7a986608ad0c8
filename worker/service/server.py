"""The worker's gRPC server: one stream of frames per gateway; renders and tokenises incoming prompts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from contracts.errors import RequestError, Unavailable, to_wire
from contracts.frames import MOST_STEPS, Command, Commands, StepFrame, Unreadable, encode_steps
from contracts.request import Failed, GenerateRequest
from contracts.v1 import worker_pb2, worker_pb2_grpc
from runtime import telemetry
from worker.core.faults import told
from worker.engine import failpoints
from worker.engine.engine import Cancel, Submit
from worker.service.hosted import Hosted
from worker.text.tokenising import Tokenising, size

log = telemetry.logger("worker.service.server")


class _Stream:
    """One gateway's stream: frames from the engine's thread to the event loop. requests: ids of its open requests."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.frames: asyncio.Queue[StepFrame] = asyncio.Queue()
        self.requests: set[str] = set()
        self.commands = Commands()

    def put(self, frame: StepFrame) -> None:
        """Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(self.frames.put_nowait, frame)

    def with_waiting(self, first: StepFrame) -> list[StepFrame]:
        """`first`, already taken from `frames`, and the frames that wait after it, to send them together."""
        steps = [first]
        while len(steps) < MOST_STEPS and not self.frames.empty():
            steps.append(self.frames.get_nowait())
        return steps


class WorkerServer(worker_pb2_grpc.WorkerServicer):
    """Checks and tokenises requests and passes them to their model's engine. tokenising: the models' shared threads."""

    def __init__(self, models: Sequence[Hosted], tokenising: Tokenising) -> None:
        self.models = {model.name: model for model in models}
        self.draining = False
        self._streams: set[_Stream] = set()
        self._tokenising = tokenising
        for model in models:
            model.engine.on_trial = lambda request_id: self._tell_all(StepFrame(trial=request_id))

    def _model(self, name: str) -> Hosted:
        """The model `name`. Raises Unavailable, as another node may serve it."""
        if (model := self.models.get(name)) is None:
            raise Unavailable(f"this node does not serve {name!r}; it serves {', '.join(self.models)}")
        return model

    def _cancel(self, request_id: str) -> None:
        for model in self.models.values():
            model.engine.inbox.put(Cancel(request_id))

    async def Stream(
        self, request_iterator: AsyncIterator[worker_pb2.Frame], context: Any
    ) -> AsyncIterator[worker_pb2.Frame]:
        """See the proto. When the stream ends, the gateway's open requests are cancelled."""
        stream = _Stream()
        self._streams.add(stream)
        if self.draining:
            stream.put(StepFrame(leaving=True))
        reader = asyncio.ensure_future(self._read(request_iterator, stream))
        try:
            while not reader.done():
                waiting = asyncio.ensure_future(stream.frames.get())
                await asyncio.wait([waiting, reader], return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    break
                steps = stream.with_waiting(waiting.result())
                for step in steps:
                    stream.requests.difference_update(o.request_id for o in step.outputs if o.finish_reason)
                    stream.requests.difference_update(f.request_id for f in step.failed)
                for payload in encode_steps(steps):
                    yield worker_pb2.Frame(payload=payload)
        finally:
            self._streams.discard(stream)
            reader.cancel()
            requests, stream.requests = stream.requests, set()
            for request_id in requests:
                self._cancel(request_id)

    async def Tokenize(self, request: worker_pb2.TokenizeRequest, context: Any) -> worker_pb2.TokenizeReply:
        """See `worker.text.token_calls`."""
        try:
            return await self._model(request.model).calls.tokenize(request)
        except Unavailable as e:
            return worker_pb2.TokenizeReply(refused=json.dumps(to_wire(e)))

    async def Detokenize(self, request: worker_pb2.DetokenizeRequest, context: Any) -> worker_pb2.DetokenizeReply:
        """See `worker.text.token_calls`."""
        try:
            return await self._model(request.model).calls.detokenize(request)
        except Unavailable as e:
            return worker_pb2.DetokenizeReply(refused=json.dumps(to_wire(e)))

    async def _read(self, frames: AsyncIterator[worker_pb2.Frame], stream: _Stream) -> None:
        async for frame in frames:
            try:
                commands = stream.commands.take(frame.payload)
            except ValueError as e:
                log.error("bad frame", error=str(e))
                continue
            for command in commands:
                self._on(command, stream)

    def _on(self, command: Command, stream: _Stream) -> None:
        match command:
            case str():
                stream.requests.discard(command)
                self._cancel(command)
            case Unreadable():
                log.error("unreadable request", request=command.request_id, error=command.error.message)
                stream.put(StepFrame(failed=[Failed(command.request_id, to_wire(command.error))]))
            case GenerateRequest():
                stream.requests.add(command.request_id)
                asyncio.ensure_future(self._submit(command, stream))  # noqa: RUF006 - it answers through the stream

    def _tell_all(self, frame: StepFrame) -> None:
        """Any thread."""
        for stream in tuple(self._streams):
            stream.put(frame)

    async def _submit(self, request: GenerateRequest, stream: _Stream) -> None:
        try:
            if self.draining:
                raise Unavailable("this node is shutting down; try again")
            model = self._model(request.model)
            model.grammars.compiler.spec(request)  # cheap refusals come before tokenising
            amount = size(request)
            received_s = model.engine.executor.clock.now() if request.trace else 0.0
            prompt = await self._tokenising.run(
                request.tenant, amount, functools.partial(_tokens, model, request, stream)
            )
            if not prompt:
                return
            limit = model.limit(request, len(prompt))
            guide = await model.grammars.guide(request)
            make_ready = functools.partial(model.engine.make_ready, request, prompt, limit, guide)
            ready = await self._tokenising.run(request.tenant, amount, make_ready)
            thinking = request.messages is not None and model.codec.ends_thinking(prompt)
            submit = Submit(request, prompt, limit, stream, guide, ready, thinking, received_s)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # panics of Rust libraries are no Exception
            if not isinstance(error, RequestError):
                log.exception("request not made ready", request=request.request_id)
            stream.put(StepFrame(failed=[Failed(request.request_id, to_wire(told("its preparation", error)))]))
        else:
            if request.request_id in stream.requests:  # not cancelled meanwhile
                model.engine.inbox.put(submit)

    async def drain(self) -> None:
        """Refuses new requests, and returns when the engines have nothing left to compute or save."""
        self.draining = True
        self._tell_all(StepFrame(leaving=True))
        while not all(model.engine.idle for model in self.models.values()):  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Ends the threads and processes that tokenise prompts and compile grammars."""
        self._tokenising.stop()
        for model in self.models.values():
            await model.grammars.close()


def _tokens(model: Hosted, request: GenerateRequest, stream: _Stream) -> list[int]:
    """The prompt's token ids; empty when the request was cancelled while it waited."""
    if request.request_id not in stream.requests:
        return []
    failpoints.reach("tokenise", [request])
    return model.tokens(request)


def longest(model_tokens: int, pool_pages: int, layers: int, chunk_tokens: int) -> int:
    """Longest prompt plus output: the model's limit, or what fits into HBM with some reserve."""
    chunks = max(math.floor(pool_pages / layers * 0.95) - 2, 1)
    return min(model_tokens, chunks * chunk_tokens)
