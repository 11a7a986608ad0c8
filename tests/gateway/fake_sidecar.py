"""A worker whose engine has HTTP of its own: a real gRPC server that notes what it hears and answers as vLLM does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from gateway_fakes import MODEL, QUICK, Stack, ToyWorker, stack, until

from contracts.errors import RequestError, Unavailable, to_wire
from contracts.http_flights import PIECE_BYTES, WINDOW_BYTES
from contracts.v1 import scheduler_pb2
from contracts.v1 import worker_pb2 as pb
from gateway.core.retry import RetryLimits

HTTP_MODEL = scheduler_pb2.ModelInfo(
    name=MODEL, engine="vllm", wire=scheduler_pb2.MODEL_WIRE_HTTP, max_tokens=4096, created_s=1_700_000_000
)
PROMPT_TOKENS, CACHED_TOKENS = 11, 4


def failure(error: RequestError, **more: bool) -> pb.HttpFailure:
    """What a sidecar says instead of an answer."""
    return pb.HttpFailure(refused=json.dumps(to_wire(error)), **more)


@dataclass
class Heard:
    """One request, whole."""

    head: pb.HttpRequest
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def headers(self) -> dict[str, str]:
        return {h.name: h.value for h in self.head.headers}


class FakeSidecar(ToyWorker):
    """`tokens`: its answer's text. `call`: name and arguments of a call that it makes besides."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.heard: list[Heard] = []
        #: Attempts that were cancelled, or whose call ended, before their answer was complete.
        self.broken: list[str] = []
        self.tokens = ["Hello", " my", " friend"]
        self.call: tuple[str, str] | None = None
        self.pace_s = 0.0
        #: What comes instead of an answer, a failure for each of the next requests.
        self.failures: list[pb.HttpFailure] = []
        #: What it says, each time, before it has read the body; and how often it has.
        self.early: pb.HttpFailure | None = None
        self.refused_early = 0
        #: After so many pieces of the body, `ends_with`: a failure, a status of the call, or nothing more at all.
        self.breaks_after: int | None = None
        self.ends_with: pb.HttpFailure | grpc.StatusCode | None = None
        #: It reads nothing and says nothing.
        self.frozen = False
        #: It answers with these instead: head and pieces.
        self.answers: tuple[pb.HttpAnswer, list[bytes]] | None = None
        #: A whole answer's pieces have at most so many bytes.
        self.piece_bytes = 64 << 10
        self.sent_bytes = 0
        #: It sends whether or not there is room.
        self.ignores_windows = False
        #: Calls of `Http`.
        self.calls = 0

    async def Http(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.HttpDowns]:
        if self.frozen:
            await asyncio.sleep(1e3)
        self.calls += 1
        call = _Call(self)
        reader = asyncio.create_task(call.read(request_iterator))
        try:
            while not isinstance(down := await call.out.get(), grpc.StatusCode):
                yield pb.HttpDowns(downs=[down])
                self.sent_bytes += len(down.body)
            await context.abort(down, "broken")
        finally:
            reader.cancel()
            for task in call.tasks.values():
                task.cancel()

    async def run(self, call: _Call, number: int, heard: Heard) -> None:
        """Answer one request."""
        self.heard.append(heard)
        complete = False
        try:
            if self.failures:
                call.say(number, failed=self.failures.pop(0))
                complete = True
                return
            said = 0
            async for down in self._answer(heard):
                if said and said - 1 == self.breaks_after:
                    if isinstance(self.ends_with, pb.HttpFailure):
                        call.say(number, failed=self.ends_with)
                        complete = True
                        return
                    if self.ends_with is not None:
                        call.out.put_nowait(self.ends_with)
                    await asyncio.sleep(1e3)
                said += 1
                await call.pass_on(number, down)
            call.say(number, end=True)
            complete = True
        finally:
            if not complete:
                self.broken.append(heard.head.request_id)

    async def _answer(self, heard: Heard) -> AsyncIterator[pb.HttpDown]:
        if self.answers is not None:
            head, pieces = self.answers
            yield pb.HttpDown(head=head)
            for whole in pieces:
                for at in range(0, len(whole), self.piece_bytes):
                    await asyncio.sleep(self.pace_s)
                    yield pb.HttpDown(body=whole[at : at + self.piece_bytes])
            return
        streams = bool(heard.body.get("stream"))
        kind = "text/event-stream; charset=utf-8" if streams else "application/json"
        if streams:
            yield pb.HttpDown(head=head_of(kind))
        written = [self._whole(heard)] if not streams else self._events(heard)
        if not streams:
            await asyncio.sleep(self.pace_s * len(self.tokens))
            yield pb.HttpDown(head=head_of(kind))
            written = [written[0][i : i + self.piece_bytes] for i in range(0, len(written[0]), self.piece_bytes)]
        for piece in written:
            if streams:
                await asyncio.sleep(self.pace_s)
            yield pb.HttpDown(body=piece)

    # ---- as vLLM spells it -------------------------------------------------------------------------------------
    def _usage(self) -> dict[str, Any]:
        n = len(self.tokens)
        return {
            "prompt_tokens": PROMPT_TOKENS, "completion_tokens": n, "total_tokens": PROMPT_TOKENS + n,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }  # fmt: skip

    def _whole(self, heard: Heard) -> bytes:
        text, path = "".join(self.tokens), heard.head.path
        called = [] if self.call is None else [self.call]
        if path == "/v1/chat/completions":
            calls = [{"id": "c1", "type": "function", "function": {"name": n, "arguments": a}} for n, a in called]
            message = {"role": "assistant", "content": text, "reasoning": "hm", "tool_calls": calls}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            made: Any = {"id": heard.head.request_id, "choices": choices, "usage": self._usage()}
        elif path == "/v1/completions":
            made = {"choices": [{"index": 0, "text": text}], "usage": self._usage()}
        elif path == "/v1/embeddings":
            usage = {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS, "completion_tokens": 0}
            made = {"data": [{"index": 0, "embedding": [0.5, -1.0]}], "usage": usage}
        else:
            made = {"tokens": [1, 2, 3], "count": 3, "max_model_len": 4096}
        return json.dumps(made).encode()

    def _events(self, heard: Heard) -> list[bytes]:
        path = heard.head.path
        chat, made = path == "/v1/chat/completions", list[Any]()
        if chat:
            made.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            made.append({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]})
        made += [
            {"choices": [{"index": 0, **({"delta": {"content": t}} if chat else {"text": t})}]} for t in self.tokens
        ]
        if chat and self.call:
            name, arguments = self.call
            for function in (
                {"name": name, "arguments": ""},
                {"arguments": arguments[:3]},
                {"arguments": arguments[3:]},
            ):
                delta = {"tool_calls": [{"index": 0, "id": "c1", "function": function}]}
                made.append({"choices": [{"index": 0, "delta": delta}]})
        if (heard.body.get("stream_options") or {}).get("include_usage"):
            made.append({"choices": [], "usage": self._usage()})
        return [*(_event(one) for one in made), b"data: [DONE]\n\n"]


def head_of(content_type: str, status: int = 200, **headers: str) -> pb.HttpAnswer:
    """An engine's head. In headers, `_` stands for `-`."""
    named = {"content-type": content_type} | {name.replace("_", "-"): value for name, value in headers.items()}
    return pb.HttpAnswer(status=status, headers=[pb.HttpHeader(name=n, value=v) for n, v in named.items()])


def _event(value: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(value).encode() + b"\n\n"


class _Call:
    """A gateway's call of `Http`: its requests by number, and what is to be sent."""

    def __init__(self, sidecar: FakeSidecar) -> None:
        self._sidecar = sidecar
        self.out: asyncio.Queue[pb.HttpDown | grpc.StatusCode] = asyncio.Queue()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._arriving: dict[int, tuple[pb.HttpRequest, bytearray]] = {}
        self._open: dict[int, int] = {}
        self._granted = asyncio.Condition()

    async def read(self, messages: AsyncIterator[pb.HttpUps]) -> None:
        async for message in messages:
            for up in message.ups:
                await self._take(up)

    async def _take(self, up: pb.HttpUp) -> None:
        kind, number = up.WhichOneof("kind"), up.flight
        if kind == "head":
            if self._sidecar.early is not None:
                self._sidecar.refused_early += 1
                self.say(number, failed=self._sidecar.early)
                return
            self._arriving[number], self._open[number] = (up.head, bytearray()), WINDOW_BYTES
        elif kind == "body" and number in self._arriving:
            assert len(up.body.piece) <= PIECE_BYTES
            head, body = self._arriving[number]
            body += up.body.piece
            if up.body.last:
                del self._arriving[number]
                self.tasks[number] = asyncio.create_task(self._sidecar.run(self, number, Heard(head, bytes(body))))
        elif kind == "taken":
            async with self._granted:
                self._open[number] += up.taken
                self._granted.notify_all()
        elif kind == "cancel":
            self._arriving.pop(number, None)
            if number in self.tasks:
                self.tasks[number].cancel()

    def say(self, number: int, **kind: Any) -> None:
        """Send an item."""
        self.out.put_nowait(pb.HttpDown(flight=number, **kind))

    async def pass_on(self, number: int, down: pb.HttpDown) -> None:
        """Send an item of an answer once there is room for it."""
        if not self._sidecar.ignores_windows:
            async with self._granted:
                await self._granted.wait_for(lambda: self._open[number] >= len(down.body))
                self._open[number] -= len(down.body)
        down.flight = number
        self.out.put_nowait(down)


@dataclass
class HttpStack(Stack):
    """A gateway with its fake sidecars."""

    @property
    def sidecars(self) -> list[FakeSidecar]:
        return [w for w in self.workers if isinstance(w, FakeSidecar)]

    @property
    def heard(self) -> list[Heard]:
        """What all of them heard."""
        return [heard for sidecar in self.sidecars for heard in sidecar.heard]

    async def raw(self, path: str, body: Any, **headers: str) -> tuple[int, bytes, Any]:
        """Status, bytes and headers; `body` as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | {n.replace("_", "-"): v for n, v in headers.items()}
        async with self.http.post(self.url + path, data=data, headers=headers) as r:
            return r.status, await r.read(), r.headers

    async def whole(self) -> None:
        """Nothing is left over of any request."""
        parts = self.gateway.parts
        assert parts is not None
        async with asyncio.timeout(5):
            await parts.idle.wait()
        await until(lambda: not any(parts.workers.in_flight.values()))
        assert parts.generator.running == 0 and parts.bodies.held == 0
        parts.usage.validate()
        parts.generator.quarantine.validate()
        parts.sessions.implicit.validate()


def as_at_first(shared: HttpStack) -> HttpStack:
    """The stack of a module for its next test: fresh, but for what its gateway remembers."""
    for sidecar in shared.sidecars:
        fresh = type(sidecar)("node-9").__dict__
        sidecar.__dict__.update({k: fresh[k] for k in ("heard", "broken", "tokens", "call", "answers", "pace_s")})
    shared.scheduler.placed.clear()
    shared.scheduler.advised.clear()
    return shared


@contextlib.asynccontextmanager
async def http_stack(nodes: int = 2, *, retry_limits: RetryLimits = QUICK, **more: Any) -> AsyncIterator[HttpStack]:
    """Like `stack`, with fake sidecars for workers."""
    async with stack(
        nodes, retry_limits=retry_limits, worker=FakeSidecar, model=more.pop("model", HTTP_MODEL), **more
    ) as s:
        running = HttpStack(s.gateway, s.scheduler, s.workers, s.config, s.http, s.tasks, s.schedulers)
        yield running
        await running.whole()


NOT_NOW = Unavailable("draining")
