"""A hostile tenant: every attack that once hurt somebody, many a second, for as long as one asks. A program of its own,
so that what it computes is not taken for the server's delay.

    python -m tests.attack.hostile URL KEY SECONDS RATE SEED

prints JSON: how often each attack was made, and how often each status came back to it; 0: no answer, or an attack that
wants none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.attack.world import NAME

#: At a time, so that the attacker's own machine is not what gives way; and how long a connection is held by who holds
#: one, in seconds.
MOST, HOLD_S = 2000, 20.0
#: Of connections that only hold something, at a time.
MOST_HELD = 40


class Hostile:
    """Makes attacks; `done` counts them by name and status."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        self.url, self.key, self.random = url, key, random.Random(seed)
        self.host, self.port = str(urlsplit(url).hostname), int(urlsplit(url).port or 80)
        self.done: Counter[tuple[str, int]] = Counter()
        self.held = 0

    async def post(
        self, http: aiohttp.ClientSession, body: Any, path: str = "/v1/chat/completions", **headers: str
    ) -> int:
        """The status; 0 when there is no answer. Reads the answer to its end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        said = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"} | headers
        try:
            async with http.post(self.url + path, data=data, headers=said) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0

    async def hold(self, sent: bytes) -> int:
        """Send this, then neither read nor say anything more."""
        if self.held >= MOST_HELD:
            return 0
        self.held += 1
        try:
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                s.setblocking(False)
                loop = asyncio.get_running_loop()
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(HOLD_S):
                        await loop.sock_connect(s, (self.host, self.port))
                        await loop.sock_sendall(s, sent)
                        await asyncio.sleep(HOLD_S)
        finally:
            self.held -= 1
        return 0

    def raw(self, body: bytes, length: int | None = None) -> bytes:
        """A chat as bytes on the wire; length: what is said of it."""
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            f"Host: {self.host}",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {len(body) if length is None else length}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def upload(self, content: bytes, length: int) -> bytes:
        """The beginning of an upload as bytes on the wire; length: what is said of it."""
        lines = [
            "POST /v1/files HTTP/1.1",
            f"Host: {self.host}",
            f"Authorization: Bearer {self.key}",
            "Content-Type: multipart/form-data; boundary=XX",
            f"Content-Length: {length}",
            "",
            "--XX",
            'Content-Disposition: form-data; name="file"; filename="f"',
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content

    def words(self, count: int) -> str:
        """Text that no cache knows."""
        return " ".join(
            self.random.choice(("rivers", "bread", "maps", "owls")) + str(self.random.randrange(1000))
            for _ in range(count)
        )


def chat(text: str = "Hello.", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 4} | more


Attack = Callable[[Hostile, aiohttp.ClientSession], Awaitable[int]]


def patterns(h: Hostile, count: int) -> dict[str, Any]:
    """A small schema whose compilation doubles with each pattern; another one each time, so that no cache helps."""
    made = [{"type": "string", "pattern": f"^[a-z]*{h.random.randrange(10**6)}[a-z]{{{i}}}x"} for i in range(count)]
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"allOf": made}}}


def tools(h: Hostile, count: int) -> list[dict[str, Any]]:
    fields = {f"f{i}": {"type": "string", "enum": [str(h.random.random()) for _ in range(20)]} for i in range(10)}
    return [
        {"type": "function", "function": {"name": f"t{i}", "parameters": {"type": "object", "properties": fields}}}
        for i in range(count)
    ]


#: By name: of a hundred attacks how many, and the attack.
ATTACKS: dict[str, tuple[float, Attack]] = {
    "logits beyond float32": (10, lambda h, http: h.post(http,
    chat(repetition_penalty=h.random.choice([1e-300, 1e-38, 5e-324]),
    temperature=0))),
    "least penalties": (6, lambda h, http: h.post(http, chat(h.words(40), repetition_penalty=0.01, presence_penalty=-2,
    frequency_penalty=-2, max_tokens=16))),
    "patterns that double": (3, lambda h, http: h.post(http, chat(response_format=patterns(h, 24)))),
    "many tools": (1, lambda h, http: h.post(http, chat(tools=tools(h, 60), tool_choice="required"))),
    "two megabytes": (4, lambda h, http: h.post(http, chat("x" * (2 << 20)))),
    "fifteen megabytes": (0.4, lambda h, http: h.post(http, chat("word " * (3 << 20)))),
    "a million values": (1, lambda h, http: h.post(http, b'{"model":"a","messages":[' + b"[]," * 700_000 + b"[]]}")),
    "many messages": (1, lambda h, http: h.post(http, chat(messages=[{"role": "user", "content": "a"}] * 16_000))),
    "long stop strings": (5, lambda h, http: h.post(http, chat(h.words(20),
    stop=[f"{i:x}" + "a" * 1020 for i in range(16)],
    max_tokens=48, ignore_eos=True))),
    "biases and logprobs": (4, lambda h, http: h.post(http, chat(
        logit_bias={str(i): -1 for i in range(2048)}, logprobs=True, top_logprobs=20, n=8, max_tokens=16,
        ignore_eos=True))),
    "urgent and long": (6, lambda h, http: h.post(http, chat(h.words(800), priority=-1000, max_tokens=32,
    ignore_eos=True))),
    "at the context's end": (0.6, lambda h, http: h.post(http, chat(h.words(2500), max_tokens=64, ignore_eos=True))),
    "many prompts": (1, lambda h, http: h.post(http, {"model": NAME, "prompt": [h.words(60) for _ in range(32)],
    "max_tokens": 4},
    "/v1/completions")),
    "reads nothing": (2, lambda h, http: h.hold(h.raw(json.dumps(chat("Hello.", stream=True, max_tokens=4000,
    ignore_eos=True,
    logprobs=True, top_logprobs=20)).encode()))),
    "one byte is missing": (3, lambda h, http: h.hold(h.raw(b" " * 4_000_000, 4_000_001))),
    "says nothing": (3, lambda h, http: h.hold(b"")),
    "half a header": (3, lambda h, http: h.hold(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-")),
    "no HTTP": (6, lambda h, http: h.hold(h.random.randbytes(200))),
    "leaves early": (8, lambda h, http: leave(h, http)),
    "hints": (10, lambda h, http: h.post(http, {"advisories": [{"session_id": f"h{h.random.randrange(10**6)}",
    "priority": -1000} for _ in range(64)]}, "/v1/advisory")),
    "plain text": (6, lambda h, http: h.post(http, chat(), **{"Content-Type": "text/plain"})),
    "a foreign host": (6, lambda h, http: h.post(http, chat(), Host="evil.example")),
    "an upload that rests": (2, lambda h, http: h.hold(h.upload(b"x" * 100_000, 200_000_000))),
    "a form of nothing": (1, lambda h, http: h.post(http, b"nothing of a form\r\n" * 60_000, "/v1/files",
    **{"Content-Type": "multipart/form-data; boundary=XX"})),
    "no JSON": (10, lambda h, http: h.post(http, b'{"model": ' + b"[" * h.random.randrange(3000))),
}  # fmt: skip


async def leave(h: Hostile, http: aiohttp.ClientSession) -> int:
    """Ask for a long stream and hang up at its beginning."""
    said = {"Authorization": f"Bearer {h.key}"}
    try:
        async with http.post(
            h.url + "/v1/chat/completions", json=chat(h.words(50), stream=True, max_tokens=500), headers=said
        ) as answer:
            await answer.content.read(200)
            return answer.status
    except (aiohttp.ClientError, TimeoutError, OSError):
        return 0


async def attack(h: Hostile, seconds: float, rate: float) -> None:
    """So many attacks a second, whatever comes back."""
    names, weights = list(ATTACKS), [weight for weight, _ in ATTACKS.values()]
    running: set[asyncio.Task[None]] = set()

    async def one(name: str, http: aiohttp.ClientSession) -> None:
        status = 0
        try:
            status = await ATTACKS[name][1](h, http)
        finally:
            h.done[name, status] += 1  # also what still waits at the end

    began, made = time.monotonic(), 0
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        while (now := time.monotonic()) < began + seconds:
            while made < (now - began) * rate:
                made += 1
                if len(running) < MOST:
                    task = asyncio.create_task(one(h.random.choices(names, weights)[0], http))
                    running.add(task)
                    task.add_done_callback(running.discard)
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def step_aside() -> None:
    """On one machine with what it attacks, it takes only what is left of the processors: by itself and, where they are
    shared by session (autogroups, `man 7 sched`), as a session."""
    os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def main() -> None:
    """Entry point."""
    url, key, seconds, rate, seed = sys.argv[1:6]
    step_aside()
    hostile = Hostile(url, key, int(seed))
    asyncio.run(attack(hostile, float(seconds), float(rate)))
    told: dict[str, dict[str, int]] = {}
    for (name, status), count in sorted(hostile.done.items()):
        told.setdefault(name, {})[str(status)] = count
    print(json.dumps(told))


if __name__ == "__main__":
    main()
