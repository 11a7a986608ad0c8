"""Requests for models whose engine has HTTP of its own: what the engine and the caller get, and which session it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from fake_sidecar import CACHED_TOKENS, HTTP_MODEL, PROMPT_TOKENS, HttpStack, as_at_first, head_of, http_stack
from gateway_fakes import MODEL, Stack, stack, until

from contracts.v1 import scheduler_pb2 as pb
from gateway import metrics
from gateway.core.registry import Registered
from gateway.core.scopes import scope_of

TALK = [{"role": "user", "content": "hi"}]
#: By path: a body that its route takes, and whether it has turns of sessions.
BODIES: dict[str, tuple[dict[str, Any], bool]] = {
    "/v1/chat/completions": ({"messages": TALK}, True),
    "/v1/completions": (
        {"prompt": "Once upon a time, in a place far away from here, there lived a cat and a dog"},
        True,
    ),
    "/v1/embeddings": ({"input": ["a", "b"]}, False),
    "/tokenize": ({"prompt": "a"}, False),
    "/detokenize": ({"tokens": [1, 2]}, False),
}
TURNS = [path for path, (_, turn) in BODIES.items() if turn]
CALLS = [path for path, (_, turn) in BODIES.items() if not turn]


def body(path: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, **BODIES[path][0], **more}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[HttpStack]:
    async with http_stack() as running:
        yield running


@pytest.fixture
def s(shared: HttpStack) -> HttpStack:
    return as_at_first(shared)


# ---- what passes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_reaches_the_engine_and_its_answer_the_caller_byte_for_byte(s: HttpStack, path: str) -> None:
    sent = body(path, odd={"deep": [1, 2.5, None, "é\u2028"]}, seed=2**62)
    status, answer, headers = await s.raw(path, sent)
    (heard,) = s.heard
    assert (status, answer) == (200, s.sidecars[0]._whole(heard))
    assert heard.body == sent and heard.head.path == path and heard.head.model == MODEL
    assert heard.head.tenant == "default" and not heard.head.cache_salt and not heard.head.priority
    assert (list(heard.head.source_nodes), heard.head.kept_tokens) == (["node-9"], 900)
    assert headers["Content-Type"] == "application/json" and headers["X-Upbeat-Node"] == "node-0"
    assert headers["X-Request-Id"] == heard.head.request_id and headers["X-Upbeat-Why"] == "first free"
    assert "total;dur=" in headers["Server-Timing"] and "place;dur=" in headers["Server-Timing"]
    assert headers["Server"] == "upbeat" and ("X-Session-Id" in headers) is (path in TURNS)


@pytest.mark.parametrize("path", TURNS)
async def test_a_stream_passes_byte_for_byte(s: HttpStack, path: str) -> None:
    s.sidecars[0].call = ("look", '{"a": [1]}')
    status, answer, headers = await s.raw(path, body(path, stream=True))
    (heard,) = s.heard
    assert (status, answer) == (200, b"".join(s.sidecars[0]._events(heard)))
    assert headers["Content-Type"].startswith("text/event-stream") and headers["Cache-Control"] == "no-cache"
    assert "prepare;dur=" in headers["Server-Timing"] and "total" not in headers["Server-Timing"]


async def test_whatever_bytes_an_engine_answers_with_are_the_callers(s: HttpStack) -> None:
    pieces = [b"\x00\xff\xfe", b'{"not": json', bytes(range(256)) * 50]
    for kind in ("application/octet-stream", "application/json", "text/event-stream"):
        s.sidecars[0].answers = head_of(kind, retry_after="7", x_other="no"), pieces
        status, answer, headers = await s.raw("/v1/embeddings", body("/v1/embeddings"))
        assert (status, answer) == (200, b"".join(pieces))
        assert headers["Content-Type"] == kind and headers["Retry-After"] == "7" and "X-Other" not in headers


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_an_error_of_the_engine_passes_as_it_is(s: HttpStack, status: int) -> None:
    said = b'{"error": {"message": "no", "type": "BadRequest", "param": "top_p", "code": 400}}'
    s.sidecars[0].answers = head_of("application/json", status), [said]
    assert (await s.raw("/v1/chat/completions", body("/v1/chat/completions", stream=True)))[:2] == (status, said)
    assert len(s.heard) == 1, "it is the engine's answer, not a lost worker"


async def test_an_answer_without_a_body_is_one(s: HttpStack) -> None:
    s.sidecars[0].answers = head_of("application/json", 200), []
    assert (await s.raw("/v1/chat/completions", body("/v1/chat/completions")))[:2] == (200, b"")


async def test_an_engine_sees_the_callers_versions_and_none_of_its_secrets(s: HttpStack) -> None:
    await s.raw(
        "/v1/embeddings", body("/v1/embeddings"), Anthropic_Version="2023-06-01", Anthropic_Beta="tools",
        Authorization="Bearer k", X_Api_Key="k", X_Request_Id="r", X_Vllm_Priority="-5", X_data_parallel_rank="1",
        X_Session_Id="mine",
    )  # fmt: skip
    headers = s.heard[0].headers
    assert headers.pop("accept") == "*/*"
    assert headers == {"content-type": "application/json", "anthropic-version": "2023-06-01", "anthropic-beta": "tools"}


async def test_a_header_that_no_message_can_hold_is_refused_by_name(s: HttpStack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", s.config.gateway.port)
    data = json.dumps(body("/v1/embeddings")).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n".encode()
    head += b"Content-Type: application/json\r\nAnthropic-Beta: \xe9\xff\r\nConnection: close\r\n\r\n"
    writer.write(head + data)
    answer = await reader.read()
    writer.close()
    assert b"400 Bad Request" in answer and b"Anthropic-Beta" in answer and not s.heard


async def test_openais_own_client_reads_the_answers(s: HttpStack) -> None:
    s.sidecars[0].call = ("look", '{"a": 1}')
    client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", http_client=openai.DefaultAioHttpClient())
    async with client:
        whole = await client.chat.completions.create(model=MODEL, messages=TALK)
        assert whole.choices[0].message.content == "Hello my friend" and whole.usage.total_tokens == PROMPT_TOKENS + 3
        chunks = await client.chat.completions.create(model=MODEL, messages=TALK, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in chunks]) == "Hello my friend"
        found = await client.embeddings.create(model=MODEL, input="a", encoding_format="float")
        assert found.data[0].embedding == [0.5, -1.0]


# ---- who asks for what -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", BODIES)
async def test_what_names_kv_or_the_request_is_the_gateways_to_say(s: HttpStack, path: str) -> None:
    stolen = {"upbeat": {"tenant": "other", "session": "theirs"}}
    sent = body(
        path, kv_transfer_params=stolen, ec_transfer_params={"a": 1}, request_id="theirs", cache_salt="pepper",
        priority=3, session_id="s-1", vllm_xargs={"kv_transfer_params": "x", "top": 1},
    )  # fmt: skip
    assert (await s.raw(path, sent))[0] == 200
    (heard,) = s.heard
    taken = {"kv_transfer_params", "ec_transfer_params", "request_id", "cache_salt", "priority", "session_id"}
    assert not taken & heard.body.keys() and heard.body["vllm_xargs"] == {"top": 1} and b"theirs" not in heard.raw
    assert (heard.head.cache_salt, heard.head.priority) == (
        scope_of("", "pepper", per_user=False),
        3,
    ) and heard.head.request_id != "theirs"
    assert heard.head.session_id == "s-1" if path in TURNS else heard.head.session_id.startswith("one-")


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"priority": "high"}, "priority"),
        ("/v1/completions", {"session_id": "no good"}, "session_id"),
        ("/v1/embeddings", {"model": None}, "model"),
    ],
)
async def test_what_is_refused_is_named_and_no_engine_hears_of_it(
    s: HttpStack, path: str, more: dict[str, Any], param: str
) -> None:
    status, answer, _ = await s.raw(path, body(path) | more)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param) and not s.heard


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_model_does_not_exist_whatever_else_is_asked(s: HttpStack, path: str) -> None:
    status, answer, _ = await s.raw(path, body(path, odd=1) | {"model": "other"})
    assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found") and not s.heard


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("odd", [b"", b"[]", b"5", b"{", b'{"model": "toy", "n": 1e999}', b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused_as_everywhere(s: HttpStack, path: str, odd: bytes) -> None:
    status, answer, _ = await s.raw(path, odd)
    assert status == 400 and json.loads(answer)["error"]["message"] and not s.heard


@pytest.mark.parametrize("path", BODIES)
async def test_only_json_is_read(s: HttpStack, path: str) -> None:
    assert (await s.raw(path, body(path), Content_Type="text/plain"))[0] == 415
    assert (await s.raw(path, body(path), Content_Encoding="gzip"))[0] == 400 and not s.heard
    assert (await s.raw(path, body(path), Content_Type="application/ld+json"))[0] == 200
    assert s.heard[0].headers["content-type"] == "application/json", "which is what the engine reads"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/chat/completions/batch"), ("POST", "/sleep"),
        ("POST", "/reset_prefix_cache"), ("POST", "/v1/chat/completions/render"), ("POST", "/pooling"),
        ("POST", "/inference/v1/generate"), ("POST", "/collective_rpc"), ("GET", "/v1/messages"),
        ("POST", "/v1/messages/"), ("POST", "/v1/messages/batches"), ("POST", "/v1//responses"),
        ("POST", "/v1/responses/..%2f..%2fsleep"),
    ],
)  # fmt: skip
async def test_no_other_route_of_an_engine_can_be_reached(s: HttpStack, method: str, path: str) -> None:
    async with s.http.request(method, s.url + path, json=body("/v1/completions")) as answer:
        assert answer.status in (404, 405)
    assert not s.heard


# ---- sessions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", TURNS)
@pytest.mark.parametrize(
    ("more", "headers"),
    [
        ({"session_id": "s-1"}, {}),
        ({"prompt_cache_key": "s-1"}, {}),
        ({"agent_hint": {"session_id": "s-1"}}, {}),
        ({"session_id": "else"}, {"X_Session_Id": "s-1"}),
        ({}, {"X_Claude_Code_Session_Id": "s-1"}),
    ],
)
async def test_a_turn_belongs_to_the_session_that_it_states(
    s: HttpStack, path: str, more: dict[str, Any], headers: dict[str, str]
) -> None:
    _, _, said = await s.raw(path, body(path) | more, **headers)
    assert said["X-Session-Id"] == s.heard[0].head.session_id == s.scheduler.placed[0].session.session_id == "s-1"
    assert ("prompt_cache_key" in s.heard[0].body) is ("prompt_cache_key" in more), "OpenAI's own field passes"


def answered(path: str, answer: bytes, stream: bool) -> list[dict[str, Any]]:
    """What a client of this route keeps of an answer, to send it back."""
    if stream:
        found = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
        events = [json.loads(line) for line in found]
        choices = [event["choices"][0] for event in events]
        texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
        return [{"role": "assistant", "content": "".join(texts)}]
    whole = json.loads(answer)
    choice = whole["choices"][0]
    return [{"role": "assistant", "content": choice["text"] if "text" in choice else choice["message"]["content"]}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", TURNS)
async def test_a_conversation_that_names_no_session_stays_in_one(s: HttpStack, path: str, stream: bool) -> None:
    opening = f"{path} {stream}: tell me a story about a cat, a dog and the long way home from the sea"
    turn: dict[str, Any] = {"role": "user", "content": opening}
    field = {"/v1/completions": "prompt"}.get(path, "messages")

    async def ask(*turns: dict[str, Any]) -> tuple[bytes, str]:
        said = "".join(t["content"] for t in turns) if field == "prompt" else list(turns)
        _, answer, headers = await s.raw(path, {"model": MODEL, "max_tokens": 9, "stream": stream, field: said})
        return answer, headers["X-Session-Id"]

    for sidecar in s.sidecars:
        sidecar.tokens = [f"{path}{stream} and so on " * 9]
    answer, first = await ask(turn)
    again = (await ask(turn))[1]
    back = answered(path, answer, stream)
    second = (await ask(turn, *back, {"role": "user", "content": "go on"}))[1]
    other = (await ask(turn, {"role": "assistant", "content": "x" * 200}, {"role": "user", "content": "go on"}))[1]
    assert first.startswith("imp-") and again != first, "the same opening, another conversation"
    assert second == again and other != again, "what it continues, it continues by the last one that answered so"
    assert [h.head.session_id for h in s.heard] == [first, again, second, other]


async def test_a_call_belongs_to_no_session(s: HttpStack) -> None:
    for path in CALLS:
        for _ in range(2):
            assert "X-Session-Id" not in (await s.raw(path, body(path), X_Session_Id="s-1"))[2]
    names = [placed.session.session_id for placed in s.scheduler.placed]
    assert len(set(names)) == 2 * len(CALLS) and all(name.startswith("one-") for name in names)


async def test_a_turn_whose_conversation_cannot_be_read_is_the_engines_to_refuse(s: HttpStack) -> None:
    for odd in ({"messages": 5}, {"messages": []}, {"messages": [5, None]}):
        assert (await s.raw("/v1/chat/completions", {"model": MODEL, **odd}))[0] == 200
    assert [h.body["messages"] for h in s.heard] == [5, [], [5, None]]


# ---- hints, workflows, pins ------------------------------------------------------------------------------------------
async def test_hints_in_a_turn_are_sent_and_do_not_reach_the_engine(s: HttpStack) -> None:
    hints = {
        "nvext": {"agent_hints": {"osl": 77, "priority": 4, "speculative_prefill": True}},
        "kv_hints": {
            "protocol_version": "0.1",
            "actions": [{"action_id": "a", "action_type": "kv.prefetch", "payload": {"session_id": "planner"}}],
        },
    }
    assert (await s.raw("/v1/completions", body("/v1/completions", session_id="s-1") | hints))[0] == 200
    (heard,) = s.heard
    assert heard.head.expected_tokens == 77 and not {"nvext", "kv_hints"} & heard.body.keys()
    await until(lambda: len(s.scheduler.advised) == 2)
    assert [a.session.session_id for a in s.scheduler.advised] == ["planner", "s-1"]


async def test_no_hint_is_sent_after_a_turn_that_the_engine_refused(s: HttpStack) -> None:
    s.sidecars[0].answers = head_of("application/json", 400), [b"{}"]
    hint = {"nvext": {"agent_hints": {"speculative_prefill": True}}}
    assert (await s.raw("/v1/chat/completions", body("/v1/chat/completions") | hint))[0] == 400
    await asyncio.sleep(0.1)
    assert not s.scheduler.advised


async def test_a_turn_of_an_agent_takes_its_place_in_the_workflow(s: HttpStack) -> None:
    said = {"X_Upbeat_Workflow": "w", "X_Upbeat_Agent": "a", "X_Upbeat_Run": "r"}
    for stream in (False, True, False):
        await s.raw("/v1/chat/completions", body("/v1/chat/completions", stream=stream), **said)
    hops = [placed.hop for placed in s.scheduler.placed]
    ids = [h.head.request_id for h in s.heard]
    assert [(hop.workflow, hop.agent, hop.run) for hop in hops] == [("w", "a", "r")] * 3
    assert [list(hop.ended) for hop in hops] == [[], [ids[0]], [ids[1]]]
    await s.raw("/v1/embeddings", body("/v1/embeddings"), **said)
    assert not s.scheduler.placed[-1].hop.workflow, "a call is no turn of an agent"


async def test_a_pinned_node_runs_the_request(s: HttpStack) -> None:
    for path in BODIES:
        status, _, headers = await s.raw(path, body(path), X_Upbeat_Node="node-1")
        assert (status, headers["X-Upbeat-Node"]) == (200, "node-1")
    assert not s.sidecars[0].heard and len(s.sidecars[1].heard) == len(BODIES)
    status, answer, _ = await s.raw("/v1/completions", body("/v1/completions"), X_Upbeat_Node="node-7")
    assert (status, json.loads(answer)["error"]["code"]) == (400, "unknown_node")


# ---- times and metrics -----------------------------------------------------------------------------------------------
async def test_the_end_of_a_stream_says_where_its_time_went_if_asked(s: HttpStack) -> None:
    for path in TURNS:
        _, answer, _ = await s.raw(path, body(path, stream=True), X_Upbeat_Timing="1")
        before, comment = answer.split(b": server-timing ")
        assert b"total;dur=" in comment and comment.count(b"\n\n") == 2, "just before the last event"
        assert before.endswith(b"\n\n")


async def test_streams_count_for_their_models_targets(s: HttpStack) -> None:
    assert s.gateway.parts is not None
    parts, path = s.gateway.parts, "/v1/chat/completions"
    parts.fleet.registered[MODEL] = Registered(ttft_s=60.0, tpot_s=1e-9)
    await s.raw(path, body(path, stream=True, stream_options={"include_usage": True}))
    await s.raw(path, body(path))  # nothing is known of its first token
    await s.raw("/v1/embeddings", body("/v1/embeddings"))
    shown = parts.attainments.shown(MODEL)
    assert shown == {"ttft": {"turns": 1, "attained": 1}, "tpot": {"turns": 1, "attained": 0}}


async def test_turns_are_measured_and_counted(s: HttpStack) -> None:
    def value(name: str, **labels: str) -> float:
        return metrics.REGISTRY.get_sample_value(name, labels) or 0.0

    path = "/v1/chat/completions"

    def measured() -> list[float]:
        tokens = [value("upbeat_gateway_tokens_total", kind=k, model=MODEL) for k in ("prompt", "cached", "completion")]
        first = value("upbeat_gateway_ttft_seconds_count", route=path, model=MODEL)
        return [*tokens, first, value("upbeat_gateway_requests_total", route=path, status="200")]

    before = measured()
    await s.raw(path, body(path, stream=True, stream_options={"include_usage": True}))
    await s.raw(path, body(path))
    gained = [b - a for a, b in zip(before, measured(), strict=True)]
    assert gained == [2 * PROMPT_TOKENS, 2 * CACHED_TOKENS, 6, 1, 2]
    assert s.gateway.parts is not None and s.gateway.parts.generator.running == 0
    last = s.heard[-1].head.request_id
    await until(lambda: any(turn.request_id == last for m in s.scheduler.timed for turn in m.turns))


# ---- models of both kinds --------------------------------------------------------------------------------------------
async def test_a_native_model_has_none_of_an_engines_own_routes() -> None:
    async with stack(1) as native:
        status, answer, _ = await native.post("/v1/embeddings", body("/v1/embeddings"))
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "model", "unsupported_operation")


async def test_before_any_node_has_it_the_configuration_says_how_a_model_is_reached() -> None:
    models = {
        MODEL: {"path": "/m/toy", "nodes": [0]},
        "asleep": {"path": "/m/other", "engine": "vllm", "nodes": [1]},
    }
    async with stack(2, models=models, wait=False) as native:
        assert native.gateway.parts is not None
        fleet = native.gateway.parts.fleet
        await until(lambda: fleet.view is not None)
        assert fleet.relays
        status, answer, _ = await native.chat(odd=1)
        assert (status, answer["error"]["code"]) == (400, "unknown_parameter"), "the native model is as strict as ever"
        assert (await native.chat())[0] == 200
        fleet._retry_limits = native.gateway._retry_limits
        asked = body("/v1/embeddings") | {"model": "asleep", "priority": "high"}
        status, answer, _ = await native.post("/v1/embeddings", asked)
        assert (status, answer["error"]["param"]) == (400, "priority"), "and this one has the engine's routes"


async def test_what_a_node_says_of_a_model_counts_more_than_the_configuration() -> None:
    async with stack(1, models={MODEL: {"path": "/m/toy", "engine": "vllm"}}) as native:
        assert (await native.chat())[0] == 200
        assert (await native.post("/v1/embeddings", body("/v1/embeddings")))[0] == 400


async def test_a_model_may_become_one_with_http_of_its_own_while_the_gateway_runs(s: HttpStack) -> None:
    async def wires(running: Stack, model: pb.ModelInfo) -> None:
        running.scheduler.model = model
        running.scheduler.set_absent()
        fleet = running.gateway.parts.fleet
        await until(lambda: fleet.relays is (model.wire == pb.MODEL_WIRE_HTTP))

    native = pb.ModelInfo(name=MODEL, max_tokens=2000)
    await wires(s, native)
    assert (await s.raw("/v1/embeddings", body("/v1/embeddings")))[0] == 400
    await wires(s, HTTP_MODEL)
    assert (await s.raw("/v1/embeddings", body("/v1/embeddings")))[0] == 200
