"""What web pages can make a browser do to a gateway process without keys, and which bodies count as JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from security_harness import CHAT, KEY_A, SESSION, Answer, Harness, harness

ROUTES = [
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/sessions"),
    ("GET", f"/v1/sessions/{SESSION}"),
    ("GET", f"/v1/sessions/{SESSION}/events"),
    ("DELETE", f"/v1/sessions/{SESSION}"),
    ("GET", "/v1/workflows"),
    ("PUT", "/v1/workflows/w"),
    ("GET", "/v1/fleet"),
    ("GET", "/v1/scale"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/advisory"),
    ("POST", "/v1/invalidate"),
    ("POST", "/v1/client_secrets"),
    ("OPTIONS", "/v1/chat/completions"),
    ("GET", "/nothing/of/the/kind"),
]
BODIES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/client_secrets"),
    ("PUT", "/v1/workflows/w"),
]


@pytest.fixture(scope="module")
async def o(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway without keys."""
    async with harness(tmp_path_factory.mktemp("open"), api_keys=[]) as running:
        yield running


@pytest.fixture(scope="module")
async def k(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway with keys."""
    async with harness(tmp_path_factory.mktemp("keys")) as running:
        yield running


def untouched(h: Harness) -> bool:
    """Nothing of a request has reached whom it was for."""
    scheduler = h.scheduler
    return not (
        h.worker.submitted
        or h.worker.asked
        or scheduler.asked_for
        or scheduler.erased
        or scheduler.advised
        or scheduler.invalidated
    )


def code_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.error["code"]


# ---- Host ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_no_route_is_served_under_a_foreign_name(o: Harness, method: str, path: str) -> None:
    for host in ("evil.example", f"evil.example:{o.port}", f"127.0.0.1.nip.io:{o.port}"):
        answer = await o.ask(
            method, path, CHAT if method in ("POST", "PUT") else None, key=None, headers={"Host": host}
        )
        assert code_of(answer) == (421, "host_not_allowed") and answer.error["param"] == "Host"
    assert untouched(o)


async def test_a_target_that_names_a_foreign_host_is_not_served_either(o: Harness) -> None:
    for target, host in (
        ("http://evil.example/v1/models", f"127.0.0.1:{o.port}"),
        (f"http://127.0.0.1:{o.port}/v1/models", "evil.example"),
        ("http://127.0.0.1@evil.example/v1/models", "127.0.0.1"),
        ("HTTP://EVIL.EXAMPLE:8080/v1/models", "127.0.0.1"),
    ):
        assert (await o.ask("GET", target, key=None, headers={"Host": host})).status in (400, 421), target
    ours = f"127.0.0.1:{o.port}"
    assert (await o.ask("GET", f"http://{ours}/v1/models", key=None, headers={"Host": ours})).status == 200
    assert (await o.ask("GET", "//evil.example/v1/models", key=None, headers={"Host": ours})).status in (400, 404)
    assert untouched(o)


async def test_names_of_loopback_are_served_however_they_are_written(o: Harness) -> None:
    for host in ("localhost", f"LOCALHOST.:{o.port}", "127.0.0.1:9", f"[::1]:{o.port}", "[0:0::1]"):
        assert (await o.ask("GET", "/v1/models", key=None, headers={"Host": host})).status == 200, host


async def test_a_request_needs_one_host_unless_it_is_older_than_the_header(o: Harness) -> None:
    assert (await o.raw(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")).status == 400
    assert (
        await o.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
    ).status == 400
    assert (await o.raw(b"GET /health HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n")).status in (400, 421)
    assert (await o.raw(b"GET /health HTTP/1.0\r\n\r\n")).status == 200, "no browser speaks so"
    assert (await o.raw(b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n")).status == 421


async def test_with_keys_any_name_is_served_unless_some_are_listed(k: Harness, tmp_path: Path) -> None:
    assert (await k.ask("GET", "/v1/models", headers={"Host": "anything.example"})).status == 200
    async with harness(tmp_path, hosts=["chat.example.org"]) as listed:
        assert code_of(await listed.ask("GET", "/v1/models", headers={"Host": "anything.example"})) == (
            421,
            "host_not_allowed",
        )
        for host in ("chat.example.org:443", f"127.0.0.1:{listed.port}"):
            assert (await listed.ask("GET", "/v1/models", headers={"Host": host})).status == 200


# ---- pages of other sites ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("method", "path"), [r for r in ROUTES if r[1].startswith("/v1/")])
async def test_without_keys_a_page_of_another_site_reaches_nothing(o: Harness, method: str, path: str) -> None:
    """Neither with a script (it has an Origin) nor as an image, a form or an event source (it has Sec-Fetch-Site)."""
    o.worker.submitted.clear()
    body = CHAT if method in ("POST", "PUT") else None
    for said in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ):
        answer = await o.ask(method, path, body, key=None, headers={"Host": f"localhost:{o.port}", **said})
        assert code_of(answer) == (403, "origin_not_allowed")
        assert "--cors-origin" in answer.error["message"] and "gateway.cors_origins" in answer.error["message"]
        assert answer.headers.get("access-control-allow-origin") in (None, "*"), (
            "of hints everybody may read what became of them"
        )
    assert untouched(o)


async def test_without_keys_forms_and_plain_text_of_another_site_withdraw_no_hints_and_generate_nothing(
    o: Harness,
) -> None:
    o.worker.submitted.clear()
    for path, content in (
        ("/v1/invalidate", {"session_id": SESSION}),
        ("/v1/advisory", {"session_id": SESSION}),
        ("/v1/chat/completions", CHAT),
    ):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            said = {
                "Host": "localhost",
                "Content-Type": kind,
                "Origin": "https://evil.example",
                "Sec-Fetch-Site": "cross-site",
            }
            assert (await o.ask("POST", path, json.dumps(content).encode(), key=None, headers=said)).status == 403
    assert untouched(o)


async def test_links_from_elsewhere_lead_to_the_pages_of_this_server(o: Harness) -> None:
    said = {"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    for path in ("/", "/docs", "/upbeat.js"):
        assert (await o.ask("GET", path, key=None, headers=said)).status == 200


async def test_pages_of_this_machine_and_programs_are_served(o: Harness) -> None:
    for said in (
        {},
        {"Origin": f"http://localhost:{o.port}"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Sec-Fetch-Site": "same-origin"},
    ):
        answer = await o.ask(
            "POST", "/v1/chat/completions", CHAT, key=None, headers={"Host": f"127.0.0.1:{o.port}", **said}
        )
        assert answer.status == 200, said
        hint = await o.ask(
            "POST", "/v1/advisory", {"session_id": SESSION}, key=None, headers={"Host": "localhost", **said}
        )
        assert hint.status == 202, said


async def test_with_keys_a_page_anywhere_may_hint_with_its_token(k: Harness) -> None:
    said = {
        "Origin": "https://chat.example.org",
        "Sec-Fetch-Site": "cross-site",
        "Content-Type": "text/plain;charset=UTF-8",
    }
    body = {"session_id": SESSION, "token": k.token()}
    assert (await k.ask("POST", "/v1/advisory", body, key=None, headers=said)).status == 202


# ---- Content-Type --------------------------------------------------------------------------------------------------
SIMPLE = [
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
]
NOT_JSON = [
    *SIMPLE,
    "",
    "json",
    "application/jsonp",
    "application/x-json",
    "text/json",
    "text/plain; application/json",
    "text/plain, application/json",
    "application/json, text/plain",
]


@pytest.mark.parametrize(("method", "path"), BODIES)
async def test_a_body_that_is_not_said_to_be_json_is_refused(k: Harness, method: str, path: str) -> None:
    for kind in NOT_JSON:
        answer = await k.ask(method, path, CHAT, headers={"Content-Type": kind})
        assert code_of(answer) == (415, "unsupported_media_type") and answer.error["param"] == "Content-Type", kind
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY_A}\r\nConnection: "
        "close\r\nContent-Length: 2\r\n"
    )
    assert (await k.raw(f"{head}\r\n{{}}".encode())).status == 415, "a page can send a body of no type, too"
    twice = "Content-Type: text/plain\r\nContent-Type: application/json\r\n"
    assert (await k.raw(f"{head}{twice}\r\n{{}}".encode())).status in (400, 415)
    assert not k.worker.submitted


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "application/json;x=y"]
)
async def test_json_by_any_of_its_names_is_read(k: Harness, kind: str) -> None:
    assert (await k.ask("POST", "/v1/chat/completions", CHAT, headers={"Content-Type": kind})).status == 200
    k.worker.submitted.clear()


async def test_hints_are_read_whatever_they_are_called(k: Harness) -> None:
    for kind in ["application/json", *SIMPLE, ""]:
        assert (
            await k.ask("POST", "/v1/advisory", {"session_id": SESSION}, headers={"Content-Type": kind})
        ).status == 202
