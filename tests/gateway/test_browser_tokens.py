"""Browser tokens: what they permit, and everything that they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_fakes import Stack, stack, until
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import ConfigError, Forbidden, Unauthorized
from contracts.ids import SESSION_ID_PATTERN
from gateway.core.browser_limits import HINT_BURST, HINTS_PER_S, BrowserLimits
from gateway.core.browser_tokens import PREFIX, BrowserTokens, Grant
from runtime.config_file import load_config

KEYS = [
    {"key": "key-of-acme", "tenant": "acme", "max_priority": -5},
    {"key": "key-of-blue", "tenant": "blue", "max_priority": 7},
]
ACME = {"Authorization": "Bearer key-of-acme"}
BLUE = {"Authorization": "Bearer key-of-blue"}
PAGE = "https://chat.example.org"
GRANT = Grant("acme", "chat-1", prefix=False, max_priority=0, origin="", ends_s=1000)


@pytest.fixture(scope="module")
async def s() -> Any:
    async with stack(1, wait=False, api_keys=KEYS) as running:
        yield running


async def mint(s: Stack, headers: dict[str, str] = ACME, **body: Any) -> str:
    status, answer, _ = await s.post("/v1/client_secrets", body or {"session_id": "chat-1"}, headers=headers)
    assert status == 200, answer
    value: str = answer["value"]
    return value


async def say(s: Stack, path: str, body: dict[str, Any], origin: str | None = None) -> tuple[int, dict[str, Any], Any]:
    """As a page does: text, nothing that needs a preflight."""
    headers = {"Content-Type": "text/plain;charset=UTF-8"} | ({"Origin": origin} if origin else {})
    async with s.http.post(s.url + path, data=json.dumps(body), headers=headers) as r:
        return r.status, await r.json(), r.headers


async def told(s: Stack, session_id: str) -> Any:
    """The scheduler's one advisory for a session that no other test names."""
    await until(lambda: any(a.session.session_id == session_id for a in s.scheduler.advised))
    (only,) = [a for a in s.scheduler.advised if a.session.session_id == session_id]
    return only


def code(answer: tuple[int, dict[str, Any], Any]) -> tuple[int, str]:
    assert set(answer[1]["error"]) == {"message", "type", "param", "code"}
    return answer[0], answer[1]["error"]["code"]


# The token itself


_names = st.from_regex(SESSION_ID_PATTERN, fullmatch=True)
grants = st.builds(
    Grant,
    tenant=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    session=_names,
    prefix=st.booleans(),
    max_priority=st.integers(-1000, 1000),
    origin=st.sampled_from(["", PAGE, "http://[::1]:8080"]),
    ends_s=st.integers(1, 1 << 40),
)


@settings(deadline=None)
@given(grants)
def test_a_token_says_what_was_granted_until_it_ends(grant: Grant) -> None:
    tokens = BrowserTokens(["secret"])
    token = tokens.sign(grant)
    assert tokens.read(token, grant.ends_s - 0.001) == grant
    with pytest.raises(Unauthorized) as refused:
        tokens.read(token, grant.ends_s)
    assert refused.value.code == "client_secret_expired"


@settings(deadline=None)
@given(grants, st.data())
def test_a_token_that_was_changed_anywhere_is_none(grant: Grant, data: st.DataObject) -> None:
    tokens = BrowserTokens(["secret"])
    token = tokens.sign(grant)
    at = data.draw(st.integers(len(PREFIX), len(token) - 1))
    other = data.draw(st.sampled_from("AQgwxyz019-_=. \né").filter(lambda c: c != token[at]))
    with pytest.raises(Unauthorized) as refused:
        tokens.read(token[:at] + other + token[at + 1 :], 0)
    assert refused.value.code == "invalid_client_secret"


def spellings(token: str) -> Iterator[str]:
    """What decodes to the same bytes, or to some of them, or to more."""
    yield from (
        token + "=",
        token + "==",
        token + "A",
        token[:-1],
        token + "\n",
        token + " ",
        token.upper(),
        PREFIX,
        PREFIX + "A",
    )
    last = token[-1]
    yield from (token[:-1] + c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_" if c != last)
    yield PREFIX + "A" * 100_000


@pytest.mark.parametrize("session", ["a", "ab", "abc"])
def test_a_token_has_one_spelling(session: str) -> None:
    tokens = BrowserTokens(["secret"])
    token = tokens.sign(Grant("acme", session, False, 0, "", 1000))
    for other in spellings(token):
        with pytest.raises(Unauthorized):
            tokens.read(other, 0)
    assert tokens.read(token, 0).session == session


def test_gateways_with_the_same_secrets_agree_and_others_do_not() -> None:
    token = BrowserTokens(["one", "two"]).sign(GRANT)
    assert BrowserTokens(["two", "one"]).read(token, 0) == GRANT
    for others in (["one"], ["onetwo"], ["one", "two", "three"], []):
        with pytest.raises(Unauthorized):
            BrowserTokens(others).read(token, 0)


def test_a_prefix_covers_the_sessions_that_begin_so() -> None:
    exact, prefix = GRANT, Grant("acme", "u7:", True, 0, "", 1000)
    exact.check_session("chat-1", "session_id")
    for session_id in ("u7:", "u7:x", "u7:new-1"):
        prefix.check_session(session_id, "session_id")
    for grant, session_id in (
        (exact, "chat-2"),
        (exact, "chat-11"),
        (exact, "chat-"),
        (prefix, "u77:x"),
        (prefix, "xu7:"),
        (prefix, "u7"),
    ):
        with pytest.raises(Forbidden):
            grant.check_session(session_id, "session_id")


def test_a_tokens_hints_are_limited_and_a_forgotten_token_begins_anew() -> None:
    limits = BrowserLimits(remembered=2)
    assert [limits.take("a", 1, 0.0) for _ in range(int(HINT_BURST))] == [0.0] * int(HINT_BURST)
    assert limits.take("a", 1, 0.0) == pytest.approx(1 / HINTS_PER_S)
    assert limits.take("b", 1, 0.0) == 0.0, "another token has its own"
    assert limits.take("a", 1, 1 / HINTS_PER_S) == 0.0
    assert limits.take("a", int(HINT_BURST) + 1, 1e9) == float("inf")
    limits.validate()
    for name in ("c", "d"):
        limits.take(name, 1, 0.0)
    limits.validate()
    assert limits.take("a", int(HINT_BURST), 0.0) == 0.0


# Over HTTP


async def test_a_token_is_made_with_a_server_key_and_says_when_it_ends(s: Stack) -> None:
    assert s.gateway.parts is not None
    now_s = s.gateway.parts.clock.wall()
    wanted = {"session_id": "chat-1", "expires_after": {"anchor": "created_at", "seconds": 60}, "origin": PAGE}
    status, made, headers = await s.post("/v1/client_secrets", wanted, headers=ACME)
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert (made["object"], made["session_id"], made["origin"], made["permissions"]) == (
        "client_secret",
        "chat-1",
        PAGE,
        ["advise", "invalidate"],
    )
    assert made["value"].startswith(PREFIX) and now_s + 58 < made["expires_at"] <= now_s + 62
    _, made, _ = await s.post("/v1/client_secrets", {"session_prefix": "u7:"}, headers=ACME)
    assert made["session_prefix"] == "u7:" and made["origin"] is None and now_s + 590 < made["expires_at"] < now_s + 620


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "session_id"),
        ([], None),
        ({"session_id": "a", "session_prefix": "b"}, "session_id"),
        ({"session_id": "../a"}, "session_id"),
        ({"session_id": "a|b"}, "session_id"),
        ({"session_prefix": ""}, "session_prefix"),
        ({"session_id": "a", "tenant": "blue"}, "tenant"),
        ({"session_id": "a", "expires_after": {"seconds": 3601}}, "expires_after.seconds"),
        ({"session_id": "a", "expires_after": {"seconds": 9}}, "expires_after.seconds"),
        ({"session_id": "a", "expires_after": {"seconds": True}}, "expires_after.seconds"),
        ({"session_id": "a", "expires_after": 60}, "expires_after"),
        ({"session_id": "a", "expires_after": {"anchor": "last_active_at", "seconds": 60}}, "expires_after"),
        ({"session_id": "a", "origin": "https://chat.example.org/"}, "origin"),
        ({"session_id": "a", "origin": "https://a|b"}, "origin"),
        ({"session_id": "a", "origin": "null"}, "origin"),
        ({"session_id": "a", "origin": 5}, "origin"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(s: Stack, body: Any, param: str | None) -> None:
    status, answer, _ = await s.post("/v1/client_secrets", body, headers=ACME)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_page_hints_and_withdraws_with_a_token_in_the_body_and_any_page_may_read_the_answer(s: Stack) -> None:
    token = await mint(s, session_prefix="page-")
    status, body, headers = await say(
        s, "/v1/advisory", {"session_id": "page-1", "priority": -9, "ttl_s": 6, "token": token}, PAGE
    )
    assert (status, body["session_id"], headers["Access-Control-Allow-Origin"]) == (202, "page-1", "*")
    status, _, headers = await say(s, "/v1/invalidate", {"session_id": "page-1", "token": token}, PAGE)
    assert (status, headers["Access-Control-Allow-Origin"]) == (202, "*")
    async with s.http.post(
        s.url + "/v1/advisory", json={"session_id": "page-2"}, headers={"Authorization": f"Bearer {token}"}
    ) as r:
        assert r.status == 202, "in the header too"
    advisory = await told(s, "page-1")
    assert (advisory.session.tenant, advisory.ttl_s) == ("acme", 6)
    assert advisory.priority == 0, "no page makes itself more urgent than others"
    assert (await told(s, "page-2")).session.tenant == "acme"
    assert [i.session.tenant for i in s.scheduler.invalidated if i.session.session_id == "page-1"] == ["acme"]


async def test_the_keys_priority_clamps_its_tokens_too(s: Stack) -> None:
    token = await mint(s, BLUE, session_id="patient")
    assert (await say(s, "/v1/advisory", {"session_id": "patient", "token": token}))[0] == 202
    assert (await told(s, "patient")).priority == 7


async def test_another_session_is_refused(s: Stack) -> None:
    exact, prefix = await mint(s), await mint(s, session_prefix="u7:")
    for token, session_id in ((exact, "chat-2"), (exact, "chat-11"), (prefix, "chat-1"), (prefix, "u8:a")):
        for path in ("/v1/advisory", "/v1/invalidate"):
            answer = await say(s, path, {"session_id": session_id, "token": token})
            assert code(answer) == (403, "client_secret_session")
            assert answer[1]["error"]["param"] == "session_id" and answer[2]["Access-Control-Allow-Origin"] == "*"
    for session_id in ("u7:a", "u7:b"):
        assert (await say(s, "/v1/advisory", {"session_id": session_id, "token": prefix}))[0] == 202
    batch = await say(
        s, "/v1/advisory", {"advisories": [{"session_id": "u7:a"}, {"session_id": "u8:a"}], "token": prefix}
    )
    assert code(batch) == (403, "client_secret_session") and batch[1]["error"]["param"] == "advisories[1].session_id"


async def test_an_advisory_id_says_nothing_about_its_session_so_a_token_cannot_withdraw_by_it(s: Stack) -> None:
    _, foreign, _ = await s.post("/v1/advisory", {"session_id": "chat-2"}, headers=ACME)
    token = await mint(s)
    assert code(await say(s, "/v1/invalidate", {"advisory_id": foreign["advisory_id"], "token": token})) == (
        403,
        "client_secret_scope",
    )


async def test_a_token_speaks_for_the_tenant_whose_key_made_it_and_no_other(s: Stack) -> None:
    token = await mint(s, BLUE, session_id="blues")
    answer = await say(s, "/v1/advisory", {"session_id": "blues", "token": token, "tenant": "acme"})
    assert answer[0] == 400, "there is no way to name another"
    assert (await say(s, "/v1/advisory", {"session_id": "blues", "token": token}))[0] == 202
    assert (await told(s, "blues")).session.tenant == "blue"


async def test_a_token_of_another_deployment_or_of_other_keys_is_refused(s: Stack) -> None:
    for secrets in (["key-of-acme"], ["key-of-blue", "key-of-acme", "key-of-eve-1"], []):
        forged = BrowserTokens(secrets).sign(Grant("acme", "chat-1", False, 0, "", 1 << 40))
        assert code(await say(s, "/v1/advisory", {"session_id": "chat-1", "token": forged})) == (
            401,
            "invalid_client_secret",
        )
    assert code(await say(s, "/v1/advisory", {"session_id": "chat-1", "token": "ek_"})) == (
        401,
        "invalid_client_secret",
    )


async def test_an_expired_token_is_refused_wherever_it_is_shown(s: Stack) -> None:
    assert s.gateway.parts is not None
    ended = s.gateway.parts.browser_tokens.sign(
        Grant("acme", "chat-1", False, 0, "", int(s.gateway.parts.clock.wall()))
    )
    for path in ("/v1/advisory", "/v1/invalidate"):
        assert code(await say(s, path, {"session_id": "chat-1", "token": ended})) == (401, "client_secret_expired")
    status, body, _ = await s.post(
        "/v1/client_secrets", {"session_id": "chat-1"}, headers={"Authorization": f"Bearer {ended}"}
    )
    assert (status, body["error"]["code"]) == (401, "client_secret_expired")


async def test_a_copy_of_a_bound_token_is_worth_nothing_on_another_page(s: Stack) -> None:
    token = await mint(s, session_id="chat-1", origin=PAGE)
    body = {"session_id": "chat-1", "token": token}
    for path in ("/v1/advisory", "/v1/invalidate"):
        assert (await say(s, path, body, PAGE))[0] == 202
        for origin in (None, "null", "https://evil.example", PAGE + ":8443", "http://chat.example.org"):
            assert code(await say(s, path, body, origin)) == (403, "client_secret_origin")


async def test_a_copied_token_takes_no_more_than_its_own_share_of_hints(s: Stack) -> None:
    token = await mint(s)
    answers = [
        await say(s, "/v1/advisory", {"session_id": "chat-1", "token": token}) for _ in range(int(HINT_BURST) + 10)
    ]
    assert answers[0][0] == 202
    status, body, headers = answers[-1]
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded") and int(headers["Retry-After"]) >= 1
    assert (await s.post("/v1/advisory", {"session_id": "chat-1"}, headers=ACME))[0] == 202


OTHER_ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/client_secrets"),
    ("GET", "/v1/models"),
    ("GET", "/v1/fleet"),
    ("GET", "/v1/scale"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/chat-1"),
    ("GET", "/v1/sessions/chat-1/placement"),
    ("DELETE", "/v1/sessions/chat-1"),
    ("GET", "/v1/workflows"),
    ("PUT", "/v1/workflows/w"),
    ("DELETE", "/v1/workflows/w"),
)


@pytest.mark.parametrize(("method", "path"), OTHER_ROUTES)
async def test_on_every_other_route_a_token_is_refused(s: Stack, method: str, path: str) -> None:
    token = await mint(s)
    for credential, expected in ((token, (403, "client_secret_scope")), (token + "A", (401, "invalid_client_secret"))):
        async with s.http.request(
            method, s.url + path, json={}, headers={"Authorization": f"Bearer {credential}"}
        ) as r:
            assert (r.status, (await r.json())["error"]["code"]) == expected
    async with s.http.request(method, s.url + path, json={"token": token, "session_id": "chat-1"}) as r:
        assert r.status == 401, "in the body it is no credential there"


async def test_a_token_pins_no_node(s: Stack) -> None:
    token = await mint(s)
    headers = {"Authorization": f"Bearer {token}", "X-Upbeat-Node": "node-0"}
    status, body, _ = await s.post("/v1/advisory", {"session_id": "chat-1"}, headers=headers)
    assert (status, body["error"]["param"]) == (403, "X-Upbeat-Node")


async def test_without_keys_a_token_still_says_what_it_says() -> None:
    async with stack(1, wait=False) as s:
        token = await mint(s, {}, session_id="chat-1")
        assert (await say(s, "/v1/advisory", {"session_id": "chat-1", "token": token}))[0] == 202
        assert code(await say(s, "/v1/advisory", {"session_id": "chat-2", "token": token})) == (
            403,
            "client_secret_session",
        )
        assert code(await say(s, "/v1/advisory", {"session_id": "chat-1", "token": token + "A"})) == (
            401,
            "invalid_client_secret",
        )
        async with s.http.get(s.url + "/v1/models", headers={"Authorization": f"Bearer {token}"}) as r:
            assert r.status == 403


async def test_a_configured_secret_signs_instead_of_the_keys() -> None:
    secret = "a secret of thirty-two characters"
    async with stack(1, wait=False, api_keys=KEYS, token_secret=secret) as s:
        token = BrowserTokens([secret]).sign(Grant("acme", "chat-1", False, 0, "", 1 << 40))
        assert (await say(s, "/v1/advisory", {"session_id": "chat-1", "token": token}))[0] == 202
        token = BrowserTokens(["key-of-acme", "key-of-blue"]).sign(GRANT)
        assert code(await say(s, "/v1/advisory", {"session_id": "chat-1", "token": token})) == (
            401,
            "invalid_client_secret",
        )


@pytest.mark.parametrize(
    ("gateway", "named"),
    [
        ({"token_secret": "short"}, "gateway.token_secret"),
        ({"api_keys": [{"key": "ek_12345678"}]}, "gateway.api_keys.0.key"),
    ],
)
def test_a_setting_that_cannot_work_stops_the_start(gateway: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, {"gateway": gateway})


# The files that pages load


@pytest.mark.parametrize("name", ["upbeat.js", "upbeat.mjs"])
async def test_the_web_sdk_is_served_to_any_page(s: Stack, name: str) -> None:
    async with s.http.get(f"{s.url}/{name}") as r:
        assert r.status == 200 and r.headers["Content-Type"].startswith("text/javascript")
        assert r.headers["Access-Control-Allow-Origin"] == "*" and r.headers["X-Content-Type-Options"] == "nosniff"
        assert "attach" in await r.text()
        tag = r.headers["ETag"]
    async with s.http.get(f"{s.url}/{name}", headers={"If-None-Match": tag}) as r:
        assert r.status == 304 and await r.read() == b""
