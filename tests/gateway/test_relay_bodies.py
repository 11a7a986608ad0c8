"""What of a body reaches an engine with HTTP of its own, and whether a body goes there at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import BodyTooLarge, Forbidden, InvalidRequest, NotFound, RateLimited, Unauthorized, Unavailable
from contracts.models import ModelWire
from gateway.asked_wire import decode_answer, decode_question, encode_answer, encode_question
from gateway.core.relay_bodies import TAKEN_OUT, TAKEN_OUT_OF_XARGS, Relayed, relayed
from gateway.core.relay_headers import down, is_events, up
from gateway.core.relay_routes import APIS, OWN_KINDS, RelayKind, error_body, is_anthropic, is_relayed
from gateway.core.spellings import ROOTS
from gateway.openai.asked import Asked, Told, ask

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HTTP = {"m": ModelWire.HTTP, "n": ModelWire.FRAMES}


def made(kind: RelayKind = "chat", tenant: str = "t", headers: dict[str, str] | None = None, **fields: Any) -> Relayed:
    base = CHAT if kind == "chat" else {"model": "m"}
    return relayed(kind, {**base, **fields}, tenant, headers or {}, named=False)


def passed(kind: RelayKind = "chat", **fields: Any) -> Any:
    """What the engine gets of these fields."""
    sent = json.loads(made(kind, **fields).body)
    return {name: sent[name] for name in sent.keys() & fields.keys()}


def refused(kind: RelayKind = "chat", **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        made(kind, **fields)
    return error.value


# ---- what passes -----------------------------------------------------------------------------------------------------
ODD = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": {}, "x-odd": None}}}],
    "structured_outputs": {"choice": ["a", "b"]},
    "chat_template_kwargs": {"enable_thinking": False},
    "a_field_of_tomorrow": {"deep": [1, [2, {"three": None}]]},
    "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    ],
    "logit_bias": {"50256": -100},
    "seed": 2**63 - 1,
    "user": "é\u2028\u0000",
    "stop": [],
    "reasoning_effort": "high",
    "vllm_xargs": {"ngram_size": 3},
    "cache_control": {"type": "ephemeral"},
    "metadata": {"user_id": "u"},
}


@pytest.mark.parametrize("name", ODD)
def test_a_field_passes_as_it_is(name: str) -> None:
    assert passed(**{name: ODD[name]}) == {name: ODD[name]}


def test_the_order_of_fields_stays() -> None:
    assert list(json.loads(made(z=1, a=2, kv_transfer_params={}).body)) == [*CHAT, "z", "a"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_whatever_json_a_caller_sends_is_what_the_engine_reads(value: Any) -> None:
    body = json.dumps({**CHAT, "further": value}).encode()
    sent = ask("chat", body, Told("t", False, {}, {}, wires=HTTP))
    assert isinstance(sent, Relayed)
    further = json.loads(sent.body)["further"]
    assert further == value and json.dumps(further) == json.dumps(value), "1 and 1.0 and true are three"


@pytest.mark.parametrize("number", ["123456789012345678901234567890", "0.1", "1e22", "-0.0", "5e-324", "1.0"])
@pytest.mark.parametrize("padding", [0, 20_000], ids=["small", "large"])
def test_a_number_keeps_its_value(number: str, padding: int) -> None:
    body = json.dumps({**CHAT, "pad": "x" * padding})[:-1] + f', "n": {number}}}'
    sent = ask("chat", body.encode(), Told("t", False, {}, {}, wires=HTTP))
    assert isinstance(sent, Relayed) and repr(json.loads(sent.body)["n"]) == repr(json.loads(number))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000])
@pytest.mark.parametrize("padding", [0, 20_000], ids=["small", "large"])
def test_a_number_that_json_cannot_hold_is_refused(number: str, padding: int) -> None:
    body = json.dumps({**CHAT, "pad": "x" * padding})[:-1] + f', "n": {number}}}'
    with pytest.raises(InvalidRequest) as error:
        ask("chat", body.encode(), Told("t", False, {}, {}, wires=HTTP))
    assert error.value.code == "invalid_json"


def test_half_of_a_surrogate_pair_passes_as_an_escape() -> None:
    sent = made(messages=[{"role": "user", "content": "a\ud800é"}], prompt_cache_key="\udfff")
    assert b"\\ud800" in sent.body and json.loads(sent.body)["messages"][0]["content"] == "a\ud800é"


# ---- what is taken out -----------------------------------------------------------------------------------------------
VALUES: dict[str, Any] = {
    "kv_transfer_params": {"upbeat": {"tenant": "other"}},
    "ec_transfer_params": {"a": 1},
    "cache_salt": "pepper",
    "priority": -5,
    "request_id": "another's",
    "session_id": "s-1",
    "nvext": {"agent_hints": {"osl": 7}},
    "agent_hint": {"session_id": "s-2"},
    "litellm_session_id": "s-3",
    "litellm_metadata": {"session_id": "s-4"},
    "kv_hints": {"protocol_version": "0.1", "actions": []},
}


def test_the_fields_below_are_all_that_are_taken_out() -> None:
    assert VALUES.keys() == TAKEN_OUT and ROOTS < TAKEN_OUT


@pytest.mark.parametrize("kind", APIS)
@pytest.mark.parametrize("name", VALUES)
def test_a_field_that_is_the_gateways_never_reaches_the_engine(kind: RelayKind, name: str) -> None:
    assert passed(kind, **{name: VALUES[name]}) == {}
    assert passed(kind, **{name: None}) == {}


@pytest.mark.parametrize("name", sorted(TAKEN_OUT_OF_XARGS))
def test_nor_does_it_within_the_arguments_that_vllm_merges_with_the_fields(name: str) -> None:
    assert passed(vllm_xargs={name: "x", "other": 1}) == {"vllm_xargs": {"other": 1}}


@pytest.mark.parametrize(
    "twice",
    [
        b'{"model":"m","kv_transfer_params":{"a":1},"messages":[],"kv_transfer_params":{"b":2}}',
        b'{"model":"m","messages":[],"kv\\u005ftransfer_params":{"b":2}}',
        b'{"model":"m","messages":[],"vllm_xargs":{"kv_transfer_params":"a","kv_transfer_params":"b"}}',
        b'{"model":"m","messages":[],"vllm_xargs":{},"vllm_xargs":{"kv_transfer_params":"b"}}',
    ],
)
def test_no_spelling_of_a_field_brings_it_past(twice: bytes) -> None:
    sent = ask("chat", twice, Told("t", False, {}, {}, wires=HTTP))
    assert isinstance(sent, Relayed) and b"transfer" not in sent.body


def test_what_is_taken_out_is_told_to_the_worker_instead() -> None:
    sent = made(cache_salt="pepper", priority=-7, session_id="s-1", nvext={"agent_hints": {"osl": 9, "priority": 3}})
    assert (sent.cache_salt, sent.priority, sent.session_id) == ("pepper", -7, "s-1")
    assert (sent.said.expected_tokens, sent.said.priority) == (9, -3)


@pytest.mark.parametrize(("said", "taken"), [(5, 5), (-5, -5), (10**30, 1000), (-(10**30), -1000), (None, None)])
def test_a_priority_is_within_the_range_of_priorities(said: Any, taken: Any) -> None:
    assert made(priority=said).priority == taken


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "1"), ("priority", 1.5), ("priority", True), ("priority", [1]),
        ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 2000), ("cache_salt", "a\ud800"),
        ("session_id", 5), ("session_id", {}), ("session_id", "x" * 5000),
        ("prompt_cache_key", 5), ("prompt_cache_key", ["a"]),
        ("nvext", 1), ("agent_hint", {"session_id": "no good"}), ("kv_hints", {}),
        ("model", 5), ("model", ""), ("model", ["m"]), ("model", "x" * 600),
    ],
)  # fmt: skip
def test_what_the_gateway_reads_itself_is_checked_and_named(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.status == 400 and error.param is not None and error.param.startswith(name)


def test_a_body_needs_a_model_and_is_an_object() -> None:
    assert refused(model=None).code == "missing_required_parameter"
    assert relayed("tokenize", {"prompt": "a"}, "t", {}, named=False).model == ""
    for odd in ([], "a", 5, None):
        with pytest.raises(InvalidRequest, match="object"):
            relayed("chat", odd, "t", {}, named=False)


# ---- what it is ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "streams"),
    [
        *((value, True) for value in (True, 1, "true", "ON", "1")),
        *((value, False) for value in (False, 0, "false", None, [], "x")),
    ],
)
def test_a_stream_is_asked_for_in_every_spelling_that_vllm_reads(value: Any, streams: bool) -> None:
    assert made(stream=value).streams is streams


def test_a_digest_is_of_tenant_route_model_and_what_is_asked() -> None:
    def digest(**more: Any) -> bytes:
        return made(**more).digest

    same = [digest(), digest(request_id="r"), digest(session_id="s"), digest(kv_transfer_params={}), digest(priority=2)]
    assert len(set(same)) == 1
    others = [digest(tenant="u"), digest(model="n"), digest(kind="tokenize"), digest(temperature=0.5)]
    assert len({same[0], *others}) == 5


def test_a_prompt_is_estimated_where_it_counts_toward_a_tenants_tokens() -> None:
    text = "x" * 400
    assert made(messages=[{"role": "user", "content": text}]).estimate == 100
    assert made("completion", prompt=[text, text]).estimate == 200
    assert made("completion", prompt=[1, 2, 3]).estimate == 3
    assert made("embeddings", input=[text, text]).estimate == 200
    image = {"type": "image_url", "image_url": {"url": "x" * 100_000}}
    assert 1000 < made(messages=[{"role": "user", "content": [image, {"type": "text", "text": "a"}]}]).estimate < 1100
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    assert made(tools=tools).estimate > 100
    for kind in ("tokenize", "detokenize"):
        assert made(kind, prompt=text, messages=[{"role": "user", "content": text}]).estimate == 0


def test_a_large_body_comes_out_of_a_helper_as_it_would_here() -> None:
    told = Told("t", False, {"X-Dynamo-Session-Final": "1"}, {}, "m", HTTP)
    body = json.dumps(
        {**CHAT, "cache_salt": "s", "priority": 3, "kv_hints": VALUES["kv_hints"], "n": "\ud800"}
    ).encode()
    question = decode_question(encode_question("chat", body, told))
    assert question == ("chat", body, told, None)
    here, there = ask("chat", body, told), decode_answer(encode_answer(ask(*question[:3])))
    assert isinstance(there, Relayed) and here == there


# ---- whether it goes there -------------------------------------------------------------------------------------------
def goes(kind: RelayKind, body: Any, wires: dict[str, ModelWire] = HTTP, served: str = "") -> bool:
    return is_relayed(kind, body, wires, served)


def test_a_body_goes_to_the_engine_of_its_model() -> None:
    for kind in ("chat", "completion", "tokenize", "detokenize"):
        assert goes(kind, {"model": "m"}) and not goes(kind, {"model": "n"})
        assert not goes(kind, {"model": "m"}, {}), "no model has HTTP of its own"
    assert goes("tokenize", {}, served="m") and not goes("tokenize", {}, served="n")


@pytest.mark.parametrize("body", [{"model": "other"}, {"model": 5}, {}, [], "a"])
def test_without_a_known_model_a_body_is_refused_for_that_and_nothing_else(body: Any) -> None:
    assert goes("chat", body) and not goes("chat", body, {})


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_a_route_that_the_models_engine_lacks_is_refused_and_the_others_are_named(kind: RelayKind) -> None:
    with pytest.raises(InvalidRequest) as error:
        goes(kind, {"model": "n"})
    assert error.value.param == "model" and APIS[kind].path in error.value.message
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert path in error.value.message
    assert goes(kind, {"model": "m"}) and goes(kind, {"model": "other"}, {})


def test_a_native_model_is_validated_as_strictly_as_ever() -> None:
    told = Told("t", False, {}, {}, wires=HTTP)
    with pytest.raises(InvalidRequest, match="unrecognized"):
        ask("chat", json.dumps({**CHAT, "model": "n", "odd": 1}).encode(), told)
    assert isinstance(ask("chat", json.dumps({**CHAT, "model": "n"}).encode(), told), Asked)


def test_every_route_that_is_relayed_is_one_that_answers_requests() -> None:
    assert [api.path for api in APIS.values()] == [
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize",
    ]  # fmt: skip


def test_anthropics_clients_read_the_type_of_an_error() -> None:
    error = InvalidRequest("no", param="a")
    assert error_body(error, "/v1/messages")["error"] == error.envelope()["error"]
    types = {
        Unauthorized: "authentication_error",
        Forbidden: "permission_error",
        NotFound: "not_found_error",
        BodyTooLarge: "request_too_large",
        RateLimited: "rate_limit_error",
        Unavailable: "overloaded_error",
    }
    for kind, said in types.items():
        told = error_body(kind("no"), "/v1/messages/count_tokens")
        assert (told["type"], told["error"]["type"]) == ("error", said)
    assert error_body(error, "/v1/chat/completions") == error.envelope()
    assert is_anthropic("/v1/messages/count_tokens") and not is_anthropic("/v1/messagesx")


# ---- headers ---------------------------------------------------------------------------------------------------------
def test_an_engine_sees_few_headers_of_a_caller() -> None:
    sent = [
        ("Authorization", "Bearer key"), ("X-Api-Key", "key"), ("Cookie", "a=b"), ("X-Request-Id", "r"),
        ("X-Session-ID", "s"), ("X-Vllm-Priority", "-9"), ("X-data-parallel-rank", "3"), ("traceparent", "00-1"),
        ("Content-Type", "application/x+json"), ("Content-Length", "5"), ("Transfer-Encoding", "chunked"),
        ("Connection", "upgrade"), ("Host", "h"), ("X-Forwarded-For", "1.2.3.4"),
        ("endpoint-load-metrics-format", "TEXT"), ("Anthropic-Version", "2023-06-01"), ("anthropic-beta", "a"),
        ("anthropic-beta", "b"), ("OpenAI-Beta", "x"), ("Accept", "*/*"),
    ]  # fmt: skip
    assert up(sent) == [
        ("content-type", "application/json"), ("anthropic-version", "2023-06-01"), ("anthropic-beta", "a"),
        ("anthropic-beta", "b"), ("openai-beta", "x"), ("accept", "*/*"),
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["é", "\udce9", "a\r\nX: y", "a\x00"])
def test_a_header_that_is_no_plain_text_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        up([("Accept", value)])
    assert error.value.param == "Accept"
    up([("X-Other", value)])


def test_a_caller_sees_few_headers_of_an_engine() -> None:
    sent = [
        ("content-type", "text/event-stream; charset=utf-8"), ("Transfer-Encoding", "chunked"), ("connection", "close"),
        ("content-length", "9"), ("server", "uvicorn"), ("set-cookie", "a=b"), ("x-request-id", "r"),
        ("access-control-allow-origin", "*"), ("retry-after", "3"), ("content-encoding", "gzip"), ("metadata", "é"),
    ]  # fmt: skip
    seen = down(sent)
    assert seen == {"Content-Type": "text/event-stream; charset=utf-8", "Retry-After": "3"} and is_events(seen)


@pytest.mark.parametrize("kind", ["text/html", "image/svg+xml", "application/javascript", "", "a\r\nb"])
def test_an_answer_is_no_page(kind: str) -> None:
    assert down([("Content-Type", kind)]) == {"Content-Type": "application/octet-stream"}
