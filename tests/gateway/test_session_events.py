"""`GET /v1/sessions/{id}/events`: a session's residency as it changes, looked at once for all who watch, and by nobody
for none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from gateway_fakes import Stack, stack, until

from contracts.v1 import scheduler_pb2 as pb
from gateway import watching
from gateway.core.watching import MOVING_S, SETTLED_S, STILL_S, THOROUGH_S, LookSchedule, Picture, TierContents, joined

KEYS = [{"key": "key-of-acme", "tenant": "acme"}, {"key": "key-of-blue", "tenant": "blue"}]
ACME = {"Authorization": "Bearer key-of-acme"}


@pytest.fixture
async def s() -> Any:
    async with stack(nodes=1) as running:
        yield running


@contextlib.asynccontextmanager
async def watched(s: Stack, session: str = "chat-1", **more: Any) -> AsyncIterator[AsyncIterator[Any]]:
    """The stream's events, decoded."""
    async with s.http.get(f"{s.url}/v1/sessions/{session}/events", **more) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield decoded(response)


async def decoded(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def info(tokens: int, *, hinted: str = "", **nodes: dict[str, list[int]]) -> pb.SessionInfo:
    """nodes: by name with _ for -, layer counts by tier."""
    summary = pb.SessionSummary(session={"tenant": "", "session_id": "chat-1"}, model="toy", tokens=tokens, node=hinted)
    residencies = [
        pb.NodeResidency(
            node=name.replace("_", "-"),
            tiers=[
                {"tier": t, "layer_chunks": chunks, "tokens": 64 * min(chunks), "bytes": 8 * sum(chunks)}
                for t, chunks in tiers.items()
            ],
        )
        for name, tiers in nodes.items()
    ]
    return pb.SessionInfo(summary=summary, known=True, nodes=residencies)


async def test_what_is_where_is_told_at_once_and_again_when_it_changes(s: Stack) -> None:
    async with watched(s) as events, asyncio.timeout(10):
        first = await anext(events)
        assert (first["id"], first["known"], first["tokens"], first["hint_node"]) == ("chat-1", True, 128, None)
        assert first["nodes"] == [
            {"node": "node-0", "tiers": [{"tier": "dram", "tokens": 64, "layer_chunks": [2, 2, 1, 0], "bytes": 4096}]}
        ]
        assert first["blob"] is None
        s.scheduler.residencies["chat-1"] = info(
            128, hinted="node-0", node_0={"hbm": [2, 1], "dram": [2, 2], "blob": [2, 2]}
        )
        second = await anext(events)
        assert second["hint_node"] == "node-0"
        assert [t["tier"] for t in second["nodes"][0]["tiers"]] == ["hbm", "dram"]
        assert second["blob"]["layer_chunks"] == [2, 2]


async def test_a_session_that_nobody_knows_can_be_watched_until_somebody_does(s: Stack) -> None:
    async with watched(s, "new") as events, asyncio.timeout(10):
        assert (await anext(events))["known"] is False
        s.scheduler.residencies["new"] = info(64, node_0={"hbm": [1, 1]})
        assert (await anext(events))["tokens"] == 64


async def test_a_session_is_looked_at_once_for_all_who_watch_it_and_no_more_when_they_have_gone(s: Stack) -> None:
    async with contextlib.AsyncExitStack() as open_streams, asyncio.timeout(20):
        began_s = time.monotonic()
        streams = [await open_streams.enter_async_context(watched(s)) for _ in range(5)]
        assert [(await anext(events))["known"] for events in streams] == [True] * 5
        parts = s.gateway.parts
        assert parts is not None and parts.watches.sessions == 1
        seen = len(s.scheduler.looks)
        # none on an idle machine; a busy one may open five streams for seconds
        again = int((time.monotonic() - began_s) / MOVING_S)
        assert seen <= 2 + again, "one look served all five"
    await until(lambda: parts.watches.sessions == 0)
    await asyncio.sleep(0.1)
    seen = len(s.scheduler.looks)
    await asyncio.sleep(3 * MOVING_S)
    assert len(s.scheduler.looks) == seen


async def test_most_looks_ask_no_blob_tier(s: Stack) -> None:
    async with watched(s) as events:
        await anext(events)
        await until(lambda: len(s.scheduler.looks) >= 4)
    assert [look.local for look in s.scheduler.looks[:4]] == [False, True, True, True]


async def test_streams_are_limited_in_number_and_those_that_end_make_room(s: Stack) -> None:
    async with contextlib.AsyncExitStack() as open_streams:
        for _ in range(watching.MAX_TENANT_STREAMS):
            await open_streams.enter_async_context(watched(s))
        async with s.http.get(s.url + "/v1/sessions/chat-1/events") as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "too_many_streams")
            assert int(refused.headers["Retry-After"]) > 0
    parts = s.gateway.parts
    assert parts is not None
    await until(lambda: parts.watches.sessions == 0)
    async with watched(s) as events:
        assert (await anext(events))["known"]


async def test_a_stream_needs_a_key_and_shows_the_sessions_of_its_tenant_only() -> None:
    async with stack(nodes=1, api_keys=KEYS) as s:
        assert (await s.get("/v1/sessions/chat-1/events"))[0] == 401
        assert (await s.get("/v1/sessions/chat-1/events", headers={"Authorization": "Bearer wrong-key"}))[0] == 401
        async with watched(s, headers=ACME) as events:
            await anext(events)
        assert {look.session.tenant for look in s.scheduler.looks} == {"acme"}
        status, body = await s.get("/v1/sessions/a%20b/events", headers=ACME)
        assert (status, body["error"]["param"]) == (400, "session_id")


async def test_a_stream_outlives_a_silent_scheduler(s: Stack) -> None:
    async with watched(s) as events, asyncio.timeout(20):
        await anext(events)
        await s.scheduler.kill()
        await asyncio.sleep(0.3)
        s.scheduler.residencies["chat-1"] = info(640, node_0={"hbm": [9, 9]})
        await s.scheduler.start()
        assert (await anext(events))["tokens"] == 640


# ---- the core -------------------------------------------------------------------------------------------------------


def tier(*chunks: int) -> TierContents:
    return TierContents(chunks, 0, sum(chunks))


def test_a_quick_look_says_nothing_of_nodes_it_does_not_name() -> None:
    before = Picture(True, "m", 64, "", {"node-0": {"hbm": tier(2)}, "node-1": {"dram": tier(1)}}, blob=tier(2))
    seen = Picture(True, "m", 64, "node-0", {"node-0": {"hbm": tier(1)}}, blob=tier(1))
    shown = joined(before, seen, thorough=False)
    assert shown.nodes == {"node-0": {"hbm": tier(1)}, "node-1": {"dram": tier(1)}} and shown.blob == tier(2)
    assert shown.hint_node == "node-0"
    assert joined(before, seen, thorough=True) == seen
    assert joined(before, Picture(), thorough=False) == Picture()


def test_the_pace_is_quick_while_something_moves_and_slow_when_nothing_does() -> None:
    pace, here = LookSchedule(), Picture(True, "m", 64)
    assert pace.thorough(0.0)
    pace.looked(0.0, Picture(), here, thorough=True)
    assert pace.rest_s(0.0) == MOVING_S and not pace.thorough(THOROUGH_S - 0.1)
    pace.looked(SETTLED_S, here, here, thorough=False)
    assert pace.rest_s(SETTLED_S) == STILL_S
    assert pace.thorough(THOROUGH_S)
    hinted = Picture(True, "m", 64, "node-1")
    pace.looked(100.0, here, hinted, thorough=True)
    pace.looked(200.0, hinted, hinted, thorough=False)
    assert pace.rest_s(200.0) == MOVING_S, "a hint stands"


def test_a_session_that_a_quick_look_lost_is_looked_for_everywhere_at_once() -> None:
    pace, here = LookSchedule(), Picture(True, "m", 64)
    pace.looked(0.0, Picture(), here, thorough=True)
    pace.looked(0.2, here, Picture(), thorough=False)
    assert pace.thorough(0.4)
    pace.looked(0.4, Picture(), Picture(), thorough=True)
    assert not pace.thorough(0.6), "it is gone"
