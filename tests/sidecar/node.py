"""A sidecar in this process, over a fake vLLM server and a scheduler that only listens; and a gateway's side of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from contracts.frames import StepFrame, decode_step
from contracts.v1 import worker_pb2 as pb
from contracts.v1 import worker_pb2_grpc
from runtime import telemetry
from runtime.config import Config
from runtime.config_file import cluster_secret, load_config
from runtime.kept import kept
from runtime.service import Tasks
from runtime.vllm_places import make_private, vllm_places
from sidecar.__main__ import SidecarProcess
from tests.runtime.test_reporter import Listener
from tests.sidecar.fake_vllm import KEY, MODEL

LIMIT_S = 20.0


def configured(folder: Path, port: int, **more: Any) -> Config:
    """A node of one model in vLLM; ports from `port`."""
    base: dict[str, Any] = {
        "data": str(folder / "data"),
        "run_dir": str(folder / "run"),
        "models": {MODEL: {"path": str(folder / "model"), "engine": "vllm"}},
        "nodes": {"base_port": port, "count": 1},
        "scheduler": {"port": port + 20},
        "gateway": {"port": port + 21},
    }
    for key, value in more.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    config = load_config(None, base)
    cluster_secret(config.data)
    places = vllm_places(config, 0)
    make_private(places.directory)
    kept(places.key, lambda: KEY)
    return config


class Answer:
    """What came of one request."""

    def __init__(self) -> None:
        self.heads: list[pb.HttpAnswer] = []
        self.pieces: list[bytes] = []
        self.failures: list[pb.HttpFailure] = []
        self.ended = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def status(self) -> int:
        (head,) = self.heads
        return head.status

    @property
    def failure(self) -> tuple[int, str, bool, bool]:
        """(status, message, ran, only)."""
        (failed,) = self.failures
        status, message, *_ = json.loads(failed.refused)
        return status, message, failed.ran, failed.only

    def take(self, down: pb.HttpDown) -> None:
        kind = down.WhichOneof("kind")
        assert not self.failures and not self.ended, "nothing follows"
        if kind == "head":
            assert not self.heads and not self.pieces
            self.heads.append(down.head)
        elif kind == "body":
            assert self.heads
            self.pieces.append(down.body)
        elif kind == "end":
            assert self.heads
            self.ended = True
        else:
            self.failures.append(down.failed)


class Node:
    """See the module."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.listener = Listener(config.scheduler_addresses[0])
        self.sidecar: SidecarProcess
        self._http: HttpCall | None = None

    async def start(self) -> None:
        self.tasks = Tasks()
        await self.listener.start()
        self.sidecar = SidecarProcess(self.config, 0, 0, self.tasks)
        await self.sidecar.start()
        self.channel = grpc.aio.insecure_channel(self.config.device(0, 0).worker_address)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.close()
        await self.channel.close()
        await self.sidecar.stop()
        self.sidecar._lock.release()
        await self.listener.stop()
        for collector in list(telemetry.REGISTRY._collector_to_names):
            if type(collector).__name__ == "SidecarMetrics":
                telemetry.REGISTRY.unregister(collector)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def up(self) -> None:
        """The server serves, and the scheduler has heard of it."""
        await self.until(lambda: self.sidecar.watching.up and bool(self.listener.loads))

    @property
    def http(self) -> HttpCall:
        """A gateway's call for all its requests."""
        if self._http is None:
            self._http = HttpCall(self.stub)
        return self._http

    def call(self, body: Any = None, *, pieces: list[bytes] | None = None, **head: Any) -> Asking:
        """A request; body: as JSON, or its bytes."""
        raw = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        asking = self.http.begin(**head)
        asking.send(*([raw] if pieces is None else pieces))
        return asking

    async def ask(self, body: Any = None, **more: Any) -> Answer:
        """The whole answer."""
        return await self.call(body, **more).whole()

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        """A gateway's stream of frames."""
        made = Stream(self.stub)
        try:
            yield made
        finally:
            await made.close()


class Asking:
    """One request of an `HttpCall`. grants: whether what is read makes room for more."""

    def __init__(self, call: HttpCall, number: int) -> None:
        self.call, self.number, self.grants = call, number, True
        self.downs: asyncio.Queue[pb.HttpDown | None] = asyncio.Queue()

    def send(self, *pieces: bytes, last: bool = True) -> None:
        """The next pieces of the body. last: it is complete with them."""
        for place, piece in enumerate(pieces, 1):
            body = pb.HttpBody(piece=piece, last=last and place == len(pieces))
            self.call.send(pb.HttpUp(flight=self.number, body=body))

    def grant(self, length: int) -> None:
        """There is room for so many bytes more."""
        self.call.send(pb.HttpUp(flight=self.number, taken=length))

    def cancel(self) -> None:
        """Nobody waits for it."""
        self.call.send(pb.HttpUp(flight=self.number, cancel=True))

    async def read(self, limit_s: float = LIMIT_S) -> pb.HttpDown:
        """The next item. Raises ConnectionError when the call has ended."""
        async with asyncio.timeout(limit_s):
            down = await self.downs.get()
        if down is None:
            raise ConnectionError
        if self.grants and down.body:
            self.grant(len(down.body))
        return down

    async def whole(self, limit_s: float = LIMIT_S) -> Answer:
        """All of the answer; limit_s: of each item."""
        answer = Answer()
        while not answer.ended and not answer.failures:
            answer.take(await self.read(limit_s))
        return answer


class HttpCall:
    """A gateway's call of `Worker.Http`. messages: all that came, as it came."""

    def __init__(self, stub: Any) -> None:
        self._sent: asyncio.Queue[pb.HttpUps] = asyncio.Queue()
        self._asking: dict[int, Asking] = {}
        self.messages: list[list[pb.HttpDown]] = []
        self._call = stub.Http(self._ups())
        self._reader = asyncio.ensure_future(self._read())

    def begin(self, **head: Any) -> Asking:
        """A request whose body is still to be sent."""
        said = {"request_id": "r-1", "model": MODEL, "path": "/v1/chat/completions", "tenant": "default"} | head
        number = len(self._asking) + 1
        asking = self._asking[number] = Asking(self, number)
        self.send(pb.HttpUp(flight=number, head=pb.HttpRequest(**said)))
        return asking

    def send(self, *ups: pb.HttpUp) -> None:
        """One message."""
        self._sent.put_nowait(pb.HttpUps(ups=ups))

    async def _ups(self) -> AsyncIterator[pb.HttpUps]:
        while True:
            yield await self._sent.get()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.messages.append(list(message.downs))
                for down in message.downs:
                    self._asking[down.flight].downs.put_nowait(down)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        finally:
            for asking in self._asking.values():
                asking.downs.put_nowait(None)

    async def close(self) -> None:
        """End it."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class Stream:
    """A gateway's stream of frames."""

    def __init__(self, stub: Any) -> None:
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.seen: list[StepFrame] = []
        self._call = stub.Stream(self._frames())
        self._reader = asyncio.ensure_future(self._read())

    def send(self, payload: bytes) -> None:
        self._sent.put_nowait(payload)

    async def _frames(self) -> AsyncIterator[pb.Frame]:
        while True:
            yield pb.Frame(payload=await self._sent.get())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for frame in self._call:
                self.seen.append(decode_step(frame.payload))

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
