"""A tenant whose schemas hang, crash or eat what compiles them is refused; the node's other tenants do not notice. A
whole stack."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtest.stack import Stack

MODEL = Path(__file__).parents[2] / "models" / "demo"
KEYS = {tenant: f"key-of-tenant-{tenant}-with-enough-characters" for tenant in ("attacker", "victim")}

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"gateway": {"api_keys": [{"key": key, "tenant": tenant} for tenant, key in KEYS.items()]}}
    with Stack(
        model=MODEL, nodes=1, directory=tmp_path_factory.mktemp("stack"), hbm_gib=0.25, dram_gib=0.25, settings=settings
    ) as made:
        yield made


def ask(stack: Stack, tenant: str, **more: Any) -> tuple[httpx.Response, float]:
    """The answer, and the seconds until it was whole."""
    messages = [{"role": "user", "content": "What is my name?"}]
    body = {"model": "upbeat-demo", "messages": messages, "temperature": 0, "max_tokens": 24, **more}
    began = time.monotonic()
    answer = httpx.post(
        f"{stack.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEYS[tenant]}"}, timeout=60
    )
    return answer, time.monotonic() - began


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


def patterns(count: int, first: str = "a") -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"(.*{first}{chr(97 + i % 26)}{i}.*)"} for i in range(count)]}


def references(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def worker_of(stack: Stack) -> psutil.Process:
    started = {p: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
    [found] = [p for p, line in started.items() if "upbeat-worker" in line and str(stack.run_dir) in line]
    return found


def test_every_hostile_schema_is_refused_within_seconds_and_again_at_once(stack: Stack) -> None:
    before = worker_of(stack)
    for schema in (patterns(20), patterns(24), patterns(200), references(6000)):
        answer, first = ask(stack, "attacker", response_format=format_of(schema))
        assert answer.status_code == 400 and first < 5, answer.text
        assert (
            answer.json()["error"]["param"] == "response_format"
            and answer.json()["error"]["code"] == "unsupported_schema"
        )
        again, took = ask(stack, "attacker", response_format=format_of(schema))
        assert again.json()["error"] == answer.json()["error"] and took < max(0.5, first / 4)
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": patterns(24)}}},
        }
    ]
    answer, took = ask(stack, "attacker", tools=tools)
    assert answer.status_code == 400 and took < 5 and answer.json()["error"]["param"].startswith("tools")
    answer, _ = ask(stack, "attacker", response_format={"type": "json_object"})
    assert answer.status_code == 200, "after kills everything works again"
    assert worker_of(stack).pid == before.pid and before.is_running()


def test_other_tenants_keep_their_pace_meanwhile(stack: Stack) -> None:
    plain: dict[str, Any] = {}
    guided = {"response_format": {"type": "json_object"}, "max_tokens": 8}

    def times(options: dict[str, Any], texts: set[str]) -> float:
        taken = []
        for _ in range(12):
            answer, took = ask(stack, "victim", **options)
            assert answer.status_code == 200, answer.text
            texts.add(json.dumps(answer.json()["choices"]))
            taken.append(took)
        return statistics.median(taken)

    texts: dict[str, set[str]] = {"plain": set(), "guided": set()}
    for _ in range(2):  # the second time, everything is warm
        quiet = {"plain": times(plain, texts["plain"]), "guided": times(guided, texts["guided"])}
    stopped = threading.Event()
    ends: list[tuple[int, float]] = []

    def attack(number: int) -> None:
        for n in range(1000):
            if stopped.is_set():
                return
            answer, took = ask(stack, "attacker", response_format=format_of(patterns(22 + n % 3, f"{number}x{n}")))
            ends.append((answer.status_code, took))

    attackers = [threading.Thread(target=attack, args=(n,)) for n in range(3)]
    for thread in attackers:
        thread.start()
    try:
        time.sleep(0.3)
        beside = {"plain": times(plain, texts["plain"]), "guided": times(guided, texts["guided"])}
        other, took = ask(stack, "victim", response_format=format_of({"enum": ["a schema", "that is new"]}))
        assert other.status_code == 200 and took < 2
    finally:
        stopped.set()
        for thread in attackers:
            thread.join()
    assert {status for status, _ in ends} <= {400, 429} and ends
    assert all(len(seen) == 1 for seen in texts.values()), "the same answers as on a quiet stack"
    for kind in quiet:
        assert beside[kind] < 2 * quiet[kind] + 0.1, (quiet, beside)
