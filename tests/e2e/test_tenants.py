"""Two tenants of one stack, whose gateway is two processes: neither sees, uses or erases anything of the other's."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from contracts.api_keys import hashed
from contracts.cluster import log_key
from loadtest.stack import Stack
from runtime.telemetry import hashed_id
from tests.signed_rank import standing_out

MODEL = Path(__file__).parents[2] / "models" / "demo"
KEYS = {tenant: f"key-of-tenant-{tenant}-with-enough-characters" for tenant in "ab"}
SESSION = "the-same-name"
ASKED = "The code of the garage is K4417, and the code of the attic is Z9001. " * 12 + "What is the code of the garage?"

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keys = [{"key": hashed(KEYS["a"]), "tenant": "a"}, {"key": KEYS["b"], "tenant": "b"}]
    settings = {"gateway": {"api_keys": keys, "processes": 2}}
    with Stack(
        model=MODEL, nodes=1, directory=tmp_path_factory.mktemp("stack"), hbm_gib=0.25, dram_gib=0.25, settings=settings
    ) as made:
        yield made


def ask(stack: Stack, tenant: str, method: str, path: str, body: Any = None) -> httpx.Response:
    # A new connection each time, so that either process may get it.
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.request(method, stack.url + path, json=body, headers=headers, timeout=60)


def cached_tokens(stack: Stack, tenant: str) -> int:
    body = {
        "model": "upbeat-demo",
        "messages": [{"role": "user", "content": ASKED}],
        "session_id": SESSION,
        "max_tokens": 8,
    }
    answer = ask(stack, tenant, "POST", "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.1)


def test_neither_sees_uses_or_erases_what_is_the_others(stack: Stack) -> None:
    assert cached_tokens(stack, "a") == 0
    until(lambda: ask(stack, "a", "GET", f"/v1/sessions/{SESSION}").status_code == 200)
    for method, path in (("GET", ""), ("GET", "/placement"), ("DELETE", "")):
        assert ask(stack, "b", method, f"/v1/sessions/{SESSION}{path}").status_code == 404
    assert ask(stack, "b", "GET", "/v1/sessions").json()["data"] == []
    assert ask(stack, "b", "POST", "/v1/advisory", {"session_id": SESSION}).status_code == 202
    assert ask(stack, "b", "POST", "/v1/invalidate", {"session_id": SESSION}).status_code == 202
    assert cached_tokens(stack, "b") == 0, "the same text, of another tenant"
    assert cached_tokens(stack, "a") > 0 and cached_tokens(stack, "b") > 0
    erased = ask(stack, "b", "DELETE", f"/v1/sessions/{SESSION}").json()
    assert erased["deleted"] and cached_tokens(stack, "a") > 0
    assert ask(stack, "a", "GET", f"/v1/sessions/{SESSION}").status_code == 200


def test_both_processes_serve_and_one_that_dies_comes_back(stack: Stack) -> None:
    def seen() -> set[str]:
        try:
            text = httpx.get(f"{stack.url}/metrics", timeout=10).text
        except httpx.HTTPError:
            return set()
        return {
            n
            for n, streams in re.findall(r'upbeat_gateway_worker_streams\{process="(\d)"\} (\S+)', text)
            if float(streams) == 1
        }

    until(lambda: seen() == {"0", "1"})
    pids = json.loads((stack.run_dir / "pids.json").read_text())
    assert {"gateway", "gateway-1"} <= set(pids)
    os.kill(pids["gateway-1"], signal.SIGKILL)
    until(
        lambda: (
            json.loads((stack.run_dir / "pids.json").read_text()).get("gateway-1", pids["gateway-1"])
            != pids["gateway-1"]
        )
    )
    until(lambda: seen() == {"0", "1"})
    assert cached_tokens(stack, "a") >= 0


def test_the_launcher_writes_no_key_in_full(stack: Stack) -> None:
    written = [file for file in stack.run_dir.rglob("*") if file.is_file()]
    assert hashed(KEYS["b"]).encode() in (stack.run_dir / "secrets" / "upbeat-gateway.yaml").read_bytes()
    for file in written:
        content = file.read_bytes()
        assert not any(key.encode() in content for key in KEYS.values()), file


def test_no_process_shows_a_secret_and_no_log_a_session(stack: Stack) -> None:
    cached_tokens(stack, "a")
    secret = (stack.data / "secret").read_text().strip()
    hidden = [*KEYS.values(), *map(hashed, KEYS.values()), secret]
    pids = [stack.pid, *(child.pid for child in psutil.Process(stack.pid).children(recursive=True))]
    assert len(pids) > 5
    for pid in pids:
        shown = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert not [text for text in hidden if text.encode() in shown], pid
    name = hashed_id(log_key(bytes.fromhex(secret)), f"a/{SESSION}")
    until(lambda: name in "".join(log.read_text() for log in (stack.run_dir / "logs").glob("gateway*.log")))
    for log in (stack.run_dir / "logs").iterdir():
        content = log.read_text()
        assert SESSION not in content and not [text for text in hidden if text in content], log


@pytest.mark.parametrize("path", ["/v1/advisory", "/v1/invalidate"])
def test_no_clock_tells_whether_a_session_exists(stack: Stack, path: str) -> None:
    """As tests/gateway/test_security_slow.py, with a scheduler that knows the one session and a node that holds it."""
    cached_tokens(stack, "a")
    until(lambda: ask(stack, "a", "GET", f"/v1/sessions/{SESSION}").status_code == 200)
    rng, differences = random.Random(7), []
    with httpx.Client(headers={"Authorization": f"Bearer {KEYS['a']}"}, timeout=60) as client:

        def timed(session: str) -> float:
            began = time.perf_counter()
            answer = client.post(stack.url + path, json={"session_id": session})
            assert answer.status_code == 202
            return time.perf_counter() - began

        for i in range(1200):
            pair = [SESSION, f"{SESSION[:-2]}{i % 90 + 10}"]
            rng.shuffle(pair)
            took = {session == SESSION: timed(session) for session in pair}
            if i >= 200:
                differences.append(took[True] - took[False])
            time.sleep(0.005)  # what a hint starts in the background is not the next pair's
    away = standing_out(differences)
    median_us = statistics.median(differences) * 1e6
    print(f"{path}: {away:.2f} standard deviations, median {median_us:.1f} µs")
    assert abs(away) < 5, f"{away:.1f} standard deviations; the median of the differences is {median_us:.1f} µs"
