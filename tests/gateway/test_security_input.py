"""Bytes that nobody should send: names that are paths, broken HTTP, floods, bombs, and bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
from security_harness import CHAT, KEY_A, SESSION, Answer, Harness, harness, read_answer

MIB = 1 << 20
GIB = 1 << 30
HEAD = f"Host: x\r\nAuthorization: Bearer {KEY_A}\r\nConnection: close\r\nContent-Type: application/json\r\n"
BODIES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/advisory",
    "/v1/invalidate",
    "/v1/client_secrets",
    "/v1/workflows/w",
)


@pytest.fixture(scope="module")
async def h(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    async with harness(tmp_path_factory.mktemp("gateway")) as running:
        yield running
        await running.is_whole()


def method_of(path: str) -> str:
    return "PUT" if path.startswith("/v1/workflows") else "POST"


def refused(answer: Answer, *statuses: int) -> None:
    """A 4xx of ours, in the envelope."""
    assert answer.status in (statuses or (400, 404)), answer
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.error["message"] and len(answer.error["message"]) < 2000


# ---- names ---------------------------------------------------------------------------------------------------------
NASTY = {
    "parent": "../../etc/passwd",
    "dots": "..",
    "dot": ".",
    "inside": "a/../b",
    "absolute": "/etc/passwd",
    "backslash": "..\\..\\x",
    "encoded": "%2e%2e%2fx",
    "twice encoded": "%252e%252e%252f",
    "nul": "a\0b",
    "only nul": "\0",
    "newline": "a\nb",
    "crlf": "a\r\nX-Evil: 1",
    "space": "a b",
    "blank": " ",
    "umlaut": "sitzung-ü",
    "emoji": "💥",
    "right to left": "a\u202eb",
    "look-alike": "сhat-1",  # its first letter is Cyrillic
    "combining": "e\u0301",
    "full width": "ｃhat-1",
    "half a pair": "\ud800",
    "glob": "*",
    "shell": "$(id)",
    "sql": "' OR 1=1 --",
    "html": "<script>alert(1)</script>",
    "format": "{0.__class__}%s%n",
    "long": "a" * 129,
    "very long": "a" * 12_000,
}


def escaped(name: str) -> str:
    """For a path, however odd."""
    return quote(name.encode("utf-8", "surrogatepass"), safe="")


@pytest.mark.parametrize("how", NASTY)
async def test_a_nasty_name_in_a_path_reaches_nobody(h: Harness, how: str) -> None:
    h.scheduler.asked_for.clear()
    bad = escaped(NASTY[how])
    for method, path in (
        ("GET", f"/v1/sessions/{bad}"),
        ("DELETE", f"/v1/sessions/{bad}"),
        ("GET", f"/v1/sessions/{bad}/placement"),
        ("GET", f"/v1/sessions/{bad}/events"),
        ("GET", f"/v1/workflows/{bad}"),
        ("DELETE", f"/v1/workflows/{bad}"),
        ("GET", f"/v1/models/{bad}"),
    ):
        refused(await h.ask(method, path), 400, 404, 405)
    refused(await h.ask("PUT", f"/v1/workflows/{bad}", {"agents": ["a"]}), 400, 404, 405)
    assert not h.scheduler.asked_for and not h.scheduler.erased and not h.scheduler.workflows


@pytest.mark.parametrize("how", NASTY)
async def test_a_nasty_name_in_a_body_is_refused_naming_the_field(h: Harness, how: str) -> None:
    bad = NASTY[how]
    h.worker.submitted.clear()
    for path, body, param in (
        ("/v1/chat/completions", CHAT | {"session_id": bad}, "session_id"),
        ("/v1/chat/completions", CHAT | {"model": bad}, "model"),
        (
            "/v1/chat/completions",
            CHAT | {"nvext": {"session_control": {"session_id": bad}}},
            "nvext.session_control.session_id",
        ),
        ("/v1/chat/completions", CHAT | {"agent_hint": {"session_id": bad}}, "agent_hint.session_id"),
        ("/v1/advisory", {"session_id": bad}, "session_id"),
        ("/v1/advisory", {"advisories": [{"session_id": SESSION}, {"session_id": bad}]}, "advisories[1].session_id"),
        ("/v1/invalidate", {"session_id": bad}, "session_id"),
        ("/v1/invalidate", {"advisory_id": bad}, "advisory_id"),
        ("/v1/client_secrets", {"session_id": bad}, "session_id"),
        ("/v1/client_secrets", {"session_prefix": bad}, "session_prefix"),
        ("/v1/client_secrets", {"session_id": "a", "origin": bad}, "origin"),
        ("/v1/workflows/w", {"agents": [bad]}, None),
        ("/v1/workflows/w", {"agents": ["a"], "edges": [{"from": "a", "to": bad}]}, None),
    ):
        answer = await h.ask(method_of(path), path, body)
        refused(answer)
        assert param is None or answer.error["param"] == param, (path, answer.error)
    assert (
        not h.worker.submitted and not h.scheduler.advised and not h.scheduler.invalidated and not h.scheduler.workflows
    )


@pytest.mark.parametrize("how", NASTY)
async def test_a_nasty_cache_key_is_a_name_of_its_own(h: Harness, how: str) -> None:
    """OpenAI allows any text there: it is hashed, and none is another's."""
    answer = await h.ask("POST", "/v1/chat/completions", CHAT | {"prompt_cache_key": NASTY[how][:4096]})
    if "\ud800" in NASTY[how] or len(NASTY[how]) > 4096:
        refused(answer) if answer.status != 200 else None
    else:
        assert answer.status == 200
        session = answer.headers["x-session-id"]
        assert session.startswith("pck-") and len(session) == 36


@pytest.mark.parametrize("how", NASTY)
async def test_a_nasty_text_where_any_text_is_allowed_is_taken_or_refused(h: Harness, how: str) -> None:
    bad = NASTY[how]
    tool = {
        "type": "function",
        "function": {"name": "a", "description": bad, "parameters": {"type": "object", "title": bad}},
    }
    for path, body in (
        ("/v1/advisory", {"session_id": "a", "model_id": bad}),
        ("/v1/advisory", {"session_id": "a", "token": bad}),
        ("/v1/advisory", {"session_id": "a", bad: 1}),
        ("/v1/invalidate", {"session_id": "a", "token": "ek_" + bad}),
        ("/v1/chat/completions", CHAT | {"user": bad, "metadata": {bad: bad}}),
        ("/v1/chat/completions", CHAT | {bad: 1}),
        ("/v1/chat/completions", CHAT | {"stop": [bad]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": bad[:100], "name": bad}]}),
        ("/v1/chat/completions", CHAT | {"tools": [tool]}),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": bad, "schema": {"title": bad}}}},
        ),
        (
            "/v1/chat/completions",
            CHAT | {"kv_hints": {"protocol_version": bad, "actions": [{"type": bad, "session_id": bad}]}},
        ),
        ("/v1/completions", {"model": "toy", "prompt": bad[:100] or "x"}),
    ):
        for key in (KEY_A, None) if "token" in body else (KEY_A,):
            answer = await h.ask("POST", path, body, key=key)
            assert answer.status in (200, 202, 400, 401), (path, body, answer)
            assert len(answer.body) < 20_000


@pytest.mark.parametrize("how", NASTY)
async def test_a_nasty_name_in_a_header_is_refused(h: Harness, how: str) -> None:
    h.worker.submitted.clear()
    for header in (
        "X-Session-Id",
        "X-OpenWebUI-Chat-Id",
        "X-Upbeat-Node",
        "X-Upbeat-Workflow",
        "X-Upbeat-Agent",
        "X-Upbeat-Run",
    ):
        more = {"X-Upbeat-Workflow": "w", "X-Upbeat-Agent": "a"} if header == "X-Upbeat-Run" else {}
        data = "".join(f"{k}: {v}\r\n" for k, v in more.items()).encode() + f"{header}: ".encode()
        data += NASTY[how].encode("utf-8", "surrogatepass") + b"\r\n"
        content = json.dumps(CHAT).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD.encode() + b"Content-Length: %d\r\n" % len(content)
        answer = await h.raw(head + data + b"\r\n" + content)
        assert "x-evil" not in answer.headers
        if how in ("crlf", "blank"):  # the one is another header, the other an empty value, as far as HTTP is concerned
            assert answer.status in (0, 200, 400), answer
        else:
            assert answer.status in (0, 400), (header, answer)
    assert all(r.session_id.isascii() and "\n" not in r.session_id for r in h.worker.submitted)


async def test_unescaped_names_in_a_request_line_are_no_harm(h: Harness) -> None:
    for target in (
        b"/v1/sessions/../../etc/passwd",
        b"/v1/sessions/a\0b",
        b"/v1/sessions/\xff\xfe",
        b"/v1/sessions/" + "💥".encode(),
        b"//",
        b"/./",
    ):
        answer = await h.raw(b"GET " + target + b" HTTP/1.1\r\n" + HEAD.encode() + b"\r\n")
        assert answer.status in (0, 400, 404), (target, answer)
    for target in (b"*", b"http://evil/v1/models", b"evil:80", b"/v1/models#x", b"/v1/models?" + b"a" * 8000):
        answer = await h.raw(b"GET " + target + b" HTTP/1.1\r\n" + HEAD.encode() + b"\r\n")
        assert answer.status in (0, 200, 400, 404, 405), (target, answer)


# ---- header injection and smuggling --------------------------------------------------------------------------------
async def test_no_value_that_is_answered_can_carry_a_header(h: Harness) -> None:
    evil = "a%0d%0aX-Evil:%201%0d%0a%0d%0a<html>"
    for path in (
        f"/v1/models/{evil}",
        f"/v1/sessions/{evil}",
        f"/v1/workflows/{evil}",
        f"/{evil}",
        f"/v1/fleet?metrics={evil}",
        f"/upbeat.js?{evil}",
    ):
        answer = await h.ask("GET", path + evil)
        assert answer.status in (200, 400, 404) and "x-evil" not in answer.headers
    for origin in ("https://x\rX-Evil: 1", "https://x\nX-Evil: 1"):
        content = b"{}"
        head = f"POST /v1/models HTTP/1.1\r\n{HEAD}Origin: {origin}\r\nContent-Length: 2\r\n\r\n".encode()
        assert "x-evil" not in (await h.raw(head + content)).headers
    answer = await h.ask("POST", "/v1/chat/completions", CHAT | {"model": "a\r\nX-Evil: 1"})
    assert answer.status == 404 and "x-evil" not in answer.headers


SMUGGLED = {
    "both lengths": "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: "
    "x\r\n\r\n",
    "two lengths": "Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
    "a negative length": "Content-Length: -1\r\n\r\n",
    "a signed length": "Content-Length: +2\r\n\r\n{}",
    "a length in hexadecimal": "Content-Length: 0x2\r\n\r\n{}",
    "a length with an underscore": "Content-Length: 1_0\r\n\r\n{}",
    "an endless length": f"Content-Length: {'9' * 400}\r\n\r\n",
    "a bad chunk": "Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": "Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "an endless chunk size": f"Transfer-Encoding: chunked\r\n\r\n{'F' * 400}\r\n",
    "an unknown coding": "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked twice": "Transfer-Encoding: chunked, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a folded header": "X-A: b\r\n c\r\nContent-Length: 2\r\n\r\n{}",
    "a space before the colon": "Content-Length : 2\r\n\r\n{}",
    "a nameless header": ": x\r\nContent-Length: 2\r\n\r\n{}",
    "a header without a colon": "nonsense\r\nContent-Length: 2\r\n\r\n{}",
    "a nul in a header": "X-A: b\0c\r\nContent-Length: 2\r\n\r\n{}",
    "bare line feeds": "X-A: b\nContent-Length: 2\n\n{}",
}


@pytest.mark.parametrize("how", SMUGGLED)
async def test_a_request_whose_end_is_unclear_is_refused_and_its_connection_closed(h: Harness, how: str) -> None:
    h.worker.submitted.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY_A}\r\nContent-Type: "
        "application/json\r\n"
    )
    writer.write((head + SMUGGLED[how]).encode("latin-1"))
    writer.write_eof()
    async with asyncio.timeout(20):
        first = await read_answer(reader)
        rest = await reader.read()
    writer.close()
    assert first.status in (0, 400, 413), first
    assert not rest.startswith(b"HTTP/1.1 200"), "what followed was taken for a request"
    assert not h.worker.submitted


# ---- floods --------------------------------------------------------------------------------------------------------
FLOODS = {
    "many headers": b"".join(b"X-%d: y\r\n" % i for i in range(20_000)),
    "one header of a megabyte": b"X-A: " + b"y" * MIB + b"\r\n",
    "one name of a megabyte": b"X" * MIB + b": y\r\n",
    "many cookies": b"".join(b"Cookie: a%d=b\r\n" % i for i in range(5_000)),
    "many times a credential": b"Authorization: Bearer x\r\n" * 5_000,
}


@pytest.mark.parametrize("how", FLOODS)
async def test_a_flood_of_headers_is_cut_off(h: Harness, how: str) -> None:
    before = h.rss_bytes
    for _ in range(5):
        answer = await h.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n" + FLOODS[how] + b"\r\n")
        assert answer.status in (0, 400, 431), answer.status
    answer = await h.raw(b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.status in (0, 400, 414), answer.status
    assert h.rss_bytes - before < 40 * MIB


@pytest.mark.parametrize(
    "sent",
    [b"BREW /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
)
async def test_what_is_no_http_is_told_so_as_every_error_is(h: Harness, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
    writer.write(sent)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.") and b" 400 " in head.split(b"\r\n")[0]
    error = json.loads(body)["error"]
    assert (
        error["type"] == "invalid_request_error"
        and error["code"] == "http_error"
        and error["message"].startswith("this is no HTTP request")
    )
    writer.close()


async def test_requests_that_are_pipelined_without_reading_are_not_hoarded(h: Harness) -> None:
    before = h.rss_bytes
    reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
    one = b"GET /docs HTTP/1.1\r\nHost: x\r\n\r\n" * 200
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        for _ in range(200):
            writer.write(one)
            async with asyncio.timeout(0.5):
                await writer.drain()
            sent += 200
    assert h.rss_bytes - before < 60 * MIB
    writer.close()
    del reader


# ---- bodies --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", BODIES)
async def test_a_body_of_a_gibibyte_is_refused_by_its_length(h: Harness, path: str) -> None:
    answer = await h.raw(f"{method_of(path)} {path} HTTP/1.1\r\n{HEAD}Content-Length: {GIB}\r\n\r\n".encode())
    refused(answer, 413)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/advisory"])
async def test_a_gibibyte_in_chunks_is_refused_and_never_held(h: Harness, path: str) -> None:
    before, most, sent = h.rss_bytes, 0, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
    writer.write(f"POST {path} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
    chunk = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    answering = asyncio.create_task(read_answer(reader))
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < GIB and not answering.done():
            writer.write(chunk)
            async with asyncio.timeout(10):
                await writer.drain()
            sent += MIB
            most = max(most, h.rss_bytes - before)
    async with asyncio.timeout(20):
        answer = await answering
    writer.close()
    # What is sent until the answer is read is thrown away as it comes.
    assert answer.status in (0, 413)
    assert most < 120 * MIB, f"{most >> 20} MiB more"


def bomb() -> bytes:
    """A gibibyte in about a megabyte: what gzip makes of 16 MiB, 64 times."""
    return gzip.compress(b" " * (16 * MIB)) * 64


async def test_a_gzip_bomb_is_not_opened(h: Harness) -> None:
    packed, before = bomb(), h.rss_bytes
    assert len(packed) < 2 * MIB
    for path in BODIES:
        for coding in ("gzip", "x-gzip", "gzip, gzip", "GZIP", "deflate", "br", "zstd"):
            # A hint's body may be no longer than a mebibyte, whatever it is.
            refused(await h.ask(method_of(path), path, packed[: MIB - 100], headers={"Content-Encoding": coding}), 400)
    chunked = f"POST /v1/chat/completions HTTP/1.1\r\n{HEAD}Transfer-Encoding: gzip, chunked\r\n\r\n".encode()
    answer = await h.raw(chunked + b"%x\r\n" % len(packed) + packed + b"\r\n0\r\n\r\n")
    assert answer.status in (0, 400), answer
    assert h.rss_bytes - before < 60 * MIB
    small = gzip.compress(json.dumps(CHAT).encode())
    refused(await h.ask("POST", "/v1/chat/completions", small), 400)


DEEP = {
    "lists": b"[" * 200_000 + b"]" * 200_000,
    "open lists": b"[" * 500_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "mixed": b'[{"a":' * 100_000,
    "a little too deep": b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}",
    "in a field": b'{"model":"toy","metadata":'
    + b"[" * 900
    + b"]" * 900
    + b',"messages":[{"role":"user","content":"x"}]}',
    "in a tool": json.dumps(CHAT | {"tools": [{"type": "function", "function": {"name": "a", "parameters": "HERE"}}]})
    .encode()
    .replace(b'"HERE"', b'{"items":' * 800 + b"{}" + b"}" * 800),
}


@pytest.mark.parametrize("how", DEEP)
async def test_a_deep_body_is_refused(h: Harness, how: str) -> None:
    h.worker.submitted.clear()
    before = h.rss_bytes
    for path in BODIES:
        refused(await h.ask(method_of(path), path, DEEP[how]), 400, 413)
    assert not h.worker.submitted and h.rss_bytes - before < 150 * MIB


ODD: dict[str, bytes] = {
    "a number of many digits": b'{"model":"toy","seed":' + b"9" * 200_000 + b"}",
    "an infinite number": b'{"model":"toy","temperature":1e999}',
    "not a number": b'{"model":"toy","temperature":NaN}',
    "many keys": b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
    "one key many times": b"{" + b",".join(b'"model":"x"' for _ in range(50_000)) + b"}",
    "a key of a megabyte": b'{"' + b"k" * (MIB - 100) + b'":1}',
    "utf-16": json.dumps(CHAT).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(CHAT).encode(),
    "latin-1": '{"model":"ü"}'.encode("latin-1"),
    "two values": b"{}{}",
    "a form": b"session_id=chat-1&model=toy",
    "nothing": b"",
}


@pytest.mark.parametrize("how", ODD)
async def test_an_odd_body_is_refused(h: Harness, how: str) -> None:
    for path in BODIES:
        refused(await h.ask(method_of(path), path, ODD[how]), 400, 413)


async def test_many_large_bodies_at_a_time_do_not_add_up(tmp_path: Any) -> None:
    """Forty bodies of 2 MiB where 8 may be held: some are refused with 503, none with anything else, and memory stays
    bounded."""
    async with harness(tmp_path, body_memory_bytes=8 * MIB, tenant_share=1) as small:
        small.worker.token_s = 0.05
        before = small.rss_bytes
        body = CHAT | {"max_tokens": 20, "user": "u" * (2 * MIB)}
        answers = await asyncio.gather(*(small.ask("POST", "/v1/chat/completions", body) for _ in range(40)))
        found = [a.status for a in answers]
        assert set(found) <= {200, 503, 0} and found.count(200) >= 2 and found.count(503) >= 10, found
        assert all(a.headers["retry-after"] == "1" for a in answers if a.status == 503)
        assert small.rss_bytes - before < 120 * MIB
        await small.is_whole()
