"""Agent workflows at the gateway: what the headers of a request say of it, and the routes of call graphs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, events, stack

from contracts.workflow import Hop
from gateway.core.hops import HEADERS, MAX_ENDED, MAX_RUNS, Ended

KEYS = [{"key": "key-of-acme", "tenant": "acme"}, {"key": "key-of-blue", "tenant": "blue"}]
ACME, BLUE = ({"Authorization": f"Bearer key-of-{tenant}"} for tenant in ("acme", "blue"))
GRAPH = {
    "agents": ["manager", "qa"],
    "edges": [{"from": "manager", "to": "qa", "probability": 0.5, "calls": 2.0, "delay_s": 1.5}],
    "learn": True,
}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


def hop(agent: str = "qa", session: str = "job:qa", **more: str) -> dict[str, str]:
    return {"X-Upbeat-Workflow": "team", "X-Upbeat-Agent": agent, "X-Session-Id": session} | more


# ---- hops -----------------------------------------------------------------------------------------------------
async def test_a_request_of_an_agent_says_its_hop_once_and_the_next_one_which_have_ended(s: Stack) -> None:
    status, _, _ = await s.chat(headers=hop("manager", "job:manager"), n=2)
    assert status == 200
    await s.chat(headers=hop(**{"X-Upbeat-Run": "another"}))
    await s.chat(headers=hop())
    first, second, other, third = s.scheduler.placed
    assert (first.hop.workflow, first.hop.agent, first.hop.run, list(first.hop.ended)) == ("team", "manager", "job", [])
    assert not second.HasField("hop"), "the second choice is no request of its own"
    assert (other.hop.run, list(other.hop.ended)) == ("another", [])
    assert (third.hop.run, list(third.hop.ended)) == ("job", [first.request_id])


async def test_a_streamed_answer_has_ended_when_its_caller_has_read_it(s: Stack) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body, headers=hop()) as r:
        assert (await events(r))[-1] == "[DONE]"
    await s.post("/v1/completions", {"model": MODEL, "prompt": "y"}, headers=hop())
    assert [list(p.hop.ended) for p in s.scheduler.placed] == [[], [s.scheduler.placed[0].request_id]]


async def test_a_request_that_moves_to_another_worker_is_one_hop(s: Stack) -> None:
    s.workers[0].die_after = 2
    status, _, _ = await s.chat(headers=hop())
    assert status == 200 and len(s.scheduler.placed) > 1
    assert [p.HasField("hop") for p in s.scheduler.placed] == [True] + [False] * (len(s.scheduler.placed) - 1)


async def test_a_request_without_the_headers_has_no_hop(s: Stack) -> None:
    await s.chat()
    assert not s.scheduler.placed[0].HasField("hop")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"X-Upbeat-Workflow": "w"}, "X-Upbeat-Agent"),
        ({"X-Upbeat-Agent": "a"}, "X-Upbeat-Workflow"),
        ({"X-Upbeat-Run": "r"}, "X-Upbeat-Workflow"),
        ({"X-Upbeat-Workflow": "../w", "X-Upbeat-Agent": "a"}, "X-Upbeat-Workflow"),
        ({"X-Upbeat-Workflow": "w", "X-Upbeat-Agent": "a b"}, "X-Upbeat-Agent"),
        ({"X-Upbeat-Workflow": "w", "X-Upbeat-Agent": ""}, "X-Upbeat-Agent"),
        ({"X-Upbeat-Workflow": "w", "X-Upbeat-Agent": "a", "X-Upbeat-Run": "r" * 129}, "X-Upbeat-Run"),
    ],
)
async def test_a_header_that_is_wrong_or_missing_is_named(s: Stack, headers: dict[str, str], param: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        status, answer, _ = await s.post(path, {"model": MODEL, **body}, headers=headers)
        assert (status, answer["error"]["param"]) == (400, param) and param in answer["error"]["message"]
    assert not s.scheduler.placed


def test_what_has_ended_is_bounded_and_told_once() -> None:
    ended, one = Ended(), Hop("w", "a", "r")
    for i in range(MAX_ENDED + 5):
        ended.note("t", one, f"q{i}")
    assert ended.take("other", one) == () and len(ended.take("t", one)) == MAX_ENDED and ended.take("t", one) == ()
    for i in range(MAX_RUNS + 5):
        ended.note("t", Hop("w", "a", f"r{i}"), "q")
    assert ended.take("t", Hop("w", "a", "r0")) == () and ended.take("t", Hop("w", "a", f"r{MAX_RUNS}")) == ("q",)


# ---- graphs ---------------------------------------------------------------------------------------------------
async def put(s: Stack, name: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with s.http.put(f"{s.url}/v1/workflows/{name}", json=body, headers=headers) as r:
        return r.status, await r.json()


async def test_a_graph_is_declared_shown_listed_and_deleted_by_its_tenant_alone() -> None:
    async with stack(api_keys=KEYS) as s:
        status, made = await put(s, "team", GRAPH, ACME)
        assert status == 200 and made["id"] == "team" and made["declared"] == GRAPH and made["edges"] == GRAPH["edges"]
        assert made["learned"]["agents"] == [{"name": "qa", "requests": 7}]
        edge = {"from": "qa", "to": "qa", "probability": 0.25, "calls": 1.0, "delay_s": 2.5, "weight": 1.75}
        assert made["learned"]["edges"] == [edge]
        assert await s.get("/v1/workflows/team", headers=ACME) == (200, made)
        assert await s.get("/v1/workflows", headers=ACME) == (200, {"object": "list", "data": [made]})
        assert await s.get("/v1/workflows", headers=BLUE) == (200, {"object": "list", "data": []})
        for method, headers in (("GET", BLUE), ("DELETE", BLUE)):
            async with s.http.request(method, f"{s.url}/v1/workflows/team", headers=headers) as r:
                assert r.status == 404 and (await r.json())["error"]["code"] == "workflow_not_found"
        async with s.http.delete(f"{s.url}/v1/workflows/team", headers=ACME) as r:
            assert r.status == 200 and (await r.json())["deleted"] is True
        assert (await s.get("/v1/workflows/team", headers=ACME))[0] == 404


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("a%20b", GRAPH, "name"),
        ("x" * 129, GRAPH, "name"),
        ("w", [], None),
        ("w", {}, "agents"),
        ("w", GRAPH | {"edges": [{"from": "manager", "to": "ceo"}]}, "edges[0].to"),
        ("w", GRAPH | {"edges": [{"from": "manager", "to": "qa", "probability": -0.1}]}, "edges[0].probability"),
        ("w", GRAPH | {"edges": [{"from": "manager", "to": "qa", "delay_s": -1}]}, "edges[0].delay_s"),
        ("w", GRAPH | {"weight": 3}, "weight"),
    ],
)
async def test_a_graph_that_is_wrong_is_refused_naming_the_field(
    s: Stack, name: str, body: Any, param: str | None
) -> None:
    status, answer = await put(s, name, body)
    assert (status, answer["error"]["param"]) == (400, param) and not s.scheduler.workflows


async def test_workflows_are_unavailable_while_no_scheduler_answers_and_requests_go_on(s: Stack) -> None:
    await s.scheduler.kill()
    assert (await put(s, "w", GRAPH))[0] == 503
    async with asyncio.timeout(10):
        status, _, _ = await s.chat(headers=hop())
    assert status == 200


def test_the_headers_are_documented() -> None:
    document = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    assert [header for header in HEADERS if f"`{header}`" not in document] == []
