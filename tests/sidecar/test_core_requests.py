"""What the sidecar adds to a request, and which requests it passes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidRequest, NotFound
from sidecar.core import headers
from sidecar.core.fields import Asked, added, check, salt_of, spliced
from sidecar.core.routes import PATHS, Route, routes_of
from sidecar.core.served import Unfit, facts_of, one_token
from tests.sidecar.fake_vllm import FIELDS, described

SECRET = b"s" * 32
ASKED = Asked("r-1", "acme", "chat-7", -2, ("node-1",), "")
ALL = Route(True, kv_transfer_params=True, cache_salt=True, priority=True, request_id=True)


# ---- routes ----------------------------------------------------------------------------------------------------------
def test_a_servers_routes_are_those_that_it_describes_and_that_are_passed_on() -> None:
    routes = routes_of(described(FIELDS))
    assert set(routes) == set(FIELDS) - {"/v1/load_lora_adapter"}
    assert routes["/v1/chat/completions"] == ALL
    assert routes["/v1/messages"] == Route(True, kv_transfer_params=True, cache_salt=True)
    assert routes["/tokenize"] == Route(False)


def test_a_body_of_several_forms_has_a_field_if_every_form_has_it() -> None:
    forms = {"/v1/embeddings": [["cache_salt", "priority"], ["cache_salt"]]}
    assert routes_of(described(forms))["/v1/embeddings"] == Route(True, cache_salt=True)


def test_fields_are_found_through_all_of_and_references() -> None:
    base, own = {"properties": {"cache_salt": {}}}, {"properties": {"priority": {}}}
    parts = {"allOf": [{"$ref": "#/components/schemas/Base"}, own]}
    post = {"requestBody": {"content": {"application/json": {"schema": parts}}}}
    made = {"paths": {"/v1/completions": {"post": post}}, "components": {"schemas": {"Base": base}}}
    assert routes_of(made)["/v1/completions"] == Route(True, cache_salt=True, priority=True)


def circular() -> dict[str, Any]:
    made = described({"/v1/completions": [[]]})
    made["components"]["schemas"]["Form0x0"] = {"anyOf": [{"$ref": "#/components/schemas/Form0x0"}] * 50}
    return made


@pytest.mark.parametrize("nonsense", [None, [], "x", {"paths": []}, {"paths": {"/v1/completions": {"post": 7}}}])
def test_a_description_that_makes_no_sense_has_no_routes(nonsense: Any) -> None:
    assert routes_of(nonsense) == {}


def test_a_description_that_refers_to_itself_has_routes_without_fields() -> None:
    assert routes_of(circular()) == {"/v1/completions": Route(True)}


# ---- checks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/metrics", "/v1/models", "", "/v1/chat/completions/../x"])
def test_a_path_that_is_not_in_the_list_is_refused(path: str) -> None:
    with pytest.raises(NotFound, match="not passed"):
        check(path, routes_of(described(FIELDS)), ASKED, False)


def test_a_path_that_the_server_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no POST /v1/embeddings"):
        check("/v1/embeddings", routes_of(described(FIELDS)), ASKED, False)


@pytest.mark.parametrize("request_id", ["", "a b", "a\r\nx: y", "x" * 300, "\u00e9"])
def test_an_id_that_no_header_carries_is_refused(request_id: str) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        check("/v1/completions", {"/v1/completions": ALL}, Asked(request_id, "t", "", 0, ()), False)


def test_a_route_that_keeps_no_tenants_apart_is_refused_where_there_are_several() -> None:
    routes = {"/v1/embeddings": Route(True), "/tokenize": Route(False)}
    with pytest.raises(InvalidRequest, match="no cache_salt"):
        check("/v1/embeddings", routes, ASKED, True)
    assert check("/v1/embeddings", routes, ASKED, False) == Route(True)
    assert check("/tokenize", routes, ASKED, True) == Route(False), "it computes nothing"


# ---- fields ----------------------------------------------------------------------------------------------------------
def test_each_field_is_added_where_the_route_reads_it() -> None:
    everything = added(ALL, ASKED, SECRET, transfers=True, prioritises=True)
    ours = {"tenant": "acme", "priority": -2, "sources": ["node-1"], "session": "chat-7"}
    salt = salt_of(SECRET, "acme", "")
    assert everything == {
        "kv_transfer_params": {"upbeat": ours},
        "cache_salt": salt,
        "priority": -2,
        "request_id": "r-1",
    }
    assert added(Route(False), ASKED, SECRET, transfers=True, prioritises=True) == {}
    assert set(added(ALL, ASKED, SECRET, transfers=False, prioritises=False)) == {"cache_salt", "request_id"}
    nameless = added(ALL, Asked("r", "t", "", 0, ()), SECRET, transfers=True, prioritises=True)
    assert "session" not in nameless["kv_transfer_params"]["upbeat"]


def test_a_salt_is_the_same_on_every_node_and_differs_by_tenant_own_salt_and_deployment() -> None:
    made = {salt_of(*each) for each in ((SECRET, "a", ""), (SECRET, "b", ""), (SECRET, "a", "x"), (b"o" * 32, "a", ""))}
    assert len(made) == 4 and salt_of(SECRET, "a", "x") == salt_of(SECRET, "a", "x")
    assert all(len(salt) == 64 for salt in made)
    assert salt_of(SECRET, "a", "bc") != salt_of(SECRET, "ab", "c"), "tenant and salt are kept apart"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", {"x": 1}),
        (b" { \n } ", {"x": 1}),
        (b'{"a": "}"}', {"a": "}", "x": 1}),
        (b'{"x": 7, "a": {"x": 2}}\n', {"a": {"x": 2}, "x": 1}),
        (b'{"a": "\\u0022,"}', {"a": '",', "x": 1}),
    ],
)
def test_fields_go_behind_the_callers_and_win(body: bytes, expected: dict[str, Any]) -> None:
    assert json.loads(spliced(body, {"x": 1})) == expected


def test_without_fields_a_body_is_untouched() -> None:
    assert spliced(b' {"a": 1} ', {}) == b' {"a": 1} '


@pytest.mark.parametrize(
    "body", [b"", b"{", b"}", b"[]", b"7", b'"{}"', b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16"), b"{}x", b"\x00{}"]
)
def test_what_is_no_object_in_utf_8_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON object"):
        spliced(body, {"x": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["cache_salt", "priority", "a", ""]), JSON), st.sampled_from([None, 1]))
def test_any_object_keeps_its_fields_and_never_replaces_ours(body: dict[str, Any], indent: int | None) -> None:
    ours = {"cache_salt": "salt", "priority": 3}
    assert json.loads(spliced(json.dumps(body, indent=indent).encode(), ours)) == body | ours


@given(st.binary(max_size=30))
def test_any_bytes_are_refused_or_stay_as_wrong_as_they_were(inner: bytes) -> None:
    """A malformed object does not become a valid one without our fields."""
    body = b"{" + inner + b"}"
    made = spliced(body, {"cache_salt": "salt"})
    try:
        read = json.loads(made)
    except (ValueError, RecursionError):
        return
    assert read["cache_salt"] == "salt"


# ---- headers ---------------------------------------------------------------------------------------------------------
def test_credentials_frames_and_what_vllm_reads_from_headers_do_not_pass() -> None:
    given_ = [
        ("Accept", "text/event-stream"),
        ("anthropic-version", "2023-06-01"),
        ("Authorization", "Bearer theirs"),
        ("X-Request-Id", "theirs"),
        ("X-Vllm-Priority", "-1000"),
        ("X-data-parallel-rank", "3"),
        ("Cookie", "a=b"),
        ("Content-Length", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
        ("Host", "elsewhere"),
    ]
    assert headers.up(given_, "r-1", "key", 5) == {
        "accept": "text/event-stream",
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
        "accept-encoding": "identity",
        "x-request-id": "r-1",
        "authorization": "Bearer key",
        "x-vllm-priority": "5",
    }
    bare = headers.up([], "r-1", "", None)
    assert "authorization" not in bare and "x-vllm-priority" not in bare


@pytest.mark.parametrize(
    "header", [("accept", "a\r\nx: y"), ("accept", "\u00e9"), ("a b", "c"), ("accept", "x" * 9000)]
)
def test_a_header_that_cannot_be_sent_is_refused(header: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        headers.up([header], "r", "", None)


def test_too_many_headers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="headers"):
        headers.up([(f"a{n}", "b") for n in range(100)], "r", "", None)


def test_the_answers_frames_and_cookies_do_not_go_back() -> None:
    told = [("Content-Type", "a/b"), ("Content-Length", "3"), ("Server", "uvicorn"), ("Set-Cookie", "x"), ("Vary", "O")]
    assert headers.down(told) == [("content-type", "a/b"), ("vary", "O")]


# ---- what it serves --------------------------------------------------------------------------------------------------
def models(**fields: Any) -> bytes:
    return json.dumps({"data": [{"id": "m", "max_model_len": 4096, "root": "/models/m"} | fields]}).encode()


def test_a_server_says_its_models_context_and_weights() -> None:
    facts = facts_of(200, models(), "m")
    assert (facts.max_tokens, facts.root) == (4096, "/models/m")


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (401, b"{}", "refuses our API key"),
        (404, b"{}", "is it a vLLM server"),
        (200, b"<html>", "is it a vLLM server"),
        (200, b'{"data": [7]}', "is it a vLLM server"),
        (200, models(id="other"), "serves other, not 'm'"),
        (200, models(max_model_len=None), "max_model_len"),
        (200, models(max_model_len=True), "max_model_len"),
    ],
)
def test_a_server_that_cannot_be_a_nodes_says_what_to_change(status: int, answer: bytes, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        facts_of(status, answer, "m")


def test_one_token_is_asked_of_what_the_model_can_do() -> None:
    assert one_token("m", {"/v1/completions": ALL}, 1)[1]["priority"] == 1
    path, body = one_token("m", {"/v1/embeddings": ALL}, None)
    assert path == "/v1/embeddings" and "priority" not in body
    with pytest.raises(Unfit):
        one_token("m", {"/tokenize": Route(False)}, None)


def test_every_path_begins_with_a_slash() -> None:
    assert all(path.startswith("/") and not path.endswith("/") for path in PATHS)
