"""A fleet whose processes are replaced by those of another commit, one after the other, under conversations: no request
fails, and every answer is a cold node's.

UPBEAT_UPGRADE_FROM names the commit; by default the one before this.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest
import yaml

from loadtest.stack import Stack
from runtime.config_file import load_config
from tests.certificates import certificates
from tests.e2e.chat import Chat, script
from tests.faults.services import ROOT, Services

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(900)]
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", ROOT / "models" / "demo"))
FROM = os.environ.get("UPBEAT_UPGRADE_FROM", "HEAD~1")
SEEDS, TURNS = (0, 1, 2, 3), 3
#: In this order: a scheduler first, as gateways and nodes say more to it; gateways last.
ROLLED = [("scheduler", None), ("kvstore", 0), ("worker", 0), ("kvstore", 1), ("worker", 1), ("gateway", None)]


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the former commit."""
    folder = tmp_path_factory.mktemp("former")
    archive = folder.with_suffix(".tar")
    done = subprocess.run(
        ["git", "archive", "--output", str(archive), FROM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this checkout does not have the commit {FROM}: {done.stderr.strip()}")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    with Stack(model=MODEL, nodes=1, cache=False, hbm_gib=0.25, dram_gib=0.25) as cold:
        chats = [Chat(cold.url, f"cold-{seed}") for seed in SEEDS]
        return [[chat.say(line).text for line in script(seed, TURNS)] for seed, chat in zip(SEEDS, chats, strict=True)]


@pytest.fixture
def fleet(former: Path, tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Services]:
    """All of the former commit."""
    first = free_ports(60)
    said = {
        "model": str(MODEL),
        "data": str(tmp_path / "data"),
        "run_dir": str(tmp_path / "run"),
        "gateway": {"port": first},
        "scheduler": {"port": first + 1},
        "nodes": {"base_port": first + 20, "count": 2},
        "kv": {"hbm_gib": 0.125, "dram_gib": 0.125, "load_plan": False},
        "worker": {"threads": 1},
        "tls": {"directory": str(certificates(tmp_path / "certs", 2))},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(said))  # what both commits know, without this one's defaults
    with Services(load_config(file), file, former) as made:
        yield made


class Talks:
    """Conversations that begin before a process is replaced, go on meanwhile, and end on either node."""

    def __init__(self, fleet: Services, expected: list[list[str]]) -> None:
        self._fleet, self._expected, self._names = fleet, expected, count()

    def around(self, replace: Callable[[], None]) -> list[int]:
        """Cached tokens of the last turns, by seed."""
        number = next(self._names)
        chats = [Chat(self._fleet.url, f"rolled-{number}-{seed}") for seed in SEEDS]
        lines = [script(seed, TURNS) for seed in SEEDS]

        def speak(seed: int, turn: int, node: str | None) -> int:
            answer = chats[seed].say(lines[seed][turn], node, timeout_s=120)
            assert answer.text == self._expected[seed][turn], f"turn {turn} of session {seed}, step {number}"
            return answer.cached_tokens

        with ThreadPoolExecutor(len(SEEDS)) as pool:
            list(pool.map(lambda seed: speak(seed, 0, f"node-{seed % 2}"), SEEDS))
            replacing = threading.Thread(target=replace)
            replacing.start()
            list(pool.map(lambda seed: speak(seed, 1, None), SEEDS))
            replacing.join()
            self._fleet.wait_ready()
            return list(pool.map(lambda seed: speak(seed, 2, f"node-{(seed + 1) % 2}"), SEEDS))


def test_no_request_fails_while_a_fleet_is_upgraded_and_taken_back(
    fleet: Services, former: Path, expected: list[list[str]]
) -> None:
    talks = Talks(fleet, expected)

    def replace(service: str, node: int | None, tree: Path) -> None:
        fleet.end(service, node)
        fleet.start(service, node, tree)
        if service == "gateway":
            deadline = time.monotonic() + 60
            while not _answers(fleet.url):
                assert time.monotonic() < deadline
                time.sleep(0.1)

    for tree in (ROOT, former):
        for service, node in ROLLED if tree == ROOT else reversed(ROLLED):
            if service == "gateway":  # nothing else listens at its port meanwhile
                replace(service, node, tree)
                fleet.wait_ready()
                talks.around(lambda: None)
            else:
                talks.around(lambda service=service, node=node, tree=tree: replace(service, node, tree))  # type: ignore[misc]
        assert any(talks.around(lambda: None)), "a fleet of one commit finds what it keeps"


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
