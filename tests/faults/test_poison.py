"""Requests that kill or hang engines, workers that stand still, prompts that fill a stream: each costs its sender, and
nobody beside it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.stack import Stack
from tests.faults.test_kill import process, wait_ready

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(280)]
MODEL = Path(__file__).parents[2] / "models" / "demo"
KILLS = "xyzzykillsengines"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two nodes, whose engines die of a word."""
    settings = {"worker": {"failpoints": {"step": f"kill:{KILLS}"}}}
    with Stack(
        model=MODEL,
        nodes=2,
        directory=tmp_path_factory.mktemp("poison"),
        hbm_gib=0.25,
        dram_gib=0.25,
        settings=settings,
    ) as made:
        yield made


def ask(stack: Stack, text: str, tokens: int = 200, **more: Any) -> httpx.Response:
    body = {
        "model": "upbeat-demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    headers = {"X-Upbeat-Node": more.pop("node")} if "node" in more else {}
    return httpx.post(
        f"{stack.url}/v1/chat/completions", json=body | {"ignore_eos": True} | more, headers=headers, timeout=90
    )


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def honest(number: int) -> str:
    return f"My name is Person{number} and I live in town number {number}. What is my name? " * 3


def beside(stack: Stack, pool: ThreadPoolExecutor, numbers: range, **more: Any) -> list[Future[httpx.Response]]:
    """Honest requests that run for a while."""
    going = [pool.submit(ask, stack, honest(n), **more) for n in numbers]
    time.sleep(0.5)
    return going


def workers(stack: Stack) -> set[int]:
    return {process(stack, f"upbeat-worker --node {n}").pid for n in range(2)}


def told(stack: Stack, what: str) -> int:
    """How often the services' logs say so."""
    return sum(path.read_text(errors="replace").count(what) for path in (stack.run_dir / "logs").iterdir())


def deaths(stack: Stack) -> int:
    return told(stack, '"event": "failpoint"')


@pytest.mark.sample
def test_a_request_that_kills_its_engine_is_refused_and_all_others_finish_as_if_alone(stack: Stack) -> None:
    alone = [said(ask(stack, honest(n), 400)) for n in range(4)]
    before = deaths(stack)
    with ThreadPoolExecutor(8) as pool:
        going = beside(stack, pool, range(4), tokens=400)
        poison = ask(stack, f"{KILLS} is a word. " * 4)
        assert poison.status_code == 400 and poison.json()["error"]["code"] == "poisonous_request", poison.text
        assert [said(f.result()) for f in going] == alone
    assert deaths(stack) - before == 2
    began = time.monotonic()
    again = ask(stack, f"{KILLS} is a word. " * 4)
    assert (again.status_code, again.json()["error"]["code"]) == (
        400,
        "poisonous_request",
    ) and time.monotonic() - began < 0.5
    assert deaths(stack) - before == 2, "it never reached an engine"
    wait_ready(stack, 40)


@pytest.mark.sample
def test_a_worker_that_is_stopped_loses_its_requests_to_the_other_and_holds_none_when_it_goes_on(stack: Stack) -> None:
    wait_ready(stack, 40)
    alone = [said(ask(stack, honest(n), 600)) for n in range(4)]
    victim = process(stack, "upbeat-worker --node 0")
    with ThreadPoolExecutor(8) as pool:
        going = beside(stack, pool, range(4), tokens=600)
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            assert [said(f.result()) for f in going] == alone
            took_s = time.monotonic() - began
        finally:
            os.kill(victim.pid, signal.SIGCONT)
    assert took_s < 15, took_s
    wait_ready(stack, 20)
    deadline = time.monotonic() + 10
    while any(n["running"] + n["waiting"] for n in httpx.get(f"{stack.url}/v1/fleet", timeout=5).json()["nodes"]):
        assert time.monotonic() < deadline, "it holds requests that nobody waits for"
        time.sleep(0.2)
    assert [said(ask(stack, honest(n), 600)) for n in range(2)] == alone[:2]


@pytest.mark.sample
def test_large_prompts_break_no_stream_and_change_nobodys_text(stack: Stack) -> None:
    wait_ready(stack, 40)
    pids, lost = workers(stack), told(stack, "stream lost")
    expected = said(ask(stack, honest(0), 40))
    # 15 MiB of JSON each: more than any prompt of this model can be, so that none of it gets as far as a worker
    # (tests/gateway/test_flights.py has a model that could take them).
    body = {"model": "upbeat-demo", "prompt": [5] * ((15 << 20) // 2 - 100), "max_tokens": 1}
    with ThreadPoolExecutor(8) as pool:
        large = [pool.submit(httpx.post, f"{stack.url}/v1/completions", json=body, timeout=90) for _ in range(5)]
        while not all(f.done() for f in large):
            assert said(ask(stack, honest(0), 40)) == expected
        for f in large:
            assert (f.result().status_code, f.result().json()["error"]["code"]) == (413, "body_too_large"), (
                f.result().text[:200]
            )
    assert workers(stack) == pids and told(stack, "stream lost") == lost, "no stream broke"


def test_a_request_that_hangs_its_engine_is_refused_and_all_others_finish_as_if_alone(tmp_path: Path) -> None:
    settings = {"worker": {"failpoints": {"step": f"hang:{KILLS}"}}}
    with Stack(
        model=MODEL, nodes=3, directory=tmp_path, hbm_gib=0.25, dram_gib=0.25, settings=settings, stop_s=5
    ) as stack:
        alone = [said(ask(stack, honest(n), 400)) for n in range(3)]
        with ThreadPoolExecutor(8) as pool:
            going = beside(stack, pool, range(3), tokens=400)
            poison = ask(stack, f"{KILLS} is a word. " * 4)
            assert (poison.status_code, poison.json()["error"]["code"]) == (400, "poisonous_request"), poison.text
            assert [said(f.result()) for f in going] == alone
        assert deaths(stack) == 2
        assert said(ask(stack, honest(0), 400)) == alone[0], "the third node serves"
