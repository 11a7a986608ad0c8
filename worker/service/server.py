"""The worker's gRPC shell: one stream a gateway, frames in and out; templates and tokenisation on the way in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
from collections.abc import AsyncIterator
from typing import Any

from contracts.context import ContextBound
from contracts.errors import InvalidRequest, RequestError, Unavailable, to_wire
from contracts.frames import MOST_STEPS, Command, Commands, StepFrame, Unreadable, encode_steps
from contracts.request import Failed, GenerateRequest
from contracts.template_kwargs import decode_template_kwargs
from contracts.v1 import worker_pb2, worker_pb2_grpc
from runtime import telemetry
from runtime.config import WorkerSection
from worker.core.bounds import check_request
from worker.core.faults import told
from worker.engine import failpoints
from worker.engine.engine import Cancel, Engine, Submit
from worker.sampling.grammars import GrammarCompiler, Grammars
from worker.text.codec import TextCodec
from worker.text.token_calls import TokenCalls
from worker.text.tokenising import Tokenising, size

log = telemetry.logger("worker.service.server")


class _Stream:
    """One gateway's stream: frames from the engine's thread to the event loop. `requests`: those it waits for."""

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
        """`first`, which was taken from `frames`, and what has come after it: what waits together travels together."""
        steps = [first]
        while len(steps) < MOST_STEPS and not self.frames.empty():
            steps.append(self.frames.get_nowait())
        return steps


class WorkerServer(worker_pb2_grpc.WorkerServicer):
    """Checks and tokenises requests and hands them to the engine. `max_tokens`: longest prompt plus output."""

    def __init__(self, engine: Engine, codec: TextCodec, max_tokens: int, vocab_size: int, settings: WorkerSection) -> None:
        self.engine, self.codec, self.max_tokens, self.vocab_size = engine, codec, max_tokens, vocab_size
        self.bound = ContextBound(max_tokens, codec.longest_token_bytes, codec.message_token_bytes)
        self.grammars = Grammars(GrammarCompiler(codec, vocab_size, engine.eos_ids), settings)
        self.draining = False
        self._streams: set[_Stream] = set()
        engine.on_trial = lambda request_id: self._tell_all(StepFrame(trial=request_id))
        self._tokenising = Tokenising()
        self._calls = TokenCalls(codec, self.bound, vocab_size, self._tokenising)

    async def Stream(self, request_iterator: AsyncIterator[worker_pb2.Frame], context: Any) -> AsyncIterator[worker_pb2.Frame]:
        """See the proto: until the gateway goes away, which cancels what it asked for."""
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
                self.engine.inbox.put(Cancel(request_id))

    async def Tokenize(self, request: worker_pb2.TokenizeRequest, context: Any) -> worker_pb2.TokenizeReply:
        """See `worker.text.token_calls`."""
        return await self._calls.tokenize(request)

    async def Detokenize(self, request: worker_pb2.DetokenizeRequest, context: Any) -> worker_pb2.DetokenizeReply:
        """See `worker.text.token_calls`."""
        return await self._calls.detokenize(request)

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
                self.engine.inbox.put(Cancel(command))
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
            self.grammars.compiler.wish(request)  # refused at sight, or not: before anybody reads what is too large
            amount = size(request)
            prompt = await self._tokenising.run(request.tenant, amount, functools.partial(self._tokens, request, stream))
            if not prompt:
                return
            limit = self._limit(request, len(prompt))
            guide = await self.grammars.guide(request)
            make_ready = functools.partial(self.engine.make_ready, request, prompt, limit, guide)
            ready = await self._tokenising.run(request.tenant, amount, make_ready)
            thinking = request.messages is not None and self.codec.ends_thinking(prompt)
            submit = Submit(request, prompt, limit, stream, guide, ready, thinking)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a library in Rust that panics raises what is no Exception
            if not isinstance(error, RequestError):
                log.exception("request not made ready", request=request.request_id)
            stream.put(StepFrame(failed=[Failed(request.request_id, to_wire(told("its preparation", error)))]))
        else:
            if request.request_id in stream.requests:  # not cancelled while it was made ready
                self.engine.inbox.put(submit)

    def _tokens(self, request: GenerateRequest, stream: _Stream) -> list[int]:
        if request.request_id not in stream.requests:
            return []  # cancelled while it waited for its turn
        failpoints.reach("tokenise", [request])
        check_request(request)
        # What cannot fit is said before anything is made of it; a gateway may not have known this model.
        self.bound.check_prompt(request.prompt if request.prompt_tokens is None else request.prompt_tokens)
        self.bound.check_messages(request.messages)
        if request.prompt_tokens is not None:
            tokens = request.prompt_tokens
            if not isinstance(tokens, list) or any(type(t) is not int or not 0 <= t < self.vocab_size for t in tokens):
                raise InvalidRequest(f"prompt holds token ids outside of 0 to {self.vocab_size - 1}", param="prompt")
        elif request.prompt is not None:
            tokens = self.codec.encode(request.prompt)
        else:
            tokens = self._rendered(request)
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt" if request.messages is None else "messages")
        return tokens

    def _rendered(self, request: GenerateRequest) -> list[int]:
        tools = json.loads(request.tool_use.tools) if request.tool_use is not None else None
        try:
            variables = decode_template_kwargs(request.template_kwargs)
            return self.codec.render(request.messages or [], tools, self._check_rendered, variables)
        except RequestError:
            raise
        except Exception as error:  # whatever a template does
            log.exception("messages not rendered", request=request.request_id)
            raise InvalidRequest("the messages could not be rendered with this model's chat template", param="messages") from error

    def _check_rendered(self, amount: int) -> None:
        self.bound.check_bytes(amount, self.codec.longest_token_bytes, "messages")

    def _limit(self, request: GenerateRequest, prompt: int) -> int:
        """How many tokens may be generated. Raises InvalidRequest when the prompt leaves no room for the wish, or a parameter
        names a token that does not exist."""
        sampling = request.sampling
        named = {"logit_bias": sampling.logit_bias, "stop_token_ids": sampling.stop_token_ids, "resume_tokens": request.resume_tokens}
        for param, tokens in named.items():
            if any(not 0 <= token < self.vocab_size for token in tokens):
                raise InvalidRequest(f"{param} names token ids outside of 0 to {self.vocab_size - 1}", param=param)
        wish = sampling.max_tokens
        room = self.max_tokens - prompt
        if room < 1 or (wish is not None and wish > room):
            raise InvalidRequest(
                f"this model's context holds {self.max_tokens} tokens; the prompt has {prompt}"
                + (f" and max_tokens is {wish}" if wish is not None else "")
                + ". Shorten the prompt or lower max_tokens",
                param="messages" if request.messages is not None else "prompt",
                code="context_length_exceeded",
            )
        limit = room if wish is None else wish
        if len(request.resume_tokens) > limit:
            raise InvalidRequest(f"resume_tokens holds more than the {limit} tokens that may be generated", param="resume_tokens")
        return limit

    async def drain(self) -> None:
        """Refuse new requests, and return when the engine has nothing left to do or save."""
        self.draining = True
        self._tell_all(StepFrame(leaving=True))
        while not self.engine.idle:  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the tokenising threads, and what compiles grammars."""
        self._tokenising.stop()
        await self.grammars.close()


def longest(model_tokens: int, pool_pages: int, layers: int, chunk_tokens: int) -> int:
    """Longest prompt plus output: the model's own limit, or what fits into HBM with a little to spare."""
    chunks = max(math.floor(pool_pages / layers * 0.95) - 2, 1)
    return min(model_tokens, chunks * chunk_tokens)
