"""Two devices on one node: conversations run on both, move between them through the node's DRAM, and outlive a
worker."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtest.stack import Stack
from tests.e2e.chat import ALWAYS_LOAD, Chat, script, uncached
from tests.e2e.test_any_node_any_tier import MODEL, SMALL, converse, settled

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
DEVICES = ["node-0/0", "node-0/1"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One node of two devices."""
    settings = {"nodes": {"devices": 2}, "worker": {"dtype": "float32"}, **ALWAYS_LOAD}
    with Stack(model=MODEL, nodes=1, directory=tmp_path_factory.mktemp("devices"), settings=settings, **SMALL) as made:
        yield made


def alternate(turn: int) -> str:
    return DEVICES[turn % 2]


def pids(stack: Stack) -> dict[str, int]:
    found: dict[str, int] = json.loads((stack.run_dir / "pids.json").read_text())
    return found


def samples(stack: Stack) -> dict[str, dict[str, float]]:
    """What each device's worker and the node's store last said of themselves."""
    fleet = httpx.get(f"{stack.url}/v1/fleet?metrics=true", timeout=10).json()
    return {node["node"]: node["metrics"] for node in fleet["nodes"]}


def until(what: str, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_conversations_spread_over_both_devices_and_say_what_they_say_alone(stack: Stack) -> None:
    expected = uncached(stack.url, script(1, 4))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        each = [pool.submit(converse, Chat(stack.url, f"beside-{n}"), script(1, 4)) for n in range(6)]
        answers = [asked.result() for asked in each]
    assert all([a.text for a in said] == expected for said in answers)
    assert {a.node for said in answers for a in said} == set(DEVICES)


def test_turns_that_alternate_between_the_devices_find_their_cache_in_the_nodes_dram(stack: Stack) -> None:
    chat, answers = Chat(stack.url, "moving"), []
    for turn, line in enumerate(script(2, 4)):
        answers.append(chat.say(line, alternate(turn)))
        settled(stack.url, "moving", "dram", "node-0")
    assert [a.text for a in answers] == uncached(stack.url, script(2, 4))
    assert [a.node for a in answers] == [alternate(turn) for turn in range(4)]
    assert all(a.cached_tokens >= 64 for a in answers[1:]), [a.cached_tokens for a in answers]
    until(
        "both devices have read from DRAM",
        lambda: all(s['upbeat_worker_loaded_bytes_total{for="demand"}'] > 0 for s in samples(stack).values()),
    )
    for said in samples(stack).values():
        assert not said.get('upbeat_kvstore_read_bytes_total{source="peer"}') and not said.get(
            'upbeat_kvstore_read_bytes_total{source="ssd"}'
        )
    info = httpx.get(f"{stack.url}/v1/sessions/moving", timeout=10).json()
    assert [node["node"] for node in info["nodes"]] == ["node-0"] == info["held_by"]


def test_a_hint_brings_the_cache_into_the_hbm_of_the_device_that_is_to_answer(stack: Stack) -> None:
    chat, lines = Chat(stack.url, "hinted"), script(3, 4)
    answers = [chat.say(lines[0], "node-0/0")]
    settled(stack.url, "hinted", "dram", "node-0")
    before = _hinted(stack)
    chat.advise("node-0/1")
    until("its HBM has it", lambda: _hinted(stack)["node-0/1"] > before["node-0/1"])
    answers.append(chat.say(lines[1]))
    assert _hinted(stack)["node-0/0"] == before["node-0/0"]
    answers += [chat.say(line, "node-0") for line in lines[2:]]
    assert [a.text for a in answers] == uncached(stack.url, script(3, 4))
    assert answers[1].node == "node-0/1" and answers[1].cached_tokens >= 64


def _hinted(stack: Stack) -> dict[str, float]:
    """Bytes that hints have brought into each device's HBM."""
    return {
        device: said.get('upbeat_worker_loaded_bytes_total{for="hint"}', 0.0) for device, said in samples(stack).items()
    }


def test_a_killed_worker_leaves_the_other_device_in_service_and_comes_back(stack: Stack) -> None:
    chat, lines = Chat(stack.url, "killed"), script(4, 4)
    answers = [chat.say(lines[0], "node-0/1")]
    settled(stack.url, "killed", "dram", "node-0")
    store, other, killed = (pids(stack)[name] for name in ("kvstore-0", "worker-0-0", "worker-0-1"))
    os.kill(killed, signal.SIGKILL)
    answers += [chat.say(line, "node-0") for line in lines[1:3]]
    assert [a.node for a in answers] == ["node-0/1", "node-0/0", "node-0/0"] and answers[1].cached_tokens >= 64
    until("the whole stack serves again", lambda: httpx.get(f"{stack.url}/ready?all=1", timeout=5).status_code == 200)
    answers.append(chat.say(lines[3], "node-0/1"))
    assert [a.text for a in answers] == uncached(stack.url, script(4, 4)) and answers[3].cached_tokens >= 64
    assert psutil.pid_exists(store) and (pids(stack)["kvstore-0"], pids(stack)["worker-0-0"]) == (store, other)
    assert pids(stack)["worker-0-1"] != killed


def test_status_shows_each_device(stack: Stack) -> None:
    upbeat = str(Path(sys.executable).with_name("upbeat"))
    done = subprocess.run([upbeat, "status", "--json", "--url", stack.url], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["all_serve"] and said["expected_nodes"] == 2
    assert [(n["node"], n["on_node"], n["device"], n["state"]) for n in said["nodes"]] == [
        ("node-0/0", "node-0", 0, "serving"),
        ("node-0/1", "node-0", 1, "serving"),
    ]
    shown = subprocess.run([upbeat, "status", "--url", stack.url], capture_output=True, text=True, check=True).stdout
    assert "2 of 2 devices serve" in shown
