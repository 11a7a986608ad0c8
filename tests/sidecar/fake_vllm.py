"""A vLLM server's HTTP without an engine: what the sidecar asks of it, and answers that a test decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

KEY = "sesame"
MODEL = "m"
MAX_TOKENS = 4096
#: The fields of ours that each route of vLLM 0.32 reads; of several forms of a body, each form's.
FIELDS: dict[str, list[list[str]]] = {
    "/v1/chat/completions": [["kv_transfer_params", "cache_salt", "priority", "request_id"]],
    "/v1/completions": [["kv_transfer_params", "cache_salt", "priority", "request_id"]],
    "/v1/responses": [["kv_transfer_params", "cache_salt", "priority", "request_id"]],
    "/v1/messages": [["kv_transfer_params", "cache_salt"]],
    "/v1/messages/count_tokens": [[]],
    "/tokenize": [[], []],
    "/detokenize": [[]],
    "/v1/load_lora_adapter": [[]],
}
BLOCKS, BLOCK_TOKENS = 100, 64


def described(fields: dict[str, list[list[str]]]) -> dict[str, Any]:
    """An /openapi.json, as FastAPI writes it."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {"/health": {"get": {}}}
    for number, (path, forms) in enumerate(fields.items()):
        names = [f"Form{number}x{i}" for i in range(len(forms))]
        for name, properties in zip(names, forms, strict=True):
            schemas[name] = {"type": "object", "properties": {p: {"type": "string"} for p in ("model", *properties)}}
        references = [{"$ref": f"#/components/schemas/{name}"} for name in names]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        paths[path] = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}


@dataclass
class Seen:
    """A request that came."""

    path: str
    headers: dict[str, str]
    raw: bytes
    cancelled: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """As vLLM reads it: of equal names, the last one."""
        found: dict[str, Any] = json.loads(self.raw)
        return found


Answer = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


@dataclass
class FakeVllm:
    """See the module. place: its socket, or a port of 127.0.0.1. answer: to every request but those for one token."""

    place: Path | int
    fields: dict[str, list[list[str]]] = field(default_factory=lambda: dict(FIELDS))
    key: str = KEY
    connector: bool = True
    takes_priority: bool = True
    has_figures: bool = True
    model: str = MODEL
    max_tokens: int = MAX_TOKENS
    root: str = "/nowhere"
    seen: list[Seen] = field(default_factory=list)
    #: Requests for one token.
    tokens: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    engine_is_dead: bool = False
    _runner: web.AppRunner | None = None
    _frozen: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._frozen.set()
        self.answer: Answer = json_answer

    async def start(self) -> FakeVllm:
        """Serve."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{rest:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        if isinstance(self.place, Path):
            await web.UnixSite(self._runner, str(self.place)).start()
        else:
            await web.TCPSite(self._runner, "127.0.0.1", self.place).start()
        return self

    async def die(self) -> None:
        """Close every connection and stop listening."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for handler in list(runner.server.connections if runner.server is not None else ()):
                if handler.transport is not None:
                    handler.transport.abort()
            await runner.cleanup()
        if isinstance(self.place, Path):
            self.place.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Answer nothing more until `thaw`."""
        self._frozen.clear()

    def thaw(self) -> None:
        self._frozen.set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        await self._frozen.wait()
        if request.path == "/health":
            return web.Response(status=503 if self.engine_is_dead else 200)
        if request.path == "/metrics":
            return web.Response(text=self._figures())
        if request.path == "/openapi.json":
            return web.json_response(described(self.fields))
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/v1/models":
            said = {"id": self.model, "max_model_len": self.max_tokens, "root": self.root}
            return web.json_response({"object": "list", "data": [said]})
        return await self._answered(request, await request.read())

    async def _answered(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        with contextlib.suppress(ValueError):
            body = json.loads(raw)
            if body.get("prompt") == [0] and body.get("max_tokens") == 1:
                if "priority" in body and not self.takes_priority:
                    return web.json_response({"error": {"message": "no priority scheduling"}}, status=400)
                self.tokens += 1
                self.figures["request_prefill_time_seconds_count"] = self._ended + 1
                if self.connector:
                    self.figures["external_prefix_cache_queries_total"] = 1.0
                return web.json_response({"choices": [{"text": "x"}]})
        seen = Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, raw)
        self.seen.append(seen)
        try:
            return await self.answer(request, seen)
        except asyncio.CancelledError:
            seen.cancelled = True
            raise

    @property
    def _ended(self) -> float:
        return self.figures.get("request_prefill_time_seconds_count", 0.0)

    def _figures(self) -> str:
        if not self.has_figures:
            return "python_gc_objects_collected_total 1.0\n"
        told = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0} | self.figures
        lines = [f'vllm:{name}{{engine="0",model_name="{self.model}"}} {value}' for name, value in told.items()]
        lines.append(f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{BLOCKS}"}} 1.0')
        return "\n".join(lines) + "\n"


async def json_answer(request: web.Request, seen: Seen) -> web.StreamResponse:
    """What a request without a stream is answered."""
    return web.json_response({"choices": [{"message": {"content": "hello"}}]}, headers={"X-Their-Own": "1"})


def streamed(*events: str, wait: Callable[[int], Awaitable[None]] | None = None) -> Answer:
    """Server-sent events; wait: before each one, by its number."""

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if wait is not None:
                await wait(number)
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response

    return answer


def aborted(*events: str) -> Answer:
    """As many events, and then the connection is gone."""

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if events:
            await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(10)
        return response

    return answer


@contextlib.asynccontextmanager
async def serving(place: Path | int, **settings: Any) -> AsyncIterator[FakeVllm]:
    """A server until the block ends."""
    server = await FakeVllm(place, **settings).start()
    try:
        yield server
    finally:
        server.thaw()
        await server.die()
