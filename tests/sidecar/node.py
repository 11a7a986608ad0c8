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
    """What came of one Http call."""

    def __init__(self) -> None:
        self.heads: list[pb.HttpAnswer] = []
        self.pieces: list[bytes] = []
        self.failures: list[pb.HttpFailure] = []

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
        assert not self.failures, "nothing follows a failure"
        if kind == "head":
            assert not self.heads and not self.pieces
            self.heads.append(down.head)
        elif kind == "body":
            assert self.heads
            self.pieces.append(down.body)
        else:
            self.failures.append(down.failed)


class Node:
    """See the module."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.listener = Listener(config.scheduler_addresses[0])
        self.sidecar: SidecarProcess

    async def start(self) -> None:
        self.tasks = Tasks()
        await self.listener.start()
        self.sidecar = SidecarProcess(self.config, 0, 0, self.tasks)
        await self.sidecar.start()
        self.channel = grpc.aio.insecure_channel(self.config.device(0, 0).worker_address)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
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

    def call(self, body: Any = None, *, pieces: list[bytes] | None = None, **head: Any) -> Any:
        """An Http call; body: as JSON, or its bytes."""
        raw = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        said = {"request_id": "r-1", "model": MODEL, "path": "/v1/chat/completions", "tenant": "default"} | head

        async def ups() -> AsyncIterator[pb.HttpUp]:
            yield pb.HttpUp(head=pb.HttpRequest(**said))
            for piece in [raw] if pieces is None else pieces:
                yield pb.HttpUp(body=piece)

        return self.stub.Http(ups())

    async def ask(self, body: Any = None, **more: Any) -> Answer:
        """The whole answer."""
        answer = Answer()
        async with asyncio.timeout(LIMIT_S):
            async for down in self.call(body, **more):
                answer.take(down)
        return answer

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        """A gateway's stream of frames."""
        made = Stream(self.stub)
        try:
            yield made
        finally:
            await made.close()


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
