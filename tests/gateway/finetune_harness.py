"""A gateway over a real scheduler and workers that train in no time, and the official client."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai

from gateway.app import Gateway
from runtime.service import Tasks
from tests.finetune_stack import FinetuneStack, until

KEYS = {tenant: f"key-of-tenant-{tenant}-long-enough" for tenant in ("a", "b")}
CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]}
DATA = "\n".join(json.dumps(CHAT) for _ in range(3)).encode()


@dataclass
class Tuning:
    """The running parts. a, b: clients of two tenants."""

    stack: FinetuneStack
    url: str
    a: openai.AsyncOpenAI
    b: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    gateway: Gateway

    @property
    def data(self) -> Path:
        return self.stack.config.data

    async def file(self, content: bytes = DATA, client: openai.AsyncOpenAI | None = None, name: str = "d.jsonl") -> str:
        made = await (client or self.a).files.create(file=(name, content), purpose="fine-tune")
        return made.id

    async def job(self, **more: Any) -> Any:
        """A job of tenant a."""
        asked = {"model": "m", "training_file": await self.file()} | more
        return await self.a.fine_tuning.jobs.create(**asked)

    async def is_(self, job_id: str, status: str) -> Any:
        """Wait for a job's status; the job."""

        async def holds() -> bool:
            return (await self.a.fine_tuning.jobs.retrieve(job_id)).status == status

        await until(holds)
        return await self.a.fine_tuning.jobs.retrieve(job_id)

    def kept(self) -> list[str]:
        """What lies in the directories of files and jobs."""
        found = [*(self.data / "files").rglob("*"), *(self.data / "adapters").rglob("*")]
        return sorted(str(path.relative_to(self.data)) for path in found if path.is_file())


@contextlib.asynccontextmanager
async def tuning(
    folder: Path, free_ports: Callable[[int], int], *, tenants: int = 2, nodes: int = 1, **finetune: Any
) -> AsyncIterator[Tuning]:
    port = free_ports(60)
    keys = [{"key": KEYS[tenant], "tenant": tenant} for tenant in list(KEYS)[:tenants]]
    gateway_section = {"port": port + 50, "api_keys": keys}
    stack = FinetuneStack(folder / "data", port, nodes, gateway=gateway_section, finetune=finetune)
    await stack.start()
    tasks = Tasks()
    gateway = Gateway(stack.config, tasks)
    await gateway.start()
    url = f"http://127.0.0.1:{port + 50}"

    def client(tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[tenant], max_retries=0, timeout=60.0)

    async with aiohttp.ClientSession() as http, client("a") as a, client("b") as b:
        made = Tuning(stack, url, a, b, http, gateway)

        async def serves() -> bool:
            assert gateway.parts is not None
            return gateway.parts.fleet.knows_model("m") and gateway.parts.fleet.live

        await until(serves)
        try:
            yield made
            assert not tasks.failed.done(), tasks.failed.exception()
        finally:
            await gateway.stop()
            await stack.stop()
