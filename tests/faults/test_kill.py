"""kill -9 of any process while answers stream: others go on, the killed one comes back, and nothing is said wrongly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from loadtest.stack import Stack
from runtime.config_file import load_config
from storelink.arena_sharing import MARK_BYTES, arenas_of
from tests.e2e.chat import Chat, script

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.sample, pytest.mark.timeout(280)]
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))
SERVICES = [
    "upbeat-worker --node 0",
    "upbeat-worker --node 1",
    "upbeat-kvstore --node 0",
    "upbeat-kvstore --node 1",
    "upbeat-scheduler",
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(model=MODEL, nodes=2, directory=tmp_path_factory.mktemp("faults"), hbm_gib=0.25, dram_gib=0.25) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[str]]]:
    """What a cold single node answers to each script."""
    with Stack(model=MODEL, nodes=1, cache=False, hbm_gib=0.25, dram_gib=0.25) as cold:
        yield [_talk(Chat(cold.url, f"c{seed}"), seed) for seed in range(4)]


def _talk(chat: Chat, seed: int) -> list[str]:
    return [chat.say(line).text for line in script(seed, turns=4)]


def process(stack: Stack, service: str) -> psutil.Process:
    """The process of this service that belongs to this stack."""
    words = service.split()
    for p in psutil.process_iter(["cmdline"]):
        line = p.info["cmdline"] or []
        text = " ".join(line)
        if words[0] in text and str(stack.run_dir) in text and " ".join(words[1:]) in text and "upbeat up" not in text:
            return p
    raise AssertionError(f"{service} does not run")


def wait_ready(stack: Stack, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{stack.url}/ready?all=1", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    pytest.fail(f"not ready again within {seconds} s")


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_comes_back_and_every_next_turn_is_right(
    stack: Stack, expected: list[list[str]], service: str
) -> None:
    lines = [script(seed, turns=4) for seed in range(4)]
    chats = [Chat(stack.url, f"{service.replace(' ', '')}-{seed}") for seed in range(4)]
    for seed, chat in enumerate(chats):
        assert chat.say(lines[seed][0], f"node-{seed % 2}").text == expected[seed][0]
    stop = threading.Event()

    def keep_streaming(seed: int) -> list[str]:
        """Turns without pause until told to stop; each either right or a clear error, in which case it is said
        again."""
        problems = []
        chat, said = chats[seed], 1
        while not stop.is_set() or said < 4:
            if said == 4:
                chat.messages, said = [], 0
            before = list(chat.messages)
            try:
                text = chat.say(lines[seed][said]).text
            except (openai.APIError, httpx.HTTPError) as e:
                chat.messages = before
                problems.append(f"{type(e).__name__}: {e}")
                time.sleep(0.2)
                continue
            assert text == expected[seed][said], f"turn {said} of session {seed} is wrong"
            said += 1
        return problems

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(keep_streaming, seed) for seed in range(4)]
        try:
            time.sleep(1.0)
            victim = process(stack, service)
            victim.kill()
            time.sleep(3.0)
            wait_ready(stack)
        finally:
            stop.set()
        failures = [error for f in running for error in f.result(timeout=60)]
    assert process(stack, service).pid != victim.pid
    assert not failures, "a request outlives any one process: it goes on elsewhere, or waits for the restart"
    for seed, chat in enumerate(chats):
        chat.messages = []
        assert _talk(chat, seed) == expected[seed]


def test_a_killed_gateway_comes_back(stack: Stack, expected: list[list[str]]) -> None:
    process(stack, "upbeat-gateway").kill()
    time.sleep(0.5)
    wait_ready(stack)
    assert _talk(Chat(stack.url, "after-gateway"), 0) == expected[0]


def test_nothing_is_left_in_shared_memory_after_a_stop(tmp_path: Path) -> None:
    with Stack(model=MODEL, nodes=1, directory=tmp_path, hbm_gib=0.25, dram_gib=0.25) as made:
        stem = load_config(None, {"data": str(made.data)}).node(0).arena_stem
        (arena,) = arenas_of(stem)
        assert arena.stat().st_size == (1 << 28) + MARK_BYTES
        made.stop()
        assert not arenas_of(stem)
