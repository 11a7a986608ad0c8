"""Every route without a credential, with a wrong one, an expired one, a browser's and another tenant's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from security_harness import CHAT, KEY_A, KEY_B, SESSION, Harness, harness

from gateway.app import build
from gateway.core.relay_routes import is_anthropic
from gateway.openai.description import openapi

#: Routes that everybody may ask: they know of no tenant.
OPEN = {"/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"}
#: What each route is asked with; the method and the path as the application has them.
ASKED: dict[tuple[str, str], tuple[str, Any]] = {
    ("POST", "/v1/chat/completions"): ("/v1/chat/completions", CHAT),
    ("POST", "/v1/completions"): ("/v1/completions", {"model": "toy", "prompt": "x"}),
    ("POST", "/v1/responses"): ("/v1/responses", {"model": "toy", "input": "x"}),
    ("GET", "/v1/responses/{response_id}"): ("/v1/responses/resp_x", None),
    ("GET", "/v1/responses/{response_id}/input_items"): ("/v1/responses/resp_x/input_items", None),
    ("DELETE", "/v1/responses/{response_id}"): ("/v1/responses/resp_x", None),
    ("POST", "/v1/responses/{response_id}/cancel"): ("/v1/responses/resp_x/cancel", {}),
    ("POST", "/v1/messages"): ("/v1/messages", CHAT),
    ("POST", "/v1/messages/count_tokens"): ("/v1/messages/count_tokens", CHAT),
    ("POST", "/v1/embeddings"): ("/v1/embeddings", {"model": "toy", "input": "x"}),
    ("POST", "/tokenize"): ("/tokenize", {"prompt": "x"}),
    ("POST", "/detokenize"): ("/detokenize", {"tokens": [1]}),
    ("POST", "/v1/advisory"): ("/v1/advisory", {"session_id": SESSION}),
    ("POST", "/v1/invalidate"): ("/v1/invalidate", {"session_id": SESSION}),
    ("POST", "/v1/client_secrets"): ("/v1/client_secrets", {"session_id": SESSION}),
    ("GET", "/v1/models"): ("/v1/models", None),
    ("GET", "/v1/models/{model}"): ("/v1/models/toy", None),
    ("GET", "/v1/models/{model}/placement"): ("/v1/models/toy/placement", None),
    ("GET", "/v1/sessions"): ("/v1/sessions", None),
    ("GET", "/v1/sessions/{session_id}"): (f"/v1/sessions/{SESSION}", None),
    ("DELETE", "/v1/sessions/{session_id}"): (f"/v1/sessions/{SESSION}", None),
    ("GET", "/v1/sessions/{session_id}/placement"): (f"/v1/sessions/{SESSION}/placement", None),
    ("GET", "/v1/sessions/{session_id}/events"): (f"/v1/sessions/{SESSION}/events", None),
    ("GET", "/v1/workflows"): ("/v1/workflows", None),
    ("GET", "/v1/workflows/{name}"): ("/v1/workflows/team", None),
    ("PUT", "/v1/workflows/{name}"): ("/v1/workflows/team", {"agents": ["a"]}),
    ("DELETE", "/v1/workflows/{name}"): ("/v1/workflows/team", None),
    ("GET", "/v1/fleet"): ("/v1/fleet", None),
    ("GET", "/v1/scale"): ("/v1/scale", None),
    ("DELETE", "/v1/models/{model}"): ("/v1/models/toy:a", None),
    ("POST", "/v1/files"): ("/v1/files", {}),
    ("GET", "/v1/files"): ("/v1/files", None),
    ("GET", "/v1/files/{file_id}"): ("/v1/files/file-x", None),
    ("DELETE", "/v1/files/{file_id}"): ("/v1/files/file-x", None),
    ("GET", "/v1/files/{file_id}/content"): ("/v1/files/file-x/content", None),
    ("POST", "/v1/fine_tuning/jobs"): ("/v1/fine_tuning/jobs", {"model": "toy", "training_file": "file-x"}),
    ("GET", "/v1/fine_tuning/jobs"): ("/v1/fine_tuning/jobs", None),
    ("GET", "/v1/fine_tuning/jobs/{job_id}"): ("/v1/fine_tuning/jobs/ftjob-x", None),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"): ("/v1/fine_tuning/jobs/ftjob-x/cancel", {}),
    ("GET", "/v1/fine_tuning/jobs/{job_id}/events"): ("/v1/fine_tuning/jobs/ftjob-x/events", None),
    ("GET", "/v1/fine_tuning/jobs/{job_id}/checkpoints"): ("/v1/fine_tuning/jobs/ftjob-x/checkpoints", None),
}
HINTS = {"/v1/advisory", "/v1/invalidate"}
#: Whose answer goes on for ever.
ENDLESS = {"/v1/sessions/{session_id}/events"}


@pytest.fixture(scope="module")
async def h(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    async with harness(tmp_path_factory.mktemp("gateway")) as running:
        yield running
        await running.is_whole()


def served() -> set[tuple[str, str]]:
    """Every route that the application has."""
    application = build(cast(Any, object()))
    routes = {(r.method, r.resource.canonical) for r in application.router.routes() if r.resource is not None}
    return {(method, path) for method, path in routes if method not in ("HEAD", "OPTIONS")}


def test_every_route_is_in_this_table_or_known_to_be_open() -> None:
    rest = served() - set(ASKED) - {("GET", path) for path in OPEN}
    assert all(method == "GET" and not path.startswith("/v1") for method, path in rest), rest
    assert set(ASKED) <= served()


def test_every_route_of_the_api_is_described() -> None:
    described = {(method.upper(), path) for path, operations in openapi()["paths"].items() for method in operations}
    assert set(ASKED) - described == set()


WRONG = {
    "none": {},
    "empty": {"Authorization": ""},
    "no scheme": {"Authorization": KEY_A},
    "another scheme": {"Authorization": f"Basic {KEY_A}"},
    "nothing after the scheme": {"Authorization": "Bearer "},
    "unknown": {"Authorization": "Bearer upb-nobody-has-this-key-at-all"},
    "nearly right": {"Authorization": f"Bearer {KEY_A[:-1]}x"},
    "shorter": {"Authorization": f"Bearer {KEY_A[:-1]}"},
    "longer": {"Authorization": f"Bearer {KEY_A}x"},
    "two keys": {"Authorization": f"Bearer {KEY_A} {KEY_B}"},
    "very long": {"Authorization": "Bearer " + "x" * 10_000},
    "unicode": {"Authorization": "Bearer кey-öf-tenant-💥"},
    "a token of nobody": {"Authorization": "Bearer ek_AAAAAAAAAAAAAAAAAAAAAAAAAAAA"},
    "in another header": {"X-Api-Key": KEY_A, "Api-Key": KEY_A, "Cookie": f"key={KEY_A}"},
}


@pytest.mark.parametrize("how", WRONG)
async def test_no_route_of_the_api_answers_a_wrong_credential(h: Harness, how: str) -> None:
    h.worker.submitted.clear()
    h.scheduler.asked_for.clear()
    for (method, _), (path, body) in ASKED.items():
        if how == "in another header" and is_anthropic(path):
            continue  # whose clients send it there (test_relay_limits)
        answer = await h.ask(method, path, body, key=None, headers=WRONG[how])
        assert answer.status == 401, (method, path, answer)
        assert answer.error["type"] == "authentication_error"
    assert not h.worker.submitted and not h.scheduler.asked_for and not h.scheduler.advised


async def test_the_hash_in_the_configuration_is_no_key(h: Harness) -> None:
    for entry in h.config.gateway.api_keys:
        for credential in (entry.key, entry.key.removeprefix("sha256:")):
            assert (await h.ask("GET", "/v1/models", key=credential)).status == 401


async def test_an_expired_browser_token_is_good_for_nothing(h: Harness) -> None:
    expired = h.token(life_s=-1)
    for (method, _), (path, body) in ASKED.items():
        answer = await h.ask(method, path, body, key=expired)
        assert (answer.status, answer.error["code"]) == (401, "client_secret_expired"), (method, path)
    for path in HINTS:
        answer = await h.ask("POST", path, {"session_id": SESSION, "token": expired}, key=None)
        assert (answer.status, answer.error["code"]) == (401, "client_secret_expired"), path


async def test_a_browser_token_hints_for_its_session_and_does_nothing_else(h: Harness) -> None:
    token = h.token()
    for (method, route), (path, body) in ASKED.items():
        answer = await h.ask(method, path, body, key=token)
        if route in HINTS:
            assert answer.status == 202
            assert (await h.ask(method, path, {"session_id": "another"}, key=token)).status == 403
        elif route not in ENDLESS:
            assert (answer.status, answer.error["code"]) == (403, "client_secret_scope"), (method, path)


async def test_a_changed_browser_token_is_none(h: Harness) -> None:
    token = h.token()
    for i in range(3, len(token), 7):
        changed = token[:i] + ("A" if token[i] != "A" else "B") + token[i + 1 :]
        assert (await h.ask("POST", "/v1/advisory", {"session_id": SESSION}, key=changed)).status == 401, i


async def test_another_tenant_sees_and_changes_nothing_of_a_session(h: Harness) -> None:
    mine = await h.ask("GET", f"/v1/sessions/{SESSION}")
    assert mine.status == 200 and json.loads((await h.ask("GET", "/v1/sessions")).body)["data"]
    h.scheduler.asked_for.clear()
    for method, path in (("GET", ""), ("GET", "/placement"), ("DELETE", "")):
        answer = await h.ask(method, f"/v1/sessions/{SESSION}{path}", key=KEY_B)
        absent = await h.ask(method, f"/v1/sessions/no-such-session{path}", key=KEY_B)
        assert answer.status == absent.status == 404
        assert answer.body.replace(SESSION.encode(), b"X") == absent.body.replace(b"no-such-session", b"X"), (
            "it tells whether a has one"
        )
    assert json.loads((await h.ask("GET", "/v1/sessions", key=KEY_B)).body)["data"] == []
    assert {tenant for _, tenant in h.scheduler.asked_for} == {"b"}
    assert (await h.ask("GET", f"/v1/sessions/{SESSION}")).status == 200, "it is still there"


async def test_another_tenants_requests_and_hints_are_for_its_own_session_of_that_name(h: Harness) -> None:
    h.worker.submitted.clear()
    h.scheduler.advised.clear()
    h.scheduler.invalidated.clear()
    h.scheduler.told.clear()
    for key in (KEY_A, KEY_B):
        assert (
            await h.ask("POST", "/v1/chat/completions", CHAT, key=key, headers={"X-Session-Id": SESSION})
        ).status == 200
        assert (await h.ask("POST", "/v1/advisory", {"session_id": SESSION}, key=key)).status == 202
        assert (await h.ask("POST", "/v1/invalidate", {"session_id": SESSION}, key=key)).status == 202
    assert [(r.tenant, r.session_id) for r in h.worker.submitted] == [("a", SESSION), ("b", SESSION)]

    from gateway_fakes import until

    await until(lambda: len(h.scheduler.invalidated) == 2)
    assert [a.session.tenant for a in h.scheduler.advised] == ["a", "b"]
    assert [i.session.tenant for i in h.scheduler.invalidated] == ["a", "b"]


async def test_no_field_or_header_makes_a_caller_another_tenant(h: Harness) -> None:
    h.worker.submitted.clear()
    claims = {
        "X-Tenant": "a",
        "X-Upbeat-Tenant": "a",
        "X-Tenant-Id": "a",
        "OpenAI-Organization": "a",
        "OpenAI-Project": "a",
    }
    assert (
        await h.ask("POST", "/v1/chat/completions", CHAT | {"user": "a", "metadata": {"tenant": "a"}}, KEY_B, claims)
    ).status == 200
    assert (await h.ask("POST", "/v1/chat/completions", CHAT | {"tenant": "a"}, KEY_B)).status == 400
    assert (await h.ask("POST", "/v1/advisory", {"session_id": "x", "tenant": "a"}, KEY_B)).status == 400
    assert (await h.ask("GET", "/v1/sessions?tenant=a", key=KEY_B)).status in (200, 400)
    assert {r.tenant for r in h.worker.submitted} == {"b"}
    assert ("ListSessions", "a") not in h.scheduler.asked_for[-1:]


async def test_workflows_are_their_tenants(h: Harness) -> None:
    assert (await h.ask("PUT", "/v1/workflows/mine", {"agents": ["one"]})).status == 200
    for method in ("GET", "DELETE"):
        assert (await h.ask(method, "/v1/workflows/mine", key=KEY_B)).status == 404
    assert json.loads((await h.ask("GET", "/v1/workflows", key=KEY_B)).body)["data"] == []
    assert (await h.ask("GET", "/v1/workflows/mine")).status == 200


async def test_an_answer_to_a_hint_is_the_same_whether_its_session_exists(h: Harness) -> None:
    """The deterministic part; what a clock can see is in test_security_timing.py."""
    for path in sorted(HINTS):
        shapes = set()
        for session in (SESSION, "chat-9", "chat-8"):
            answer = await h.ask("POST", path, {"session_id": session})
            assert answer.status == 202
            body = json.loads(answer.body)
            assert body.pop("session_id") == session
            advisory_id = body.pop("advisory_id", "")
            headers = {k: v for k, v in answer.headers.items() if k not in {"date", "x-request-id"}}
            shapes.add((json.dumps(body), len(advisory_id), len(answer.body), json.dumps(headers)))
        assert len(shapes) == 1, shapes


async def test_open_routes_say_nothing_of_tenants(h: Harness) -> None:
    await h.ask("POST", "/v1/chat/completions", CHAT, headers={"X-Session-Id": "a-secret-session"})
    for path in sorted(OPEN):
        answer = await h.ask("GET", path, key=None)
        assert answer.status == 200, path
        for secret in (
            KEY_A,
            KEY_B,
            "a-secret-session",
            SESSION,
            h.config.gateway.token_secret,
            h.config.gateway.api_keys[0].key,
        ):
            assert secret.encode() not in answer.body, (path, secret)
