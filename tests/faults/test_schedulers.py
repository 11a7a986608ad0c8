"""Schedulers that are killed, again and again or one of two, while answers stream: no request fails, and nothing is
said wrongly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from contracts.identity import SCHEDULER
from contracts.ids import DEFAULT_TENANT, SessionKey
from contracts.rendezvous import rendezvous
from contracts.v1 import scheduler_pb2, scheduler_pb2_grpc
from loadtest.stack import Stack
from runtime.config_file import load_config
from storelink.channel import blocking_channel
from tests.e2e.chat import Chat, script
from tests.faults.test_kill import MODEL, process, wait_ready

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(400)]
#: For how long the scheduler is killed every five seconds.
SECONDS = float(os.environ.get("UPBEAT_FAULTS_SECONDS", 120))
TURNS = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"scheduler": {"count": 2}}
    with Stack(
        model=MODEL, nodes=2, directory=tmp_path_factory.mktemp("two"), hbm_gib=0.25, dram_gib=0.25, settings=settings
    ) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[str]]]:
    """What a cold single node answers to each script."""
    with Stack(model=MODEL, nodes=1, cache=False, hbm_gib=0.25, dram_gib=0.25) as cold:
        yield [
            [chat.say(line).text for line in script(seed, turns=TURNS)]
            for seed in range(4)
            for chat in [Chat(cold.url, f"c{seed}")]
        ]


class Talkers:
    """Conversations that go on, four at a time, until they are told to stop; any failure or wrong text comes out of
    `stop`."""

    def __init__(self, url: str, expected: list[list[str]], name: str) -> None:
        self._url, self._expected, self._name = url, expected, name
        self._end = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._running = [self._pool.submit(self._talk, seed) for seed in range(4)]

    def _talk(self, seed: int) -> tuple[int, float]:
        turns, longest, number = 0, 0.0, 0
        while not self._end.is_set():
            chat = Chat(self._url, f"{self._name}-{seed}-{number}")
            number += 1
            for line, right in zip(script(seed, turns=TURNS), self._expected[seed], strict=True):
                chat.advise()
                began = time.monotonic()
                assert chat.say(line).text == right, f"turn {turns} of talker {seed} is wrong"
                turns, longest = turns + 1, max(longest, time.monotonic() - began)
        return turns, longest

    def stop(self) -> tuple[int, float]:
        """Turns that were answered, and how long the longest took."""
        self._end.set()
        try:
            done = [f.result(timeout=90) for f in self._running]
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
        return sum(turns for turns, _ in done), max(longest for _, longest in done)


def placed(stack: Stack) -> dict[str, float]:
    """Attempts by who chose the node."""
    lines = httpx.get(f"{stack.url}/metrics", timeout=10).text.splitlines()
    found = [line for line in lines if line.startswith("upbeat_gateway_placed_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in found}


def test_a_scheduler_that_is_killed_every_five_seconds_fails_no_request(
    expected: list[list[str]], tmp_path: Path, capsys
) -> None:
    with Stack(model=MODEL, nodes=2, directory=tmp_path, hbm_gib=0.25, dram_gib=0.25) as stack:
        talkers = Talkers(stack.url, expected, "killed")
        kills, end = 0, time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(5.0)
            process(stack, "upbeat-scheduler").kill()
            kills += 1
            deadline = time.monotonic() + 20.0
            while time.monotonic() < deadline:  # the launcher starts it again, after a growing while
                try:
                    process(stack, "upbeat-scheduler")
                    break
                except AssertionError:
                    time.sleep(0.2)
        turns, longest = talkers.stop()
        chosen = placed(stack)
        wait_ready(stack)
    with capsys.disabled():
        print(
            f"\n{kills} kills in {SECONDS:.0f} s: {turns} turns, the longest {longest:.1f} s, placed {chosen}",
            end="",
            flush=True,
        )
    assert turns > kills and chosen["direct"] > 0, "turns went on while no scheduler was there"


def test_of_two_schedulers_one_is_killed_and_only_its_share_moves(stack: Stack, expected: list[list[str]]) -> None:
    addresses = load_config(stack.run_dir / "config.yaml").scheduler_addresses
    assert len(addresses) == 2
    names = [f"share-{n}" for n in range(16)]
    owner = {name: rendezvous(SessionKey(DEFAULT_TENANT, name), addresses)[0] for name in names}
    assert set(owner.values()) == set(addresses)
    before = placed(stack)
    _one_turn_each(stack, names, expected)
    after = placed(stack)
    assert after["scheduler"] - before.get("scheduler", 0) == len(names) and after.get("standby", 0) == before.get(
        "standby", 0
    )
    talkers = Talkers(stack.url, expected, "one-killed")
    time.sleep(1.0)
    victim = _scheduler(stack, 1)
    victim.suspend()  # it hangs first: what it does not answer in time, the other one does
    time.sleep(3.0)
    victim.kill()
    time.sleep(3.0)
    turns, _ = talkers.stop()
    assert turns
    wait_ready(stack)


def test_with_one_scheduler_gone_for_good_its_sessions_are_placed_by_the_other_and_the_rest_as_before(
    stack: Stack, expected: list[list[str]]
) -> None:
    addresses = load_config(stack.run_dir / "config.yaml").scheduler_addresses
    names = [f"gone-{n}" for n in range(16)]
    theirs = [name for name in names if rendezvous(SessionKey(DEFAULT_TENANT, name), addresses)[0] == addresses[1]]
    assert 0 < len(theirs) < len(names)
    victim = _scheduler(stack, 1)
    victim.suspend()
    try:
        before = placed(stack)
        _one_turn_each(stack, names, expected)
        after = placed(stack)
        gained = {by: after.get(by, 0) - before.get(by, 0) for by in ("scheduler", "standby", "direct")}
        assert gained == {"scheduler": len(names) - len(theirs), "standby": len(theirs), "direct": 0}
        fleet = httpx.get(f"{stack.url}/v1/fleet", timeout=10).json()
        assert {s["address"]: s["state"] for s in fleet["schedulers"]} == {
            addresses[0]: "serving",
            addresses[1]: "silent",
        }
        assert {n["state"] for n in fleet["nodes"]} == {"serving"}
    finally:
        victim.resume()
    wait_ready(stack)


def _scheduler(stack: Stack, number: int):
    return process(stack, f"upbeat-scheduler --config {stack.run_dir / 'config.yaml'} --number {number}")


def _one_turn_each(stack: Stack, names: list[str], expected: list[list[str]]) -> None:
    for name in names:
        assert Chat(stack.url, name).say(script(0, turns=TURNS)[0]).text == expected[0][0]


def test_a_worker_that_is_told_to_stop_ends_what_it_runs_while_new_turns_go_elsewhere(
    stack: Stack, expected: list[list[str]]
) -> None:
    talkers = Talkers(stack.url, expected, "draining")
    time.sleep(1.0)
    worker = process(stack, "upbeat-worker --node 1")
    worker.terminate()
    seen = set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        worker.pid not in psutil.pids() and seen and _state(stack, "node-1") == "serving"
    ):
        seen.add(_state(stack, "node-1"))
        time.sleep(0.02)
    turns, _ = talkers.stop()
    wait_ready(stack)
    assert turns and _state(stack, "node-1") == "serving"
    assert "absent" in seen and seen <= {"serving", "draining", "absent"}, "it was stopped, and nobody took it for dead"


def _state(stack: Stack, node: str) -> str:
    fleet = httpx.get(f"{stack.url}/v1/fleet", timeout=10).json()
    return next(str(n["state"]) for n in fleet["nodes"] if n["node"] == node)


def test_an_erased_session_comes_back_through_no_scheduler(stack: Stack, expected: list[list[str]]) -> None:
    """One scheduler is told to erase it; the other one, and both after a store has told everything anew, know it no
    more."""
    addresses = load_config(stack.run_dir / "config.yaml").scheduler_addresses
    name = "to-be-erased"
    chat = Chat(stack.url, name)
    for line, right in zip(script(0, turns=TURNS), expected[0], strict=True):
        assert chat.say(line).text == right
    _until(lambda: all(name in _known(stack, address) for address in addresses))
    reply = httpx.delete(f"{stack.url}/v1/sessions/{name}", timeout=30)
    assert reply.status_code == 200, reply.text
    _until(lambda: not any(name in _known(stack, address) for address in addresses))
    for node in range(2):
        process(stack, f"upbeat-kvstore --node {node}").kill()
        time.sleep(1.5)
        wait_ready(stack, 60)
    time.sleep(2.0)  # both stores have said what they hold
    assert not any(name in _known(stack, address) for address in addresses)
    assert httpx.get(f"{stack.url}/v1/sessions/{name}", timeout=10).status_code == 404
    again = Chat(stack.url, name)
    assert again.say(script(0, turns=TURNS)[0]).text == expected[0][0]
    _until(lambda: all(name in _known(stack, address) for address in addresses))


def _known(stack: Stack, address: str) -> set[str]:
    """The sessions that a scheduler knows."""
    with blocking_channel(address, SCHEDULER, stack.operator) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        reply = stub.ListSessions(scheduler_pb2.ListSessionsRequest(limit=10_000), timeout=10)
    return {s.session.session_id for s in reply.sessions}


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)
