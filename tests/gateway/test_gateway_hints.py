"""Advisories, invalidations, sessions, keys, and the operators' routes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, stack, until

from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from gateway.encoded_arrays import EncodedArray

KEYS = [{"key": "key-of-acme", "tenant": "acme", "max_priority": 0}, {"key": "key-of-blue", "tenant": "blue"}]
ACME = {"Authorization": "Bearer key-of-acme"}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


async def _not_ready(s: Stack) -> bool:
    return not await s.is_ready()


async def told(s: Stack, advisories: int = 0, invalidations: int = 0) -> None:
    async with asyncio.timeout(5):
        while len(s.scheduler.advised) < advisories or len(s.scheduler.invalidated) < invalidations:
            s.scheduler.told.clear()
            await s.scheduler.told.wait()


async def test_an_advisory_is_accepted_and_the_scheduler_is_told_all_its_fields(s: Stack) -> None:
    hint = {
        "session_id": "chat:1",
        "model_id": MODEL,
        "expected_arrival": 2.5,
        "ordered": True,
        "priority": -4,
        "ttl_s": 9,
    }
    status, body, _ = await s.post("/v1/advisory", hint, headers={"X-Upbeat-Node": "node-1"})
    assert status == 202
    assert (body["session_id"], body["status"]) == ("chat:1", "accepted")
    await told(s, 1)
    wire = s.scheduler.advised[0]
    assert (wire.session.tenant, wire.session.session_id, wire.model_id) == ("default", "chat:1", MODEL)
    assert (wire.expected_arrival_s, wire.ordered, wire.priority, wire.ttl_s) == (2.5, True, -4, 9)
    assert (wire.advisory_id, wire.pin_node) == (body["advisory_id"], "node-1")


async def test_a_batch_is_accepted_in_order(s: Stack) -> None:
    status, body, _ = await s.post("/v1/advisory", {"advisories": [{"session_id": f"s{i}"} for i in range(256)]})
    assert status == 202 and [a["session_id"] for a in body["advisories"]] == [f"s{i}" for i in range(256)]
    await told(s, 256)
    assert [a.advisory_id for a in s.scheduler.advised] == [a["advisory_id"] for a in body["advisories"]]


@pytest.mark.parametrize(
    ("hint", "param"),
    [
        ({}, "session_id"),
        ({"session_id": "../x"}, "session_id"),
        ({"session_id": "a\0"}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "a", "expected_arrival": -1}, "expected_arrival"),
        ({"session_id": "a", "expected_arrival": 10**400}, "expected_arrival"),
        ({"session_id": "a", "ordered": 1}, "ordered"),
        ({"session_id": "a", "text": "secret"}, "text"),
        ({"session_id": "a", "token": 5}, "token"),
        ({"advisories": []}, "advisories"),
        ({"advisories": [{"session_id": "a"}, {"session_id": ""}]}, "advisories[1].session_id"),
    ],
)
async def test_a_wrong_hint_is_refused_by_name(s: Stack, hint: dict[str, Any], param: str) -> None:
    status, body, _ = await s.post("/v1/advisory", hint)
    assert (status, body["error"]["param"]) == (400, param)


async def test_an_invalidation_comes_after_the_advisory_it_takes_back(s: Stack) -> None:
    _, advisory, _ = await s.post("/v1/advisory", {"session_id": "a"})
    for body in ({"session_id": "a"}, {"advisory_id": advisory["advisory_id"]}):
        status, answer, _ = await s.post("/v1/invalidate", body)
        assert (status, answer["status"]) == (202, "accepted")
    await told(s, 1, 2)
    first, second = s.scheduler.invalidated
    assert (first.session.session_id, first.advisory_id) == ("a", "")
    assert (second.session.session_id, second.advisory_id, second.session.tenant) == (
        "",
        advisory["advisory_id"],
        "default",
    )


@pytest.mark.parametrize(
    "body", [{}, {"session_id": "a", "advisory_id": "b"}, {"session_id": "../a"}, {"session_id": "a", "x": 1}]
)
async def test_a_wrong_invalidation_is_refused(s: Stack, body: dict[str, Any]) -> None:
    status, answer, _ = await s.post("/v1/invalidate", body)
    assert status == 400 and answer["error"]["param"]


async def test_a_tenant_that_takes_back_every_hint_does_not_delay_another_ones() -> None:
    async with stack(api_keys=KEYS) as s:
        parts = s.gateway.parts
        assert parts is not None
        for number in range(300):
            session = common_pb2.Session(tenant="acme", session_id=f"s{number}")
            parts.hints.advise([common_pb2.Advisory(session=session)])
            parts.hints.invalidate(pb.InvalidateRequest(session=session))
        parts.hints.advise([common_pb2.Advisory(session={"tenant": "blue", "session_id": "s"})])
        async with asyncio.timeout(5):
            while not any(one.session.tenant == "blue" for one in s.scheduler.advised):
                s.scheduler.told.clear()
                await s.scheduler.told.wait()
        assert len(s.scheduler.invalidated) <= 5


async def test_hints_over_the_limit_are_told_when_to_come_back() -> None:
    async with stack(1, max_advisories_per_s=2) as s:
        answers = [await s.post("/v1/advisory", {"session_id": "a"}) for _ in range(4)]
        assert [status for status, _, _ in answers][:2] == [202, 202]
        status, body, headers = answers[-1]
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["Retry-After"]) >= 1
        assert headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/sessions?limit=9",
        "/v1/sessions/chat-1",
        "/v1/responses/resp_1",
        "/v1/files",
        "/v1/fine_tuning/jobs",
        "/v1/fleet",
    ],
)
async def test_queries_over_the_limit_are_told_when_to_come_back_and_other_tenants_are_not(path: str) -> None:
    async with stack(1, wait=False, api_keys=KEYS, max_queries_per_s=2) as s:

        async def ask(key: str) -> tuple[int, str | None]:
            async with s.http.get(s.url + path, headers={"Authorization": f"Bearer {key}"}) as r:
                return r.status, r.headers.get("Retry-After")

        answers = [await ask("key-of-acme") for _ in range(12)]
        assert 429 not in {status for status, _ in answers[:10]}
        assert answers[-1] == (429, "1")
        assert (await ask("key-of-blue"))[0] != 429


async def test_a_browser_may_send_hints_from_any_page_with_the_key_in_the_body() -> None:
    async with stack(1, wait=False, api_keys=KEYS) as s:
        for path in ("/v1/advisory", "/v1/invalidate"):
            text = '{"session_id": "a", "token": "key-of-acme"}'
            async with s.http.post(s.url + path, data=text, headers={"Content-Type": "text/plain;charset=UTF-8"}) as r:
                assert r.status == 202 and r.headers["Access-Control-Allow-Origin"] == "*"
            async with s.http.options(
                s.url + path, headers={"Origin": "http://x", "Access-Control-Request-Method": "POST"}
            ) as r:
                assert r.status == 204 and "POST" in r.headers["Access-Control-Allow-Methods"]
                assert "authorization" in r.headers["Access-Control-Allow-Headers"].lower()
            async with s.http.post(s.url + path, data='{"session_id": "a", "token": "wrong-key"}') as r:
                assert r.status == 401 and r.headers["Access-Control-Allow-Origin"] == "*"
        await told(s, 1, 1)
        assert s.scheduler.advised[0].session.tenant == "acme"


async def test_hints_are_accepted_while_no_scheduler_answers(s: Stack) -> None:
    await s.scheduler.kill()
    status, _, _ = await s.post("/v1/advisory", {"session_id": "a"})
    assert status == 202


async def test_keys_open_the_routes_and_name_the_tenant() -> None:
    async with stack(api_keys=KEYS) as s:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/advisory"),
            ("POST", "/v1/invalidate"),
            ("GET", "/v1/models"),
            ("GET", "/v1/fleet"),
            ("GET", "/v1/sessions"),
            ("GET", "/v1/sessions/chat-1"),
            ("DELETE", "/v1/sessions/chat-1"),
            ("GET", "/v1/workflows"),
            ("GET", "/v1/workflows/w"),
            ("PUT", "/v1/workflows/w"),
            ("DELETE", "/v1/workflows/w"),
        ):
            for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "key-of-acme"}):
                async with s.http.request(method, s.url + path, json={}, headers=headers) as r:
                    assert r.status == 401, path
                    assert (await r.json())["error"]["type"] == "authentication_error"
        status, _, _ = await s.chat(headers=ACME, priority=-9)
        assert status == 200
        request = s.workers[0].submitted[0]
        assert (request.tenant, request.priority) == ("acme", 0)
        await s.post("/v1/advisory", {"session_id": "a", "priority": -9}, headers=ACME)
        await told(s, 1)
        assert (s.scheduler.advised[0].session.tenant, s.scheduler.advised[0].priority) == ("acme", 0)


async def test_the_fleet_is_shown_with_each_nodes_samples_when_they_are_wanted(s: Stack) -> None:
    status, plain = await s.get("/v1/fleet")
    assert status == 200 and all("metrics" not in node for node in plain["nodes"])
    status, full = await s.get("/v1/fleet?metrics=true")
    assert status == 200 and {n["node"]: n.get("metrics") for n in full["nodes"]}["node-0"] == {"reads_total": 2.0}
    status, body = await s.get("/v1/fleet?metrics=1")
    assert status == 400 and body["error"]["param"] == "metrics"


async def test_sessions_are_listed_shown_by_tier_and_erased(s: Stack) -> None:
    status, listed = await s.get("/v1/sessions?limit=5")
    assert status == 200 and [x["id"] for x in listed["data"]] == ["chat-1"]
    status, shown = await s.get("/v1/sessions/chat-1")
    assert (status, shown["tokens"], shown["model"]) == (200, 128, MODEL)
    assert shown["nodes"][0]["tiers"] == [
        {"tier": "dram", "tokens": 64, "layers": 3, "layer_chunks": [2, 2, 1, 0], "bytes": 4096}
    ]
    async with s.http.delete(f"{s.url}/v1/sessions/chat-1") as r:
        assert r.status == 200 and (await r.json())["deleted"] is True
    assert s.scheduler.erased[0].session_id == "chat-1"
    for method in ("GET", "DELETE"):
        async with s.http.request(method, f"{s.url}/v1/sessions/chat-2") as r:
            assert r.status == 404 and (await r.json())["error"]["param"] == "session_id"
    status, body = await s.get("/v1/sessions?limit=zero")
    assert (status, body["error"]["param"]) == (400, "limit")


async def test_lists_of_sessions_come_in_pages_in_openais_form(s: Stack) -> None:
    s.scheduler.more_sessions = True
    status, page = await s.get("/v1/sessions?limit=1&order=id&after=chat-0")
    assert (status, page["object"], page["first_id"], page["last_id"], page["has_more"]) == (
        200,
        "list",
        "chat-1",
        "chat-1",
        True,
    )
    asked = s.scheduler.listed[-1]
    assert (asked.limit, asked.after, asked.by_id) == (1, "chat-0", True)
    status, page = await s.get("/v1/sessions?after=chat-1")
    assert (status, page["data"], page["first_id"], page["last_id"], page["has_more"]) == (200, [], None, None, False)
    status, body = await s.get("/v1/sessions?after=gone")
    assert (status, body["error"]["param"]) == (400, "after") and "order=id" in body["error"]["message"]
    for wrong in ("order=size", "after=%2F..", "limit=0"):
        status, body = await s.get(f"/v1/sessions?{wrong}")
        assert (status, body["error"]["param"]) == (400, wrong.partition("=")[0])


async def test_a_long_list_of_sessions_counts_as_several_queries() -> None:
    async with stack(1, max_queries_per_s=2) as s:  # ten at once

        async def ask(limit: str) -> int:
            return (await s.get(f"/v1/sessions?limit={limit}"))[0]

        assert [await ask("250") for _ in range(2)] == [200, 429]
        assert [await ask("49") for _ in range(4)] == [200] * 4
        assert [await ask("zero") for _ in range(3)][-1] == 429, "a wrong one counts too"
    async with stack(1, max_queries_per_s=2) as s:
        assert (await s.get("/v1/sessions?limit=1000"))[0] == 200, "longer than the bucket, which is full"


async def test_a_long_list_of_sessions_is_converted_in_pieces(s: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    added, add = list[int](), EncodedArray.add

    def noted(self: EncodedArray, values: Any) -> int:
        added.append(len(values))
        return add(self, values)

    monkeypatch.setattr(EncodedArray, "add", noted)
    s.scheduler.sessions = [f"s{number:03d}" for number in range(300)]
    status, page = await s.get("/v1/sessions?limit=300&order=id")
    assert (status, [one["id"] for one in page["data"]]) == (200, s.scheduler.sessions)
    assert (page["first_id"], page["last_id"]) == ("s000", "s299")
    assert sum(added) == 300 and max(added) <= 64


async def test_a_session_that_is_being_erased_is_shown_as_such_and_an_erasure_that_no_node_recorded_is_a_503(
    s: Stack,
) -> None:
    erasures = [
        pb.NodeErasure(node="node-0", answered=True, left=[pb.TierLeft(tier="blob", chunks=3)]),
        pb.NodeErasure(node="node-1"),
    ]
    s.scheduler.residencies["chat-1"] = pb.SessionInfo(known=True, erasing=True, erasures=erasures)
    status, shown = await s.get("/v1/sessions/chat-1")
    assert (status, shown["status"]) == (200, "erasing")
    assert shown["nodes"] == [
        {"node": "node-0", "answered": True, "verified": False, "left": {"blob": 3}},
        {"node": "node-1", "answered": False, "verified": False, "left": {}},
    ]
    s.scheduler.takes_erasures = False
    async with s.http.delete(f"{s.url}/v1/sessions/chat-1") as r:
        assert r.status == 503 and "send it again" in (await r.json())["error"]["message"]


async def test_sessions_are_unavailable_while_no_scheduler_answers(s: Stack) -> None:
    await s.scheduler.kill()
    status, body = await s.get("/v1/sessions/chat-1")
    assert (status, body["error"]["code"]) == (503, "unavailable")


async def test_ready_with_all_follows_every_node_and_health_follows_nothing(s: Stack) -> None:
    s.scheduler.set_absent("node-1")
    await until(lambda: _not_ready(s))
    assert await s.missing() == ["1 of 2 nodes serve", "node-1 does not serve"]
    s.scheduler.set_absent()
    await s.ready()
    await s.scheduler.kill()
    await until(lambda: _not_ready(s))
    assert await s.missing() == ["the scheduler does not answer"]
    assert (await s.get("/health"))[0] == 200
    await s.scheduler.start()
    await s.ready()


async def test_fewer_nodes_than_expected_are_not_ready() -> None:
    async with stack(1, wait=False) as s:
        s.scheduler.expected = 2
        s.scheduler.set_absent()

        async def one_of_two() -> bool:
            return await s.missing() == ["1 of 2 nodes serve"]

        await until(one_of_two)


async def test_metrics_count_requests_by_route_and_status(s: Stack) -> None:
    await s.chat()
    await s.chat(temperature=9)
    async with s.http.get(f"{s.url}/metrics") as r:
        text = await r.text()
    for line in (
        'upbeat_gateway_requests_total{route="/v1/chat/completions",status="200"}',
        'upbeat_gateway_requests_total{route="/v1/chat/completions",status="400"}',
        'upbeat_gateway_ttft_seconds_count{model="toy",route="/v1/chat/completions"}',
        'upbeat_gateway_tpot_seconds_count{model="toy",route="/v1/chat/completions"}',
        'upbeat_gateway_tokens_total{kind="prompt",model="toy"}',
        "upbeat_gateway_active_generations 0.0",
        "upbeat_gateway_worker_streams",
    ):
        assert line in text


async def test_the_fleet_is_shown_to_server_keys(s: Stack) -> None:
    status, fleet = await s.get("/v1/fleet")
    assert status == 200 and fleet["ready"] and fleet["expected_nodes"] == 2
    assert [(n["node"], n["serving"], n["connected"]) for n in fleet["nodes"]] == [
        ("node-0", True, True),
        ("node-1", True, True),
    ]
