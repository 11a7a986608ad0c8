"""A small real OpenAI endpoint for tests: streams words, counts usage, takes advisories, and remembers everything.

As a program it stands in for `upbeat`: `python fake_openai_server.py up --port N …` serves until SIGINT.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Seen:
    """One call, in the order of arrival."""

    kind: str
    session_id: str
    body: dict[str, Any]
    pinned: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class FakeOpenAI:
    """Serves on `url`. Answers `max_tokens` words, or as many as `words` says for a session; says that the longest
    prompt prefix it has seen was cached."""

    nodes: int = 2
    port: int = 0
    fail_sessions: set[str] = field(default_factory=set)
    cut_sessions: set[str] = field(default_factory=set)
    #: Sessions in which it thinks for so long, in seconds, before it says anything.
    thinks_s: dict[str, float] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = "length"
    #: What `GET /v1/models` lists.
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "stand-in", "object": "model"}])
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> FakeOpenAI:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/advisory", self._advisory)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._prompts: list[str] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def calls(self, kind: str, session_id: str | None = None) -> list[Seen]:
        return [s for s in self.seen if s.kind == kind and session_id in (None, s.session_id)]

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _advisory(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(
            Seen("hint", body["session_id"], body, request.headers.get("X-Upbeat-Node"), dict(request.headers))
        )
        return web.json_response(
            {"advisory_id": "a", "session_id": body["session_id"], "status": "accepted"}, status=202
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, session_id = await request.json(), request.headers["X-Session-Id"]
        pinned = request.headers.get("X-Upbeat-Node")
        self.seen.append(Seen("chat", session_id, body, pinned, dict(request.headers)))
        if session_id in self.fail_sessions:
            return web.json_response({"error": {"message": "no such luck"}}, status=503)
        node = pinned or f"node-{len(self.calls('chat')) % self.nodes}"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Upbeat-Node": node})
        await response.prepare(request)
        prompt = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        cached = max((_common(prompt, p) for p in self._prompts), default=0)
        await self._send(response, {"choices": [{"delta": {"role": "assistant"}}]})
        if session_id in self.thinks_s:
            await self._send(response, {"choices": [{"delta": {"reasoning_content": "Hm."}}]})
            await asyncio.sleep(self.thinks_s[session_id])
        words = [f" word{i}" for i in range(self.words.get(session_id, body["max_tokens"]))]
        for word in words:
            await self._send(response, {"choices": [{"delta": {"content": word}}]})
        if session_id in self.cut_sessions:
            return response
        self._prompts.append(prompt + "<assistant>" + "".join(words))
        await self._send(response, {"choices": [{"delta": {}, "finish_reason": self.finish_reason}]})
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _common(a: str, b: str) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


async def main(port: int) -> None:
    async with FakeOpenAI(port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    # Whoever is started in the background of a script inherits a SIGINT that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main(int(sys.argv[sys.argv.index("--port") + 1])))
