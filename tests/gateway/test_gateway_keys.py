"""API keys: hashed where they lie, told apart in constant time, and whose pages may call with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from gateway_fakes import MODEL, Stack, stack
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from contracts.api_keys import configured_digest, hashed, is_hashed, new_key
from contracts.errors import ConfigError, Unauthorized
from gateway.core.admission import Caller, Keys
from gateway.cors import cors_headers, listing
from gateway.siblings import merged
from runtime.config_file import dump_config, load_config, with_hashed_keys

LONG = "a-key-that-is-long-enough-to-be-hashed"


def upbeat(*words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    program = "import sys; from cli.main import app; sys.argv[0] = 'upbeat'; app()"
    return subprocess.run(
        [sys.executable, "-c", program, *words], input=said, capture_output=True, text=True, check=False, env=os.environ
    )


# ---- how they are kept ---------------------------------------------------------------------------------------------
def test_a_new_key_works_by_the_line_that_is_printed_for_the_configuration() -> None:
    made = json.loads(upbeat("keys", "new", "--tenant", "research", "--json").stdout)
    key, entry = made["api_key"], made["configuration"]
    config = load_config(None, {"gateway": {"api_keys": [entry]}})
    assert key not in dump_config(config) and len(key) > 40
    keys = Keys((k.key, Caller(k.tenant)) for k in config.gateway.api_keys)
    assert keys.caller(key).tenant == "research"
    with pytest.raises(Unauthorized):
        keys.caller(entry["key"])  # whoever reads the configuration cannot call


def test_a_key_that_clients_have_already_is_hashed_from_standard_input() -> None:
    done = upbeat("keys", "hash", "--tenant", "a", said=f"{LONG}\n")
    assert LONG not in done.stdout and hashed(LONG) in done.stdout
    done = upbeat("keys", "hash", said="short-one\n")
    assert done.returncode == 2 and "upbeat keys new" in done.stderr and "Traceback" not in done.stderr
    done = upbeat("keys", "new", "--tenant", "a b")
    assert done.returncode == 2 and "--tenant" in done.stderr


def test_what_a_launcher_writes_to_disk_holds_no_key_that_can_be_used() -> None:
    config = load_config(
        None, {"gateway": {"api_keys": [{"key": LONG}, {"key": hashed("x" * 30)}, {"key": "short-key"}]}}
    )
    written = with_hashed_keys(config)
    assert [is_hashed(k.key) for k in written.gateway.api_keys] == [True, True, False]
    assert LONG not in dump_config(written)
    assert [configured_digest(k.key) for k in written.gateway.api_keys] == [
        configured_digest(k.key) for k in config.gateway.api_keys
    ]


@pytest.mark.parametrize("key", ["sha256:abc", "sha256:" + "G" * 64, "short"])
def test_a_wrong_key_stops_the_start_and_is_not_printed(key: str) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, {"gateway": {"api_keys": [{"key": key}]}})
    assert "gateway.api_keys.0.key" in str(e.value) and key not in str(e.value)


@given(
    st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=8),
    st.text(max_size=20),
    st.binary(min_size=32, max_size=32),
)
@settings(deadline=None, max_examples=200)
def test_a_key_is_whose_it_is_and_nothing_else_is_a_key(known: list[str], other: str, blind: bytes) -> None:
    keys = Keys([(hashed_or_not(k, i), Caller(f"t{i}")) for i, k in enumerate(known)], blind)
    for i, key in enumerate(known):
        assert keys.caller(key).tenant == f"t{i}"
    if known and other not in known:
        with pytest.raises(Unauthorized):
            keys.caller(other)


def hashed_or_not(key: str, i: int) -> str:
    return "sha256:" + configured_digest(key).hex() if i % 2 else key


def test_new_keys_have_all_the_randomness_that_they_were_given() -> None:
    assert len({new_key(bytes([i]) * 32) for i in range(256)}) == 256


# ---- pages ---------------------------------------------------------------------------------------------------------
PAGE = {"Origin": "https://chat.example.org"}


@pytest.mark.parametrize(
    ("path", "origin", "origins", "allowed"),
    [
        ("/v1/advisory", None, (), "*"),
        ("/v1/invalidate", "https://x.org", ("https://y.org",), "*"),
        ("/v1/models", "https://x.org", (), None),
        ("/v1/models", "https://x.org", ("https://x.org",), "https://x.org"),
        ("/v1/models", "https://x.org.evil", ("https://x.org",), None),
        ("/v1/models", "null", ("https://x.org",), None),
        ("/v1/models", "https://x.org", ("*",), "*"),
        ("/metrics", "https://x.org", ("*",), None),
    ],
)
def test_which_page_may_read_what(path: str, origin: str | None, origins: tuple[str, ...], allowed: str | None) -> None:
    found = cors_headers(path, origin, origins)
    assert found.get("Access-Control-Allow-Origin") == allowed
    assert "Access-Control-Allow-Credentials" not in found
    assert ("Vary" in found) == (bool(origins) and "*" not in origins and path == "/v1/models")


def test_an_origin_that_is_none_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.cors_origins.*https://chat\.example\.org"):
        load_config(None, {"gateway": {"cors_origins": ["chat.example.org/path"]}})


@pytest.fixture
async def s() -> Any:
    async with stack(1, cors_origins=[PAGE["Origin"]]) as running:
        yield running


async def test_a_page_of_a_configured_origin_may_call_and_read_streams_and_errors(s: Stack) -> None:
    url = f"{s.url}/v1/chat/completions"
    ask = {
        **PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with s.http.options(url, headers=ask) as r:
        assert r.status == 204 and r.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]
        assert "authorization" in r.headers["Access-Control-Allow-Headers"].lower()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with s.http.post(url, headers=PAGE, json=body) as r:
        assert r.status == 200 and r.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]
        assert "X-Session-Id" in r.headers["Access-Control-Expose-Headers"]
        await r.read()
    async with s.http.post(url, headers=PAGE, json={}) as r:
        assert r.status == 400 and r.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]


async def test_any_other_page_may_only_send_hints() -> None:
    other = {"Origin": "https://evil.example"}
    async with stack(1, wait=False, cors_origins=[PAGE["Origin"]], api_keys=[{"key": "key-of-acme"}]) as s:
        async with s.http.options(f"{s.url}/v1/chat/completions", headers=other) as r:
            told = (await r.json())["error"]
            assert (r.status, told["code"], told["param"]) == (403, "origin_not_allowed", "Origin")
            assert "--cors-origin https://evil.example" in told["message"] and "gateway.cors_origins" in told["message"]
            assert "Access-Control-Allow-Origin" not in r.headers and r.headers["Vary"] == "Origin"
        async with s.http.options(f"{s.url}/v1/chat/completions") as r:
            assert r.status == 405, "no page asks"
        async with s.http.get(f"{s.url}/v1/models", headers=other) as r:
            assert "Access-Control-Allow-Origin" not in r.headers and r.headers["Vary"] == "Origin"
        async with s.http.post(
            f"{s.url}/v1/advisory", headers=other, json={"session_id": "a", "token": "key-of-acme"}
        ) as r:
            assert (r.status, r.headers["Access-Control-Allow-Origin"]) == (202, "*")


async def test_a_page_on_another_port_of_this_machine_is_told_how_to_be_let_in() -> None:
    """Without keys it is trusted as a sender, and yet its browser keeps the answers from it."""
    page = {"Origin": "http://localhost:3000"}
    async with stack(1) as s, s.http.options(f"{s.url}/v1/chat/completions", headers=page) as r:
        assert (
            r.status == 403 and "upbeat up --cors-origin http://localhost:3000" in (await r.json())["error"]["message"]
        )


@pytest.mark.parametrize("origin", ["null", "https://x.org/`rm`", "https://" + "x" * 300, "*"])
async def test_no_origin_that_cannot_be_listed_is_repeated_as_if_it_could(origin: str) -> None:
    assert listing(origin).startswith("`upbeat up --cors-origin ORIGIN`")


async def test_the_first_refusal_of_an_origin_is_logged_as_browsers_hide_it() -> None:
    async with stack(1) as s:
        with capture_logs() as logs:
            for origin in ("https://one.example", "https://one.example", "https://two.example"):
                async with s.http.get(f"{s.url}/v1/models", headers={"Origin": origin}) as r:
                    assert r.status == 403
            for number in range(100):
                async with s.http.get(f"{s.url}/v1/models", headers={"Origin": f"https://many-{number}.example"}) as r:
                    assert r.status == 403
        told = [entry["error"] for entry in logs if entry["event"] == "a page was refused"]
        assert ["one.example" in told[0], "two.example" in told[1]] == [True, True] and all(
            "--cors-origin" in line for line in told
        )
        assert len(told) == len(set(told)) == 64


# ---- several processes ---------------------------------------------------------------------------------------------
def test_metrics_of_processes_are_told_apart_and_keep_their_types() -> None:
    one = '# HELP a_total Things\n# TYPE a_total counter\na_total{x="y"} 2.0\n# HELP g Now\n# TYPE g gauge\ng 1.0\n'
    text = merged({"0": one, "1": one.replace("2.0", "5.0")}).decode()
    assert 'a_total{process="0",x="y"} 2.0' in text and 'a_total{process="1",x="y"} 5.0' in text
    assert text.count("# TYPE a_total counter") == 1 and 'g{process="1"} 1.0' in text


async def test_a_plain_http_client_without_an_origin_sees_no_difference(s: Stack) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{s.url}/health") as r:
        assert r.status == 200 and not [h for h in r.headers if h.startswith("Access-Control")]
