"""A fleet that grows from two nodes to four and shrinks to one while conversations go on: no request fails, every
answer is a cold node's, and no session is computed again whose cache could have moved. The nodes that join have no
number in any file; those that leave are the first ones, and one that had joined."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from loadtest.stack import Stack
from tests.e2e.chat import ALWAYS_LOAD, Answer, Chat, script
from tests.faults.test_kill import MODEL

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(900)]
TALKERS, TURNS, CHUNK = 4, 4, 64
UPBEAT = str(Path(sys.executable).with_name("upbeat"))
#: Between turns; and of load before and after each change of the fleet.
THINK_S, PHASE_S = 0.5, float(os.environ.get("UPBEAT_FAULTS_SECONDS", 30)) / 6
JOIN_S, LEAVE_S = 180.0, 120.0


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[str]]]:
    """What a cold single node answers to each script."""
    with Stack(model=MODEL, nodes=1, cache=False, hbm_gib=0.25, dram_gib=0.25) as cold:
        yield [
            [chat.say(line).text for line in script(seed, turns=TURNS + 1)]
            for seed in range(TALKERS)
            for chat in [Chat(cold.url, f"c{seed}")]
        ]


@dataclass
class Talk:
    """One conversation. turns: its answers."""

    chat: Chat
    seed: int
    turns: list[Answer] = field(default_factory=list)

    def say(self, expected: list[list[str]]) -> None:
        turn = len(self.turns)
        answer = self.chat.say(script(self.seed, turns=TURNS + 1)[turn], timeout_s=120)
        assert answer.text == expected[self.seed][turn], f"turn {turn} of {self.chat.session_id} is wrong"
        self.turns.append(answer)

    def wait_saved(self) -> None:
        """Until the full chunks of the last prompt are below HBM: before that, they cannot move."""
        wanted, deadline, info = self.turns[-1].prompt_tokens // CHUNK * CHUNK, time.monotonic() + 60, {}
        while time.monotonic() < deadline:
            info = httpx.get(f"{self.chat.url}/v1/sessions/{self.chat.session_id}", timeout=10).json()
            tiers = [t for holder in info.get("nodes", ()) for t in holder["tiers"] if t["tier"] != "hbm"]
            if any(t["tokens"] >= wanted for t in tiers):
                return
            time.sleep(0.1)
        raise AssertionError(f"{self.chat.session_id} was not saved: {info}")

    @property
    def recomputed(self) -> int:
        """Turns that computed a whole chunk of the prompt before theirs again."""
        return sum(
            after.cached_tokens < before.prompt_tokens // CHUNK * CHUNK
            for before, after in zip(self.turns, self.turns[1:], strict=False)
        )


class Load:
    """Conversations one after another in each of `TALKERS` threads, until `stop`. Any failure comes out of it."""

    def __init__(self, url: str, expected: list[list[str]]) -> None:
        self._url, self._expected, self._end = url, expected, threading.Event()
        self.talks: list[Talk] = []
        self._pool = ThreadPoolExecutor(TALKERS)
        self._running = [self._pool.submit(self._talk, seed) for seed in range(TALKERS)]

    def _talk(self, seed: int) -> None:
        while not self._end.is_set():
            talk = Talk(Chat(self._url, f"elastic-{seed}-{len(self.talks)}"), seed)
            self.talks.append(talk)
            for _ in range(TURNS):
                talk.say(self._expected)
                talk.wait_saved()
                time.sleep(THINK_S)

    def stop(self) -> list[Talk]:
        """End after the conversations that run."""
        self._end.set()
        try:
            for running in self._running:
                running.result(timeout=180)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
        return self.talks


class Joined:
    """An `upbeat join`, without a number."""

    def __init__(self, stack: Stack, name: str) -> None:
        self.log = stack.directory / f"{name}.log"
        flags = [*_places(stack), "--run-dir", str(stack.directory / name), "--hbm-gib", "0.25", "--dram-gib", "0.25"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([UPBEAT, "join", "--model", str(MODEL), *flags], stdout=log, stderr=log)

    def wait_serving(self) -> None:
        deadline = time.monotonic() + JOIN_S
        while "(ready in" not in (said := self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


def _places(stack: Stack) -> list[str]:
    return ["--port", str(stack.port), "--data", str(stack.data), "--config", str(stack.config_file)]


def _leave(stack: Stack, node: str) -> str:
    done = subprocess.run(
        [UPBEAT, "leave", node, *_places(stack)], capture_output=True, text=True, timeout=LEAVE_S, check=False
    )
    assert done.returncode == 0, f"{node}: {done.stdout}{done.stderr}"
    return done.stdout


def _serving(stack: Stack) -> list[str]:
    nodes = httpx.get(f"{stack.url}/v1/fleet", timeout=10).json()["nodes"]
    return sorted(str(n["node"]) for n in nodes if n["serving"])


def test_a_fleet_grows_from_two_nodes_to_four_and_shrinks_to_one_under_load(
    tmp_path: Path, expected: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    joined: list[Joined] = []
    with Stack(model=MODEL, nodes=2, directory=tmp_path, hbm_gib=0.25, dram_gib=0.25, settings=ALWAYS_LOAD) as stack:
        load = Load(stack.url, expected)
        try:
            time.sleep(PHASE_S)
            for name in ("first", "second"):
                joined.append(Joined(stack, name))
                joined[-1].wait_serving()
            assert _serving(stack) == ["node-0", "node-1", "node-2", "node-3"]
            time.sleep(PHASE_S)
            for node in ("node-0", "node-2", "node-1"):
                assert _leave(stack, node).endswith(f"{node} has left\n")
                time.sleep(PHASE_S)
            assert _serving(stack) == ["node-3"]
            assert httpx.get(f"{stack.url}/ready?all=1", timeout=10).status_code == 200
            assert joined[0].process.wait(30) == 0, "a launcher whose node has left ends"
        finally:
            talks = load.stop()
        for talk in talks:  # nothing of any conversation was lost, also of those that had ended
            talk.say(expected)
        refused = subprocess.run(
            [UPBEAT, "leave", "node-3", *_places(stack)], capture_output=True, text=True, timeout=LEAVE_S, check=False
        )
        assert refused.returncode == 1 and "is the last node" in refused.stderr
        assert joined[1].end() == 0
    turns = [turn for talk in talks for turn in talk.turns]
    recomputed = sum(talk.recomputed for talk in talks)
    by_node = Counter(turn.node for turn in turns)
    moved = sum(a.node != b.node for talk in talks for a, b in zip(talk.turns, talk.turns[1:], strict=False))
    with capsys.disabled():
        print(
            f"\n2 -> 4 -> 1 nodes: {len(talks)} sessions, {len(turns)} turns, 0 failed, {moved} on another node than "
            f"the turn before, {recomputed} computed again; by node {dict(sorted(by_node.items()))}",
            end="",
            flush=True,
        )
    assert "node-3" in by_node and len(by_node) >= 3 and moved >= len(talks) // 2
    assert recomputed == 0
