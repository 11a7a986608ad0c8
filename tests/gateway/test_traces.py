"""Spans of a request at the gateway, what other services are told of its trace, and its id."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_sidecar import HTTP_MODEL, as_at_first, http_stack
from gateway_fakes import MODEL, Stack, stack, until

from contracts.errors import Unavailable
from contracts.trace_context import from_wire
from runtime.spans import Kind, Span
from tests.traced import SAMPLED, SPAN_ID, TRACE_ID, UNSAMPLED, Recorder, is_below, recording

FIRST, LAST = {"queue": 0.001, "load-ssd": 0.002}, {"decode": 0.001}
SECRET_TEXT = "the patient's name is Morgenstern"
SESSION = {"X-Session-Id": "very-private-session"}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        for worker in running.workers:
            worker.times = FIRST, LAST
            worker.cached_tokens = 3
        yield running


@pytest.fixture
def spans() -> Iterator[Recorder]:
    with recording() as made:
        yield made


def everything(spans: list[Span]) -> str:
    return json.dumps([[span.name, span.attributes, span.error, list(span.events)] for span in spans], default=repr)


async def test_a_chat_is_one_span_with_its_way_in_and_its_placement_below(s: Stack, spans: Recorder) -> None:
    status, answer, headers = await s.chat(SECRET_TEXT, headers=SESSION, max_tokens=4, temperature=0.5)
    assert status == 200
    server, admit, place = spans.one(f"chat {MODEL}"), spans.one("admit"), spans.one("place")
    assert server.kind is Kind.SERVER and not server.parent_id and not server.error
    assert is_below(admit, server) and is_below(place, server)
    assert server.began_s == admit.began_s <= admit.ended_s == place.began_s <= place.ended_s <= server.ended_s
    told = server.attributes
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 4
    assert told["gen_ai.usage.cache_read.input_tokens"] == 3
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.request.temperature"] == 0.5 and told["gen_ai.request.max_tokens"] == 4
    assert told["http.route"] == "/v1/chat/completions" and told["http.request.method"] == "POST"
    assert told["upbeat.request_id"] == headers["X-Request-Id"] == answer["id"]
    assert told["upbeat.node"] == "node-0" and told["upbeat.tenant"] == "default"
    assert re.fullmatch("#[0-9a-f]{16}", told["gen_ai.conversation.id"])  # type: ignore[arg-type]
    assert 0 < told["upbeat.time.queue"] <= 0.001 and "upbeat.time.place" in told  # type: ignore[operator]
    [(name, at_s)] = server.events
    assert name == "first token" and at_s - server.began_s == told["gen_ai.response.time_to_first_chunk"]
    assert (place.kind, place.attributes["upbeat.placed_by"]) == (Kind.CLIENT, "scheduler")
    assert place.attributes["upbeat.why"] == "first\nfree" and place.attributes["upbeat.node"] == "node-0"


async def test_scheduler_and_worker_are_told_of_the_trace(s: Stack, spans: Recorder) -> None:
    await s.chat(headers={"traceparent": SAMPLED, "tracestate": "a=1", "baggage": "user=alice"})
    server, place = spans.one(f"chat {MODEL}"), spans.one("place")
    assert (server.context.trace_id, server.parent_id, server.context.state) == (TRACE_ID, SPAN_ID, "a=1")
    assert from_wire(s.scheduler.placed[0].trace) == place.context
    assert from_wire(s.workers[0].submitted[0].trace) == server.context
    assert "alice" not in everything(spans.spans) + repr(s.scheduler.placed) + repr(s.workers[0].submitted)


async def test_no_text_no_session_and_no_key_is_in_any_span(s: Stack, spans: Recorder) -> None:
    await s.chat(SECRET_TEXT, headers=SESSION, user="alice@example.com")
    await s.chat("x" * 100_000, headers=SESSION)
    await s.post("/v1/advisory", {"session_id": SESSION["X-Session-Id"]})
    assert len(spans.named(f"chat {MODEL}")) == 2 and spans.named("advise")
    told = everything(spans.spans)
    for secret in ("Morgenstern", SESSION["X-Session-Id"], "alice", "xxxx"):
        assert secret not in told


@pytest.mark.parametrize("body", [{"stream": True}, {"n": 2}, {}])
async def test_every_form_of_an_answer_is_traced(s: Stack, spans: Recorder, body: dict[str, Any]) -> None:
    request = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 3, **body}
    async with s.http.post(f"{s.url}/v1/completions", json=request) as r:
        await r.read()
    server = spans.one(f"text_completion {MODEL}")
    choices = 2 * request.get("n", 1)
    assert server.attributes["gen_ai.response.finish_reasons"] == ["length"] * choices
    assert server.attributes["gen_ai.usage.output_tokens"] == 3 * choices
    assert len(spans.named("place")) == choices and len(spans.named("admit")) == 1
    assert all(is_below(place, server) for place in spans.named("place"))


async def test_a_request_that_moved_says_so_and_one_that_failed_too(s: Stack, spans: Recorder) -> None:
    s.workers[0].die_after = 2
    await s.chat(max_tokens=6)
    assert [name for name, _ in spans.one(f"chat {MODEL}").events] == ["retry: worker lost", "first token"]
    assert [p.attributes["upbeat.node"] for p in spans.named("place")] == ["node-0", "node-1"]
    assert from_wire(s.workers[1].submitted[0].trace) == spans.one(f"chat {MODEL}").context
    spans.spans.clear()
    for worker in s.workers:
        worker.refuse = Unavailable("no")
    status, _, _ = await s.chat()
    failed = spans.one(f"chat {MODEL}")
    assert status == 503 and failed.error and failed.attributes["error.type"] == "503"
    spans.spans.clear()
    for worker in s.workers:
        worker.refuse = None
    status, _, _ = await s.chat("x" * 100_000)
    refused = spans.one(f"chat {MODEL}")
    assert status == 400 and not refused.error and refused.attributes["error.type"] == "400"


async def test_a_caller_that_leaves_ends_its_span(s: Stack, spans: Recorder) -> None:
    s.workers[0].token_s = 0.05
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 500}
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
        await r.content.readline()
    await until(lambda: bool(spans.named(f"chat {MODEL}")))
    assert "gen_ai.response.finish_reasons" not in spans.one(f"chat {MODEL}").attributes


# ---- which requests ----------------------------------------------------------------------------------------------
async def test_a_callers_flag_forces_nothing(s: Stack) -> None:
    with recording(ratio=0.0) as spans:
        await asyncio.gather(*(s.chat(headers={"traceparent": SAMPLED}) for _ in range(5)))
        assert not spans.spans
        assert not any(p.trace for p in s.scheduler.placed) and not any(r.trace for r in s.workers[0].submitted)
    with recording(ratio=0.0, follow=["default"], per_s=1.0) as spans:
        await asyncio.gather(*(s.chat(headers={"traceparent": SAMPLED}) for _ in range(8)))
        await s.chat(headers={"traceparent": UNSAMPLED})
        assert 2 <= len(spans.named(f"chat {MODEL}")) < 8, "followed, within the bound"


@pytest.mark.parametrize("bad", ["", "00-zz", SAMPLED + "-x", "00-" + "0" * 32 + "-" + SPAN_ID + "-01"])
async def test_a_bad_context_is_no_error_and_is_not_passed_on(s: Stack, spans: Recorder, bad: str) -> None:
    status, _, _ = await s.chat(headers={"traceparent": bad, "tracestate": "a=1"})
    assert status == 200
    server = spans.one(f"chat {MODEL}")
    assert not server.parent_id and not server.context.state and server.context.trace_id != TRACE_ID


async def test_without_traces_nothing_is_told(s: Stack) -> None:
    await s.chat(headers={"traceparent": SAMPLED})
    await s.post("/v1/advisory", {"session_id": "a"}, headers={"traceparent": SAMPLED})
    await until(lambda: bool(s.scheduler.advised))
    assert not s.scheduler.placed[0].trace and not s.workers[0].submitted[0].trace and not s.scheduler.advised[0].trace


# ---- hints -------------------------------------------------------------------------------------------------------
async def test_a_turn_is_linked_to_its_hint_and_traced_because_the_hint_is(s: Stack) -> None:
    s.scheduler.route_hints, s.scheduler.echoes_traces = 1, True
    with recording() as spans:
        status, answer, _ = await s.post("/v1/advisory", {"session_id": "chat-7"})
        assert status == 202
        await until(lambda: len(s.gateway.parts.fleet.route_hints) == 1)  # type: ignore[union-attr]
        hint = spans.one("advise")
        assert from_wire(s.scheduler.advised[0].trace) == hint.context and hint.kind is Kind.SERVER
        assert hint.attributes["upbeat.advisory_ids"] == [answer["advisory_id"]]
        spans._sampler._ratio = 0.0  # the turn would not be traced by itself
        await s.chat(headers={"X-Session-Id": "chat-7"})
        turn, place = spans.one(f"chat {MODEL}"), spans.one("place")
        assert list(turn.links) == [hint.context] and turn.context.trace_id != hint.context.trace_id
        assert place.attributes["upbeat.placed_by"] == "hint" and is_below(place, turn)
        assert from_wire(s.workers[1].submitted[0].trace) == turn.context
        assert turn.attributes["gen_ai.conversation.id"] == hint.attributes["gen_ai.conversation.id"]
        await until(lambda: any(p.taken for p in s.scheduler.placed))
        assert from_wire(s.scheduler.placed[0].trace) == turn.context


# ---- engines with HTTP of their own ------------------------------------------------------------------------------
async def test_a_relayed_answer_is_traced_and_its_engine_gets_none_of_the_callers_headers(spans: Recorder) -> None:
    async with http_stack() as running:
        s = as_at_first(running)
        body = {"model": HTTP_MODEL.name, "messages": [{"role": "user", "content": SECRET_TEXT}], "stream": True}
        headers = {"traceparent": SAMPLED, "tracestate": "a=1", "baggage": "b=c", "X-Request-Id": "their-id"}
        async with s.http.post(f"{s.url}/v1/chat/completions", json=body, headers=headers) as r:
            await r.read()
            assert r.headers["X-Request-Id"] == "their-id"
        (heard,) = s.heard
        server = spans.one(f"chat {MODEL}")
        assert from_wire(heard.head.trace) == server.context and server.parent_id == SPAN_ID
        assert not {"traceparent", "tracestate", "baggage"} & heard.headers.keys()
        assert heard.head.request_id == server.attributes["upbeat.request_id"]
        assert heard.head.request_id.endswith("/their-id")
        assert "Morgenstern" not in everything(spans.spans)
        assert "gen_ai.response.time_to_first_chunk" in server.attributes


# ---- ids ---------------------------------------------------------------------------------------------------------
async def test_a_callers_id_is_part_of_the_turns_and_is_what_its_answer_says(s: Stack) -> None:
    _, answer, headers = await s.chat(headers={"X-Request-Id": "order-66:a.b"})
    [submitted], [placed] = s.workers[0].submitted, s.scheduler.placed
    assert headers["X-Request-Id"] == "order-66:a.b" and re.fullmatch("chatcmpl-[0-9a-f]{24}", answer["id"])
    assert submitted.request_id == placed.request_id == f"{answer['id']}/order-66:a.b-0"


async def test_two_requests_with_one_id_are_two(s: Stack) -> None:
    answers = await asyncio.gather(*(s.chat(headers={"X-Request-Id": "same"}) for _ in range(4)))
    assert [status for status, _, _ in answers] == [200] * 4
    submitted = [r.request_id for w in s.workers for r in w.submitted]
    assert len(set(submitted)) == 4 and all("/same-" in request_id for request_id in submitted)


@pytest.mark.parametrize("theirs", ["", "a/b", "x" * 65, "a b", "é", '"}{', "a\tb"])
async def test_an_id_that_is_not_sane_is_ignored(s: Stack, theirs: str) -> None:
    _, answer, headers = await s.chat(headers={"X-Request-Id": theirs})
    assert headers["X-Request-Id"] == answer["id"] and "/" not in s.workers[0].submitted[0].request_id


async def test_every_answer_has_an_id_errors_included(s: Stack) -> None:
    for path, headers in (("/health", {}), ("/v1/nothing", {}), ("/v1/models", {"X-Request-Id": "mine"})):
        async with s.http.get(s.url + path, headers=headers) as r:
            assert re.fullmatch("req-[0-9a-f]{24}|mine", r.headers["X-Request-Id"]), path
    status, _, headers = await s.chat("x" * 100_000, headers={"X-Request-Id": "mine"})
    assert (status, headers["X-Request-Id"]) == (400, "mine")
    status, _, headers = await s.chat("x" * 100_000)
    assert headers["X-Request-Id"].startswith("chatcmpl-"), "the id that logs have"
