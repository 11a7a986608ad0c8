"""What one tenant sends delays nobody else: 16 MiB of every hostile kind, bodies that never end, and prompts that fit
no context."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import until
from security_harness import CHAT, KEY_A, KEY_B, Answer, Harness, harness, read_answer, rss_of

from contracts.v1 import scheduler_pb2 as pb
from tests.pace import waited_s

MIB = 1 << 20
#: A model as large ones are: 8,192 tokens of at most 128 bytes.
MODEL = pb.ModelInfo(name="toy", max_tokens=8192, created_s=1, longest_token_bytes=128, message_token_bytes=128)
#: Of four that share room for one body, each tenant may fill two.
FOUR_BODIES = {"max_body_bytes": 4 * MIB, "body_memory_bytes": 16 * MIB}


@pytest.fixture(scope="module")
async def h(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    async with harness(tmp_path_factory.mktemp("gateway"), MODEL) as running:
        yield running
        await running.is_whole()


async def program(what: str, h: Harness, key: str, seconds: float, *more: object) -> Any:
    """What `body_senders` prints."""
    command = [sys.executable, "-m", "tests.gateway.body_senders", what, str(h.port), key, str(seconds)]
    command += map(str, more)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, what
    return json.loads(said)


async def answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that has nothing to do: what it takes, the machine takes."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


def part(seconds: list[float], share: float) -> float:
    """What so many of them stay below."""
    return sorted(seconds)[int(share * (len(seconds) - 1))]


# ---- the event loop ------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.sample
async def test_bodies_of_every_hostile_kind_delay_no_other_tenant_and_take_bounded_memory(h: Harness) -> None:
    await h.ask("POST", "/v1/completions", {"model": "toy", "prompt": "x" * MIB})  # its helpers have started
    family = h.family()
    before, most = rss_of(family), 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, rss_of(family) - before)
            await asyncio.sleep(0.05)

    async def trickle() -> Answer:
        """A body of which a byte comes every second."""
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY_A}\r\nContent-Type: "
            "application/json\r\n"
        )
        writer.write(f"{head}Content-Length: 1000\r\n\r\n".encode())
        answering = asyncio.create_task(read_answer(reader))
        while not answering.done():
            writer.write(b" ")
            await asyncio.wait([answering], timeout=1)
        writer.close()
        return answering.result()

    watching, slow = asyncio.create_task(watch()), asyncio.create_task(trickle())
    async with await asyncio.start_server(answer_at_once, "127.0.0.1", 0) as beside:
        honest = program("honest", h, KEY_B, 12.0, beside.sockets[0].getsockname()[1])
        found, took = await asyncio.gather(program("hostile", h, KEY_A, 12.0), honest)
    watching.cancel()
    assert (await slow).status == 408, "a body that does not keep up"
    statuses = {name: set(found[name]) for name in found}
    assert all(seen <= {400, 404, 413, 503, 200, 0} for seen in statuses.values()), statuses
    assert 400 in statuses["one long text"] and 413 in statuses["tiny objects"], statuses
    assert all(len(times) > 20 for times in took.values()), {name: len(times) for name, times in took.items()}
    late = {name: [round(part(times, p), 3) for p in (0.95, 0.99)] for name, times in took.items()}
    # On a machine with free cores 99 of 100 stay below: 30 ms for /health and hints, 70 ms for chats. Others use this
    # one, too: a chat is three messages, each of which may take what one to a server beside the gateway takes.
    p95_beside, p99_beside = late.pop("beside")
    assert max(p95 for p95, _ in late.values()) < 0.1 + 3 * p95_beside, (late, p95_beside)
    assert max(p99 for _, p99 in late.values()) < 0.5 + 3 * p99_beside, (late, p99_beside)
    # Three bodies with their copies in the gateway, and what two helpers may make of one each.
    assert most < 512 * MIB, f"{most >> 20} MiB"
    await until(lambda: rss_of(family) - before < 128 * MIB)  # and it is given back


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * (2 * MIB)}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * 40}] * 16_000}, "messages"),
        ("completions", {"prompt": "x" * (2 * MIB)}, "prompt"),
        ("completions", {"prompt": ["short", "x" * (2 * MIB)]}, "prompt[1]"),
        ("completions", {"prompt": [1] * 700_000}, "prompt"),
    ],
)
async def test_too_long_is_said_within_a_tenth_of_a_second(
    h: Harness, path: str, body: dict[str, Any], param: str
) -> None:
    content, took = json.dumps({"model": "toy", **body}).encode(), []
    here = [os.getpid(), *(process.pid for process in h.family())]
    for _ in range(5):
        began, waited = time.monotonic(), waited_s(here)
        answer = await h.ask("POST", f"/v1/{path}", content)
        took.append(time.monotonic() - began - (waited_s(here) - waited))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (
            400,
            "context_length_exceeded",
            param,
        ), answer
    began = time.monotonic()
    json.loads(content)
    # Reading it here, in the same moment, says how slow the machine is.
    assert min(took) < 0.1 + 2 * (time.monotonic() - began), took
    assert not h.worker.submitted or len(str(h.worker.submitted[-1].messages)) < 100, "no worker is asked"


async def test_a_body_longer_than_any_prompt_can_be_is_refused_by_its_length(tmp_path: Path) -> None:
    small = pb.ModelInfo(name="toy", max_tokens=1024, created_s=1, longest_token_bytes=16, message_token_bytes=16)
    async with harness(tmp_path, small) as h:
        head = (
            f"Host: x\r\nAuthorization: Bearer {KEY_A}\r\nContent-Type: application/json\r\nContent-Length: "
            f"{5 * MIB}\r\n\r\n"
        )
        answer = await h.raw(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode())
        assert answer.status == 413 and "shorten" in answer.error["message"]


async def test_a_large_body_asks_for_the_same_as_a_small_one(h: Harness) -> None:
    """The padding is white space, which says nothing: what the worker gets is the same either way, and so is the
    session."""
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief, ü 💥"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    hints = {
        "protocol_version": "0.1",
        "actions": [{"action_id": "1", "action_type": "kv.pin", "payload": {"session_id": "other"}}],
    }
    more = {
        "seed": 5,
        "max_tokens": 3,
        "stop": ["x"],
        "logit_bias": {"7": 1.5},
        "stop_token_ids": [9],
        "logprobs": True,
        "top_logprobs": 2,
    }
    chat = {"model": "toy", "messages": messages, "tools": [tool], "kv_hints": hints, "n": 2, **more}
    for path, body in (
        ("chat/completions", chat),
        (
            "chat/completions",
            chat
            | {
                "session_id": "mine",
                "response_format": {"type": "json_object"},
                "tools": None,
                "messages": messages[:2],
            },
        ),
        ("completions", {"model": "toy", "prompt": ["one" * 30, "two"], "max_tokens": 2, "seed": 1, "logprobs": 1}),
        ("completions", {"model": "toy", "prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "seed": 1}),
        ("chat/completions", chat | {"temperature": 7}),
        ("chat/completions", chat | {"kv_hints": 7}),
        ("chat/completions", chat | {"prompt_cache_key": "half a pair \ud800"}),
    ):
        seen = []
        for padding in (b"", b" " * (300 << 10)):
            h.worker.submitted.clear()
            answer = await h.ask("POST", f"/v1/{path}", json.dumps(body).encode() + padding)
            asked = [
                (r.sampling, r.messages, r.prompt, r.prompt_tokens, r.json_schema, r.tool_use, r.packed)
                for r in h.worker.submitted
            ]
            said = json.loads(answer.body)
            results = said.get("kv_hints"), said.get("error"), said.get("usage")
            seen.append((answer.status, answer.headers.get("x-session-id", "").partition("-")[0], asked, results))
        assert seen[0] == seen[1], path


# ---- room ----------------------------------------------------------------------------------------------------------
class Unfinished:
    """A request whose body lacks a byte."""

    def __init__(
        self,
        h: Harness,
        size: int,
        path: str = "/v1/chat/completions",
        key: str | None = KEY_A,
        address: str = "127.0.0.1",
    ) -> None:
        self._h, self._size, self._path, self._key, self._address = h, size, path, key, address

    async def __aenter__(self) -> Unfinished:
        self.reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._h.port, local_addr=(self._address, 0)
        )
        credential = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: x\r\n{credential}Content-Type: "
            f"application/json\r\nContent-Length: {self._size}\r\n\r\n"
        )
        self._writer.write(head.encode() + b" " * (self._size - 1))
        await self._writer.drain()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()


async def held(h: Harness) -> int:
    """Bytes of bodies, as the gateway says."""
    text = (await h.ask("GET", "/metrics", key=None)).body.decode()
    return int(
        float(
            next(line for line in text.splitlines() if line.startswith("upbeat_gateway_body_bytes")).rpartition(" ")[2]
        )
    )


def body_of(size: int) -> bytes:
    return json.dumps(CHAT | {"user": "u" * (size - 200)}).encode()


async def test_bodies_that_lack_a_byte_hold_their_tenants_share_and_make_way_for_its_next(tmp_path: Path) -> None:
    async with harness(tmp_path, **FOUR_BODIES) as h:
        size = 4 * MIB - 1024
        async with Unfinished(h, size) as first, Unfinished(h, size) as second:
            await until(lambda: _holds(h, 2 * (size - 1)))
            third = await h.ask("POST", "/v1/chat/completions", body_of(size))
            assert (third.status, third.error["code"]) == (503, "overloaded"), "nobody rests yet"
            for _ in range(2):
                assert (await h.ask("POST", "/v1/chat/completions", body_of(size), KEY_B)).status == 200, (
                    "another tenant has room"
                )
            await asyncio.sleep(1.1)
            assert (await h.ask("POST", "/v1/chat/completions", body_of(size))).status == 200, "what rests makes way"
            answers = [asyncio.create_task(read_answer(u.reader)) for u in (first, second)]
            done, waiting = await asyncio.wait(answers, timeout=2)
            assert [task.result().status for task in done] == [408] and len(waiting) == 1
            for task in waiting:
                task.cancel()
        await until(lambda: _holds(h, 0))


async def test_one_address_without_a_key_does_not_hold_all_of_the_unauthenticated_share(tmp_path: Path) -> None:
    async with harness(tmp_path, body_memory_bytes=2 * MIB) as h:  # an eighth is theirs, and half of that one's
        hints = [Unfinished(h, 62_000, "/v1/advisory", None, "127.0.0.2") for _ in range(2)]
        async with hints[0], hints[1]:
            await until(lambda: _holds(h, 2 * 61_999))
            body = {"token": h.token(), "session_id": "chat-1"}
            assert (await h.ask("POST", "/v1/advisory", body, key=None)).status == 202, "another address"
            reader, writer = await asyncio.open_connection("127.0.0.1", h.port, local_addr=("127.0.0.2", 0))
            content = json.dumps(body | {"model_id": "m" * 200}).encode() + b" " * 10_000
            writer.write(
                b"POST /v1/advisory HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content
            )
            assert (await read_answer(reader)).status == 503
            writer.close()
            assert (await h.ask("POST", "/v1/advisory", {"session_id": "chat-1"})).status == 202, (
                "callers have their own"
            )


async def _holds(h: Harness, amount: int) -> bool:
    return await held(h) == amount
