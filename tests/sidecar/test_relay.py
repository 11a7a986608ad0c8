"""Requests through a sidecar, over real gRPC, to a server that answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from contracts.http_flights import MESSAGE_BYTES
from contracts.v1 import worker_pb2 as pb
from runtime.config_file import cluster_secret
from sidecar.core.fields import salt_of
from tests.sidecar.fake_vllm import FIELDS, KEY, FakeVllm, Seen, aborted, json_answer, serving, streamed
from tests.sidecar.node import LIMIT_S, Answer, Node

Made = tuple[Node, FakeVllm]
Make = Callable[..., Any]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def outcomes(node: Node) -> dict[str, int]:
    return dict(node.sidecar.handler.relay.tally.outcomes)


# ---- the way there and back ------------------------------------------------------------------------------------------
async def test_a_request_arrives_with_our_fields_and_its_answer_comes_back(node: Made) -> None:
    sidecar, server = node
    answer = await sidecar.ask(
        {"model": "m", "messages": []},
        session_id="chat-7",
        priority=-2,
        source_nodes=["node-1"],
        cache_salt="own",
        headers=[pb.HttpHeader(name="accept", value="a/b"), pb.HttpHeader(name="x-request-id", value="theirs")],
    )
    assert (answer.status, json.loads(answer.body)["choices"][0]["message"]["content"]) == (200, "hello")
    told = {h.name: h.value for h in answer.heads[0].headers}
    assert told["content-type"].startswith("application/json") and told["x-their-own"] == "1"
    assert "content-length" not in told and "server" not in told
    (seen,) = server.seen
    ours = {"session": "chat-7", "tenant": "default", "priority": -2, "sources": ["node-1"]}
    assert seen.body == {
        "model": "m",
        "messages": [],
        "kv_transfer_params": {"upbeat": ours},
        "cache_salt": salt_of(cluster_secret(sidecar.config.data), "default", "own"),
        "priority": -2,
        "request_id": "r-1",
    }
    assert seen.headers["authorization"] == f"Bearer {KEY}" and seen.headers["x-request-id"] == "r-1"
    assert seen.headers["accept"] == "a/b" and seen.headers["accept-encoding"] == "identity"
    assert seen.headers["content-type"] == "application/json" and seen.headers["x-vllm-priority"] == "-2"
    assert not seen.headers.keys() & {"user-agent", "cookie"}
    assert outcomes(sidecar) == {"answered": 1}


@pytest.mark.parametrize("path", [path for path in FIELDS if path != "/v1/load_lora_adapter"])
async def test_every_route_that_is_passed_on_gets_the_fields_that_it_reads(node: Made, path: str) -> None:
    sidecar, server = node
    assert (await sidecar.ask({"a": 1}, path=path)).status == 200
    (seen,) = server.seen
    assert seen.path == path and set(seen.body) == {"a", *FIELDS[path][0]}


async def test_a_callers_field_does_not_replace_ours(node: Made) -> None:
    sidecar, server = node
    forged = {"cache_salt": "forged", "priority": -1000, "kv_transfer_params": {"upbeat": {"tenant": "other"}}}
    await sidecar.ask(forged, tenant="acme")
    (seen,) = server.seen
    assert seen.body["cache_salt"] == salt_of(cluster_secret(sidecar.config.data), "acme", "")
    assert seen.body["kv_transfer_params"]["upbeat"]["tenant"] == "acme" and seen.body["priority"] == 0


async def test_a_body_in_pieces_is_put_together(node: Made) -> None:
    sidecar, server = node
    big = json.dumps({"text": "x" * 3_000_000}).encode()
    pieces = [big[i : i + 100_000] for i in range(0, len(big), 100_000)]
    assert (await sidecar.ask(pieces=pieces)).status == 200
    assert server.seen[0].body["text"] == "x" * 3_000_000
    assert sidecar.sidecar.handler.relay.tally.held_bytes == 0


async def test_an_answer_comes_piece_by_piece_as_the_server_says_it(node: Made) -> None:
    sidecar, server = node
    go = [asyncio.Event() for _ in range(3)]
    server.answer = streamed("one", "two", "[DONE]", wait=lambda n: go[n].wait())  # type: ignore[arg-type,return-value]
    call = sidecar.call()
    answer = Answer()
    for number in range(3):
        go[number].set()
        async with asyncio.timeout(LIMIT_S):
            while len(answer.pieces) <= number:
                answer.take(await call.read())
        if number < 2:
            (flight,) = sidecar.sidecar.flights
            assert flight.answering and flight.produced == number + 1
    assert answer.pieces == [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"]
    assert (await call.read()).end


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_an_error_of_a_living_server_is_passed_as_it_is(node: Made, status: int) -> None:
    sidecar, server = node

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status)

    server.answer = answer
    answered = await sidecar.ask()
    assert (answered.status, json.loads(answered.body)) == (status, {"error": {"message": "no"}})


async def test_a_redirect_is_not_followed(node: Made) -> None:
    sidecar, server = node

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/v1/load_lora_adapter")

    server.answer = answer
    assert (await sidecar.ask()).status == 307 and len(server.seen) == 1


async def test_an_empty_answer_has_a_head_and_no_body(node: Made) -> None:
    sidecar, server = node

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(status=204)

    server.answer = answer
    answered = await sidecar.ask()
    assert (answered.status, answered.pieces) == (204, [])


async def test_the_server_is_read_only_as_fast_as_the_gateway_takes(node: Made) -> None:
    sidecar, server = node
    written = 0

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(4000):
            await response.write(b"x" * 65_536)
            written += 65_536
        return response

    server.answer = answer
    call = sidecar.call()
    call.grants = False
    await call.read()
    stuck = -1
    while written != stuck:
        stuck = written
        await asyncio.sleep(0.5)
    assert stuck < 64 << 20, "of a quarter of a gigabyte, what lies in buffers"
    call.cancel()
    await until(lambda: server.seen[0].cancelled)


# ---- ending ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before the head", "within the answer"])
async def test_a_call_that_ends_ends_the_request_on_the_server(node: Made, when: str) -> None:
    sidecar, server = node
    never = asyncio.Event()

    async def wait(number: int) -> None:
        if number == (0 if when == "before the head" else 1):
            await never.wait()

    server.answer = streamed("one", "two", wait=wait)
    call = sidecar.call()
    await until(lambda: bool(server.seen))
    if when == "within the answer":
        await call.read()
    call.cancel()
    await until(lambda: server.seen[0].cancelled)
    await until(lambda: not len(sidecar.sidecar.flights))
    assert outcomes(sidecar) == {"cancelled": 1}


async def test_a_gateway_that_dies_ends_its_requests(node: Made) -> None:
    sidecar, server = node
    server.answer = streamed("one", "two", wait=lambda n: asyncio.sleep(1000 * n))
    asked = [sidecar.call(request_id=f"r-{n}") for n in range(3)]
    for call in asked:
        await call.read()
    await sidecar.channel.close()
    await until(lambda: all(seen.cancelled for seen in server.seen) and not len(sidecar.sidecar.flights))
    assert len(server.seen) == 3 and outcomes(sidecar) == {"cancelled": 3}


# ---- failures --------------------------------------------------------------------------------------------------------
async def test_a_server_that_is_not_up_had_nothing(make_node: Make) -> None:
    node, _ = await make_node(server=None)
    status, message, ran, only = (await node.ask()).failure
    assert (status, ran, only) == (503, False, False) and "does not serve" in message


async def test_a_server_that_went_away_unnoticed_had_nothing(node: Made) -> None:
    sidecar, server = node
    await server.die()
    status, message, ran, only = (await sidecar.ask()).failure
    assert (status, ran, only) == (503, False, False) and "cannot be reached" in message
    assert outcomes(sidecar) == {"unreached": 1}
    await until(lambda: not sidecar.sidecar.watching.up)


async def test_a_connection_that_is_lost_before_the_answer_may_have_run(node: Made) -> None:
    sidecar, server = node
    server.answer = aborted()
    answer = await sidecar.ask()
    status, message, ran, only = answer.failure
    assert (status, ran, only, answer.heads) == (503, True, True, []) and "closed the connection" in message
    assert outcomes(sidecar) == {"lost": 1}


async def test_a_head_without_a_byte_of_the_answer_is_not_passed_on(node: Made) -> None:
    sidecar, server = node

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0.1)
        assert request.transport is not None
        request.transport.abort()
        return response

    server.answer = answer
    answered = await sidecar.ask()
    assert answered.heads == [] and answered.failure[2:] == (True, True), "another node can answer instead"


async def test_a_connection_that_is_lost_within_the_answer_ends_with_a_failure(node: Made) -> None:
    sidecar, server = node
    server.answer = aborted("one", "two")
    answer = await sidecar.ask()
    assert answer.body == b"data: one\n\ndata: two\n\n" and answer.failure[2:] == (True, True)


async def test_requests_that_are_lost_together_were_not_alone(node: Made) -> None:
    sidecar, server = node
    server.answer = streamed("one", wait=lambda n: asyncio.sleep(1000))
    asked = [asyncio.ensure_future(sidecar.ask(request_id=f"r-{n}")) for n in range(3)]
    await until(lambda: len(server.seen) == 3)
    await server.die()
    for answer in await asyncio.gather(*asked):
        assert answer.failure[2:] == (True, False)


@pytest.mark.parametrize("how", ["a 500", "a stream that begins with an error"])
async def test_an_error_of_a_server_whose_engine_is_dead_is_a_failure(node: Made, how: str) -> None:
    sidecar, server = node

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        server.engine_is_dead = True
        if how == "a 500":
            return web.json_response({"error": {"message": "EngineCore died"}}, status=500)
        return await streamed('{"error": {"message": "EngineCore died"}}', "[DONE]")(request, seen)

    server.answer = answer
    answered = await sidecar.ask()
    assert answered.heads == [] and answered.failure[2:] == (True, True) and "engine" in answered.failure[1]
    assert not sidecar.sidecar.watching.up


async def test_a_stream_that_begins_with_an_error_of_a_living_engine_is_passed_on(node: Made) -> None:
    sidecar, server = node
    server.answer = streamed('{"error": {"message": "too long"}}', "[DONE]")
    answered = await sidecar.ask()
    assert answered.status == 200 and b"too long" in answered.body


async def test_a_server_that_died_serves_again_when_it_is_back(node: Made) -> None:
    sidecar, server = node
    await server.die()
    await until(lambda: not sidecar.sidecar.watching.up)
    async with serving(server.place) as again:
        await until(lambda: sidecar.sidecar.watching.up)
        assert (await sidecar.ask()).status == 200 and len(again.seen) == 1


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head", "status", "why"),
    [
        ({"path": "/v1/load_lora_adapter"}, 404, "not passed"),
        ({"path": "/v1/chat/completions/../../metrics"}, 404, "not passed"),
        ({"path": "/v1/embeddings"}, 400, "no POST /v1/embeddings"),
        ({"model": "other"}, 503, "serves m"),
        ({"tenant": ""}, 400, "tenant"),
        ({"tenant": "t" * 300}, 400, "tenant"),
        ({"session_id": "a b"}, 400, "session_id"),
        ({"request_id": "a\r\nx: y"}, 400, "request_id"),
        ({"headers": [pb.HttpHeader(name="accept", value="a\r\nx: y")]}, 400, "header"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_never_sent(
    node: Made, head: dict[str, Any], status: int, why: str
) -> None:
    sidecar, server = node
    failure = (await sidecar.ask(**head)).failure
    assert (failure[0], failure[2:]) == (status, (False, False)) and why in failure[1]
    assert not server.seen and outcomes(sidecar) == {"refused": 1}


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff\xfe{\x00}\x00"])
async def test_a_body_that_is_no_object_is_refused(node: Made, body: bytes) -> None:
    sidecar, server = node
    assert (await sidecar.ask(body)).failure[0] == 400 and not server.seen


async def test_a_body_that_is_too_large_is_refused_and_given_back(make_node: Make) -> None:
    node, server = await make_node({"gateway": {"max_body_bytes": 10_000}})
    assert (await node.ask({"x": "y" * 1000})).status == 200
    failure = (await node.ask(pieces=[b"{" + b" " * 900_000, b" " * 900_000 + b"}"])).failure
    assert failure[0] == 413 and "gateway.max_body_bytes" in failure[1]
    with pytest.raises(ConnectionError):
        await node.ask(pieces=[b"x" * MESSAGE_BYTES])
    assert len(server.seen) == 1 and node.sidecar.handler.relay.tally.held_bytes == 0


async def test_bodies_together_take_no_more_memory_than_is_configured(make_node: Make) -> None:
    settings = {"gateway": {"max_body_bytes": 600_000, "body_memory_bytes": 1 << 20}}
    node, _ = await make_node(settings)
    held = [node.http.begin(request_id=f"r-{n}") for n in range(2)]
    for asking in held:
        asking.send(b"{" + b" " * 590_000, last=False)
    tally = node.sidecar.handler.relay.tally
    await until(lambda: tally.held_bytes > 1_100_000)
    failure = (await node.ask(b"{" + b" " * 590_000 + b"}")).failure
    assert failure[0] == 503 and "gateway.body_memory_bytes" in failure[1]
    for asking in held:
        asking.send(b"}")
        assert (await asking.whole()).status == 200
    assert tally.held_bytes == 0


async def test_a_body_that_does_not_come_gives_up_its_place(node: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar, _ = node
    monkeypatch.setattr("sidecar.calls.BODY_S", 0.2)
    asking = sidecar.http.begin(path="/tokenize")
    asking.send(b"{", last=False)
    assert (await asking.whole()).failure[0] == 408 and not len(sidecar.sidecar.flights)
    assert sidecar.sidecar.handler.relay.tally.held_bytes == 0


async def test_more_requests_than_may_wait_are_refused(make_node: Make) -> None:
    node, server = await make_node({"worker": {"max_waiting": 2}})
    go = asyncio.Event()

    async def wait(number: int) -> None:
        await go.wait()

    server.answer = streamed("one", wait=wait)
    asked = [asyncio.ensure_future(node.ask(request_id=f"r-{n}")) for n in range(2)]
    await until(lambda: len(server.seen) == 2)
    failure = (await node.ask(request_id="r-3")).failure
    assert failure[0] == 503 and "worker.max_waiting" in failure[1] and not failure[2]
    go.set()
    assert [answer.status for answer in await asyncio.gather(*asked)] == [200, 200]
    server.answer = json_answer
    assert (await node.ask()).status == 200


async def test_a_route_without_a_salt_is_refused_where_there_are_several_tenants(make_node: Make) -> None:
    keys = [{"key": "key-of-one-tenant", "tenant": "one"}, {"key": "key-of-two-tenant", "tenant": "two"}]
    fields = FIELDS | {"/v1/embeddings": [["priority"]]}
    node, server = await make_node({"gateway": {"api_keys": keys}}, {"fields": fields})
    failure = (await node.ask(path="/v1/embeddings", tenant="one")).failure
    assert failure[0] == 400 and "several tenants" in failure[1] and not server.seen
    assert (await node.ask(path="/tokenize", tenant="one")).status == 200, "it computes nothing"
    assert (await node.ask(path="/v1/completions", tenant="one")).status == 200


# ---- what the server can do ------------------------------------------------------------------------------------------
async def test_a_server_that_does_not_schedule_by_priority_is_told_none(make_node: Make) -> None:
    node, server = await make_node(server={"takes_priority": False})
    await node.ask(priority=-5)
    (seen,) = server.seen
    assert "priority" not in seen.body and "x-vllm-priority" not in seen.headers


async def test_a_server_without_the_connector_is_not_told_of_sessions(make_node: Make) -> None:
    node, server = await make_node(server={"connector": False})
    assert not node.sidecar.watching.transfers
    await node.ask(session_id="s")
    assert "kv_transfer_params" not in server.seen[0].body and "cache_salt" in server.seen[0].body


async def test_without_a_cache_no_server_is_told_of_sessions(make_node: Make) -> None:
    node, server = await make_node({"kv": {"cache": False}})
    await node.ask(session_id="s")
    assert "kv_transfer_params" not in server.seen[0].body


async def test_a_server_without_figures_serves(make_node: Make) -> None:
    node, server = await make_node(server={"has_figures": False})
    assert node.sidecar.watching.sample is None and node.sidecar.watching.transfers
    assert (await node.ask()).status == 200 and "kv_transfer_params" in server.seen[0].body


async def test_a_refusal_reaches_a_caller_who_still_sends(node: Made) -> None:
    sidecar, server = node
    for _ in range(20):
        asking = sidecar.call(pieces=[b" " * (1 << 20)] * 15 + [b"{}"], path="/v1/admin")
        status, message, ran, _ = (await asking.whole()).failure
        assert (status, ran) == (404, False) and "not passed" in message
    assert (await sidecar.ask()).status == 200 and asking.downs.empty(), "what else came of it is dropped"
    assert len(server.seen) == 1
