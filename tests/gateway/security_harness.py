"""A gateway as a process of its own, two tenants' credentials, a toy fleet behind it, and a client that says whatever
bytes it is given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from gateway_fakes import ToyScheduler, ToyWorker, until

from contracts.api_keys import hashed
from contracts.v1 import scheduler_pb2 as pb
from gateway.core.browser_tokens import BrowserTokens, Grant
from runtime.config import Config
from runtime.config_file import dump_config, load_config
from tests.ports import free_ports

KEY_A, KEY_B = "key-of-tenant-a-with-enough-characters", "key-of-tenant-b-with-enough-characters"
SECRET = "what-signs-the-browser-tokens-of-tests"
SESSION = "chat-1"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hello"}]}


class TwoTenants(ToyScheduler):
    """A scheduler that knows one session, of tenant a, and notes for whom it is asked anything."""

    def __init__(self, workers: list[ToyWorker]) -> None:
        super().__init__(workers)
        self.asked_for: list[tuple[str, str]] = []

    def _session(self, call: str, session: Any) -> bool:
        self.asked_for.append((call, session.tenant))
        return bool(session.tenant == "a" and session.session_id == SESSION)

    async def ListSessions(self, request: Any, context: Any) -> Any:
        self.asked_for.append(("ListSessions", request.tenant))
        return await super().ListSessions(request, context) if request.tenant == "a" else pb.ListSessionsReply()

    async def GetSession(self, request: Any, context: Any) -> Any:
        return (
            await super().GetSession(request, context)
            if self._session("GetSession", request.session)
            else pb.SessionInfo()
        )

    async def Explain(self, request: Any, context: Any) -> Any:
        return (
            await super().Explain(request, context) if self._session("Explain", request.session) else pb.Explanation()
        )

    async def EraseSession(self, request: Any, context: Any) -> Any:
        self.erased.append(request.session)
        return pb.EraseSessionReply(known=self._session("EraseSession", request.session), nodes=["node-0"], taken=True)


@dataclass
class Answer:
    """What came back, as bytes and decoded; status 0: the connection was closed without an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        """The envelope's inside."""
        return json.loads(self.body)["error"]


@dataclass
class Harness:
    """The running gateway process and what stands behind it."""

    config: Config
    process: asyncio.subprocess.Process
    scheduler: TwoTenants
    worker: ToyWorker
    tokens: BrowserTokens

    @property
    def port(self) -> int:
        return self.config.gateway.port

    @property
    def rss_bytes(self) -> int:
        """Memory of the gateway's process."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def family(self) -> list[psutil.Process]:
        """The gateway's process and its helpers."""
        gateway = psutil.Process(self.process.pid)
        return [gateway, *gateway.children(recursive=True)]

    def token(self, tenant: str = "a", session: str = SESSION, life_s: int = 600) -> str:
        """A browser token; a negative life: it has expired."""
        return self.tokens.sign(Grant(tenant, session, False, 0, "", int(time.time()) + life_s))

    async def raw(self, data: bytes, limit_s: float = 20.0) -> Answer:
        """Say these bytes and read one answer; the connection is closed then."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    await writer.drain()
                return await read_answer(reader)
        finally:
            writer.close()

    async def ask(
        self, method: str, path: str, body: Any = None, key: str | None = KEY_A, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request; `path` goes out as it is, `body` as JSON unless it is bytes."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        said = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"}
        said |= {"Content-Length": str(len(content)), "Content-Type": "application/json"}
        said |= {"Authorization": f"Bearer {key}"} if key is not None else {}
        head = (
            f"{method} {path} HTTP/1.1\r\n"
            + "".join(f"{k}: {v}\r\n" for k, v in (said | (headers or {})).items())
            + "\r\n"
        )
        return await self.raw(head.encode("utf-8", "surrogateescape") + content)

    async def is_whole(self) -> None:
        """It still lives and serves somebody with a key."""
        assert self.process.returncode is None, "the gateway has ended"
        answer = await self.ask("POST", "/v1/chat/completions", CHAT)
        assert answer.status == 200, answer


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One answer from a connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(0, {}, b"")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
    body = b""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.read()
    return Answer(int(status.split(" ")[1]), headers, body)


def rss_of(processes: list[psutil.Process]) -> int:
    """Memory of these together, in bytes."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += int(process.memory_info().rss)
    return total


@contextlib.asynccontextmanager
async def harness(folder: Path, model: pb.ModelInfo | None = None, **gateway: Any) -> AsyncIterator[Harness]:
    """A gateway process in front of one toy worker, which says that it serves `model`; `gateway`: settings of its
    section."""
    worker = ToyWorker("node-0")
    scheduler = TwoTenants([worker])
    scheduler.model = model or scheduler.model
    await worker.start()
    await scheduler.start()
    keys = [{"key": hashed(KEY_A), "tenant": "a"}, {"key": hashed(KEY_B), "tenant": "b"}]
    section = {"port": free_ports(1), "api_keys": keys, "token_secret": SECRET, **gateway}
    nodes = {"count": 1, "base_port": 50_000}
    settings = {
        "gateway": section,
        "scheduler": {"addresses": [f"127.0.0.1:{scheduler.port}"]},
        "nodes": nodes,
        "model_name": "toy",
    }
    config = load_config(None, settings)
    file = folder / "config.yaml"
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "gateway", "--config", str(file)]
    with (folder / "gateway.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log, cwd=Path(__file__).parents[2])
    made = Harness(config, process, scheduler, worker, BrowserTokens([SECRET]))

    async def ready() -> bool:
        try:
            return (await made.ask("GET", "/ready", key=None)).status == 200
        except OSError:
            return False

    try:
        await until(ready, 40)
        yield made
        assert process.returncode is None, "the gateway has ended"
        said = (folder / "gateway.log").read_text()
        assert "Traceback" not in said and "unexpected error" not in said and "task failed" not in said, said[-4000:]
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
        for server in (scheduler, worker):
            await server.kill()
