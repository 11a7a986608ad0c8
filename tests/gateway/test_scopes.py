"""Whose requests share KV: by tenant, by user, and by `cache_salt`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from fake_sidecar import HttpStack, http_stack
from gateway_fakes import MODEL, Stack, stack
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError, InvalidRequest
from gateway.asked_wire import decode_answer, decode_question, encode_answer, encode_question
from gateway.core.scopes import scope_of, user_of
from gateway.openai.asked import Asked, Told, ask
from runtime.config_file import load_config

TALK = [{"role": "user", "content": "hi"}]
labels = st.text(max_size=8)


# ---- the decision ----------------------------------------------------------------------------------------------------
@given(*[st.tuples(st.booleans(), labels, labels, labels)] * 2)
def test_two_requests_have_one_scope_only_if_tenant_user_or_session_and_salt_are_the_same(
    a: tuple[bool, str, str, str], b: tuple[bool, str, str, str]
) -> None:
    def scope(said: tuple[bool, str, str, str], once: str) -> str:
        per_user, user, session, salt = said
        return scope_of(user and user_of({"user": user}), salt, per_user=per_user, session_id=session, once=once)

    def owner(said: tuple[bool, str, str, str], once: str) -> tuple[str, ...]:
        per_user, user, session, salt = said
        return (salt, *([] if not per_user else ["u", user] if user else ["s", session] if session else [once]))

    assert (scope(a, "1") == scope(b, "2")) == (owner(a, "1") == owner(b, "2"))
    assert scope((False, a[1], a[2], ""), "1") == "", "without a setting, a tenant's requests share"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"user": "a"}, {"safety_identifier": "a"}),
        ({"user": "b", "safety_identifier": "a"}, {"user": "a"}),
        ({"metadata": {"user_id": "a"}}, {"user": "a"}),
        ({"metadata": {"user_id": 1}, "user": "a"}, {"user": "a"}),
        ({"user": "", "metadata": {"other": 1}}, {"user": None, "metadata": "text"}),
    ],
)
def test_every_apis_field_names_the_user(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert user_of(one) == user_of(other)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"user": 1}, "user"),
        ({"safety_identifier": []}, "safety_identifier"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
    ],
)
def test_a_user_that_is_no_string_is_refused_by_name(data: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        user_of(data)
    assert e.value.param == param


def test_the_setting_is_the_tenants_else_everybodys() -> None:
    limits = {"limits": {"cache_scope": "user"}, "tenant_limits": {"a": {"cache_scope": "tenant"}, "b": {"weight": 2}}}
    section = load_config(None, {"gateway": limits}).gateway
    assert [section.per_user(tenant) for tenant in ("a", "b", "c")] == [False, True, True]
    assert not load_config(None, {}).gateway.per_user("a")
    with pytest.raises(ConfigError, match="cache_scope"):
        load_config(None, {"gateway": {"limits": {"cache_scope": "session"}}})


def test_a_helper_process_reads_the_same_scope() -> None:
    body = json.dumps({"model": "m", "messages": TALK, "user": "\ud800", "cache_salt": "é"}).encode()
    told = Told("t", False, {}, {}, per_user=True)
    kind, rest, again, _ = decode_question(encode_question("chat", body, told))  # type: ignore[misc]
    assert again == told
    asked = decode_answer(encode_answer(ask(kind, rest, again)))  # type: ignore[arg-type]
    assert isinstance(asked, Asked) and (asked.user, asked.cache_salt) == (user_of({"user": "\ud800"}), "é")
    assert asked.prompts[0].history != ask("chat", body, replace(told, per_user=False)).prompts[0].history  # type: ignore[union-attr]


# ---- from the caller to the worker ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Stack]:
    async with stack(nodes=1, limits={"cache_scope": "user"}) as running:
        yield running


@pytest.fixture
def s(shared: Stack) -> Stack:
    shared.workers[0].submitted.clear()
    return shared


def scopes(s: Stack) -> list[str]:
    return [request.cache_salt for request in s.workers[0].submitted]


async def test_users_are_kept_apart_and_each_shares_with_itself(s: Stack) -> None:
    for said in ({"user": "a"}, {"user": "b"}, {"safety_identifier": "a"}, {"user": "a", "cache_salt": "x"}):
        status, body, _ = await s.chat(session_id="one", **said)
        assert status == 200, body
    first, second, again, salted = scopes(s)
    assert first == again and len({first, second, salted}) == 3 and all(scopes(s))
    assert {request.session_id for request in s.workers[0].submitted} == {"one"}, "hints find the session by its name"


async def test_a_request_without_a_user_shares_within_the_session_that_it_names_and_else_with_nobody(s: Stack) -> None:
    for said in ({"session_id": "one"}, {"session_id": "one"}, {"session_id": "two"}, {}, {}):
        assert (await s.chat(**said))[0] == 200
    one, same, two, nobody, neither = scopes(s)
    assert one == same and len({one, two, nobody, neither}) == 4 and all(scopes(s))


async def test_all_choices_of_a_request_share(s: Stack) -> None:
    assert (await s.chat(n=3))[0] == 200
    assert len(set(scopes(s))) == 1


async def test_equal_conversations_of_two_users_are_two_sessions(s: Stack) -> None:
    async def session(user: str, *messages: Any) -> str:
        body = {"model": MODEL, "messages": [*TALK, *messages], "user": user}
        return str((await s.post("/v1/chat/completions", body))[2]["X-Session-Id"])

    _, body, _ = await s.post("/v1/chat/completions", {"model": MODEL, "messages": TALK, "user": "a"})
    answer, more = body["choices"][0]["message"], {"role": "user", "content": "and"}
    of_a = await session("a", {"role": "assistant", "content": answer["content"]}, more)
    of_b = await session("b", {"role": "assistant", "content": answer["content"]}, more)
    assert of_a != of_b, "b resends what a said and was told, and is not taken for a"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("said", "param"),
    [({"cache_salt": ""}, "cache_salt"), ({"cache_salt": 1}, "cache_salt"), ({"cache_salt": "x" * 1025}, "cache_salt"),
     ({"cache_salt": "\ud800"}, "cache_salt"), ({"user": 1}, "user"), ({"safety_identifier": {}}, "safety_identifier")],
)  # fmt: skip
async def test_what_is_no_salt_and_no_user_is_refused_by_name(
    s: Stack, path: str, said: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, **({"prompt": "x"} if path == "/v1/completions" else {"messages": TALK})}
    status, answer, _ = await s.post(path, body | said)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_by_default_a_tenants_users_share_and_a_salt_separates() -> None:
    async with stack(nodes=1) as s:
        for said in ({"user": "a"}, {"user": "b"}, {}, {"cache_salt": "x"}, {"cache_salt": "x", "user": "a"}):
            assert (await s.chat(**said))[0] == 200
        a, b, nobody, salted, again = scopes(s)
        assert a == b == nobody == "" and salted == again != ""


async def test_vllm_gets_the_scope_as_its_salt() -> None:
    async with http_stack(limits={"cache_scope": "user"}) as running:
        s: HttpStack = running
        chat = {"model": MODEL, "messages": TALK}
        for path, said in (
            ("/v1/chat/completions", {"user": "a"}),
            ("/v1/messages", {"metadata": {"user_id": "a"}, "max_tokens": 9}),
            ("/v1/chat/completions", {"user": "b"}),
            ("/v1/chat/completions", {}),
            ("/v1/chat/completions", {}),
        ):
            status, answer, *_ = await s.raw(path, chat | said)
            assert status == 200, answer
        one, same, other, nobody, neither = [heard.head.cache_salt for heard in s.heard]
        assert one == same and len({one, other, nobody, neither}) == 4 and all((one, other, nobody, neither))
