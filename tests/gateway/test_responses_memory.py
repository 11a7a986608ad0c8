"""What a response takes of its tenant's share of memory, with what it names of stored ones."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, stack, until

from contracts.errors import RateLimited
from gateway.core.bodies import LIGHT_BYTES, Tally
from gateway.decoding import Decoding
from gateway.responses.ids import new_response_id
from gateway.responses.keeper import Keeper
from gateway.responses.store import Response

KIB = 1 << 10


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", **more}


async def reference(s: Stack, text: str) -> dict[str, str]:
    """The name of a stored item with this text."""
    status, made, _ = await s.post("/v1/responses", body(input=text))
    assert status == 200, made
    _, items = await s.get(f"/v1/responses/{made['id']}/input_items")
    return {"type": "item_reference", "id": items["data"][0]["id"]}


async def held_nothing(s: Stack) -> None:
    parts = s.gateway.parts
    assert parts is not None
    await until(lambda: parts.bodies.held == 0)


def decoded(s: Stack, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is decoded from now on: its bytes, and those that the gateway holds then."""
    asked, seen = Decoding.ask, list[tuple[int, int]]()

    async def noted(self: Decoding, kind: Any, body: bytes, tally: Tally, *more: Any) -> Any:
        seen.append((tally.length, s.gateway.parts.bodies.held))  # type: ignore[union-attr]
        return await asked(self, kind, body, tally, *more)

    monkeypatch.setattr(Decoding, "ask", noted)
    return seen


async def test_what_a_request_names_is_held_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack() as s:
        named = await reference(s, "x" * 900)
        held = decoded(s, monkeypatch)
        await s.post("/v1/responses", body(input=[named] * 400))
        [(sent, _), (whole, held_then)] = held
        assert sent < LIGHT_BYTES < 200_000 < whole <= held_then
        await held_nothing(s)


async def test_more_than_a_tenant_may_hold_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(max_body_bytes=4 << 20, body_memory_bytes=1 << 20) as s:
        named = await reference(s, "x" * 900)
        seen = decoded(s, monkeypatch)
        status, said, _ = await s.post("/v1/responses", body(input=[named] * 1500))
        assert (status, said["error"]["code"]) == (413, "body_too_large"), said
        assert len(seen) == 1, "the body, which names it"
        await held_nothing(s)


async def test_what_a_request_names_may_hold_no_more_values_than_a_body() -> None:
    async with stack(max_body_bytes=128 * KIB) as s:
        named = await reference(s, "{" * 900)
        status, said, _ = await s.post("/v1/responses", body(input=[named] * 40))
        assert (status, said["error"]["code"]) == (413, "body_too_large"), said
        await held_nothing(s)


async def test_its_input_is_held_until_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, int]] = []
    async with stack() as s:

        async def put(_: Keeper, response: Response, **__: Any) -> bool:
            kept.append((len(response.input), s.gateway.parts.bodies.held))  # type: ignore[union-attr]
            return True

        monkeypatch.setattr(Keeper, "put", put)
        spaced = json.dumps(body(input="\u00e9" * 900)) + " " * 400_000  # so long that a helper decodes it
        async with s.http.post(f"{s.url}/v1/responses", data=spaced, headers={"Content-Type": "application/json"}) as r:
            assert r.status == 200, await r.text()
        [(length, held)] = kept
        assert 900 * len("\\u00e9") < length <= held < 400_000
        await held_nothing(s)


async def test_a_background_response_that_is_refused_leaves_no_body_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> bool:
        raise RateLimited("too many")

    async with stack() as s:
        monkeypatch.setattr(Keeper, "run", refused)
        assert (await s.post("/v1/responses", body(background=True)))[0] == 429
        await held_nothing(s)


async def test_a_background_response_of_an_unknown_model_is_refused_and_not_stored() -> None:
    async with stack() as s:
        status, said, _ = await s.post("/v1/responses", body(model="none", background=True))
        assert (status, said["error"]["code"]) == (404, "model_not_found"), said
        await held_nothing(s)


async def _asked_for(s: Stack, path: str) -> socket.socket:
    """A connection that asked for this and reads little of it."""
    loop, line = asyncio.get_running_loop(), socket.socket()
    line.setblocking(False)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await loop.sock_connect(line, ("127.0.0.1", s.config.gateway.port))
    await loop.sock_sendall(line, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    return line


async def test_a_stored_answer_is_held_until_its_reader_has_it_and_no_more_of_them_than_there_is_room() -> None:
    large = 24 << 20  # more than the kernel buffers of a connection
    async with stack(body_memory_bytes=40 << 20) as s:
        parts = s.gateway.parts
        assert parts is not None
        name = new_response_id()
        stored = Response(name, "default", "s", "completed", b'{"id":"x"}', b'["%s"]' % (b"x" * large), b"[]")
        assert await parts.responses.put(stored)
        with await _asked_for(s, f"/v1/responses/{name}") as line:
            await until(lambda: parts.bodies.held > large)
            status, said = await s.get(f"/v1/responses/{name}")
            assert (status, said["error"]["code"]) == (503, "overloaded"), said
            reader, writer = await asyncio.open_connection(sock=line)
            head = await reader.readuntil(b"\r\n\r\n")
            read = json.loads(await reader.read())
            assert head.startswith(b"HTTP/1.1 200") and len(read["output"][0]) == large
            writer.close()
        await held_nothing(s)
        async with s.http.get(f"{s.url}/v1/responses/{name}") as r:
            assert r.content_length == len(await r.read()) > large, "the answer is whole"
        await parts.responses.delete("default", name)
