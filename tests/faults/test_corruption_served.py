"""Damage below running conversations: whatever happens to the files between turns, every turn says what a cold node
says.

Sessions talk on alternating nodes; between turns everything stops, half of the objects on both SSDs and in the blob
tier are damaged, and everything starts again, so that the next turn's cache can only come from there. Until 1,000
damaged objects were met. UPBEAT_FAULTS_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contracts import identity
from contracts.v1 import kvstore_pb2 as pb
from contracts.v1.kvstore_pb2_grpc import KvStoreStub
from kvstore.tiers.manifests import PREFIX
from kvstore.tiers.objects import ROOT
from loadtest.stack import Stack
from runtime.config import Config
from runtime.config_file import load_config
from storelink.channel import blocking_channel
from tests.e2e.chat import Chat, script
from tests.faults.damage import KINDS

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(1800)]
MODEL = Path(os.environ.get("UPBEAT_TEST_MODEL", Path(__file__).parents[2] / "models" / "demo"))
SEED = int(os.environ.get("UPBEAT_FAULTS_SEED", random.SystemRandom().randrange(1 << 30)))
WANTED = 1000
SESSIONS, TURNS, AT_ONCE = 20, 10, 8
_METRICS = (
    "upbeat_kvstore_checksum_failures_total{",
    'upbeat_kvstore_events_total{what="ssd_files_deleted_at_start"}',
    'upbeat_kvstore_events_total{what="blob_headers_damaged"}',
)


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[str]]]:
    """What a cold single node answers to each script."""
    with (
        Stack(model=MODEL, nodes=1, cache=False, hbm_gib=0.25, dram_gib=0.25) as cold,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        chats = [Chat(cold.url, f"cold-{i}") for i in range(SESSIONS)]
        yield list(pool.map(lambda i: [chats[i].say(line).text for line in script(i, TURNS)], range(SESSIONS)))


class Damaged:
    """Objects of a stopped stack that were damaged, and what became of them."""

    def __init__(self, data: Path, rng: random.Random) -> None:
        self._data = data
        self._rng = rng
        self._bytes: dict[Path, bytes] = {}

    def more(self) -> None:
        """Damage half of the objects that are still sound; a manifest now and then."""
        groups: dict[Path, list[Path]] = {}
        names: dict[int, list[Path]] = {}  # by inode: the blob tier's objects are the SSDs' files
        for root in (f"blob/{ROOT}/chunks", "node-0/ssd", "node-1/ssd", f"blob/{ROOT}/{PREFIX}"):
            for path in (self._data / root).rglob("*"):
                if path.is_file() and path not in self._bytes:
                    groups.setdefault(path.parent, []).append(path)
                    names.setdefault(path.stat().st_ino, []).append(path)
        for folder, paths in groups.items():
            paths = sorted(set(paths) - self._bytes.keys())
            left = self._rng.sample(paths, int(len(paths) * (0.1 if PREFIX in folder.parts else 0.5)))
            while len(left) >= 2:
                how = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
                if left[0].stat().st_size >= 2 * 4096:
                    done = how(self._rng, left)
                else:
                    left[0].write_bytes(self._rng.randbytes(left[0].stat().st_size))
                    done = 1
                for path in left[:done]:
                    for name in names.get(path.stat().st_ino, [path]):
                        if name.samefile(path):
                            self._bytes[name] = path.read_bytes()
                del left[: max(1, done)]

    def met(self) -> int:
        """How many were deleted or replaced since; they may be damaged again."""
        gone = [path for path, data in self._bytes.items() if not path.exists() or path.read_bytes() != data]
        for path in gone:
            del self._bytes[path]
        return len(gone)


def written(stack: Stack, config: Config, node: int) -> bool:
    """Has the node's store write what it has not written yet; whether it did so in time."""
    places = config.node(node)
    with blocking_channel(places.store_address, identity.node(places.name), stack.operator) as channel:
        complete: bool = KvStoreStub(channel).Flush(pb.FlushRequest(timeout_s=60)).complete
    return complete


def counted(stack: Stack, config: Config) -> float:
    """Damage that both nodes' metrics tell of, since they started."""
    total = 0.0
    for node in (0, 1):
        text = stack.metrics(config.node(node).store_metrics_port)
        total += sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(_METRICS))
    return total


def test_a_thousand_damaged_objects_change_no_answer(
    expected: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began, rng = time.monotonic(), random.Random(SEED)
    met, noticed, rounds, turns, cached = 0, 0.0, 0, 0, 0
    with (
        Stack(model=MODEL, nodes=2, directory=tmp_path, hbm_gib=0.25, dram_gib=0.125) as stack,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        damaged = Damaged(stack.data, rng)
        while met < WANTED:
            chats = [Chat(stack.url, f"damaged-{rounds}-{i}") for i in range(SESSIONS)]
            for turn in range(TURNS):
                for chat in chats:
                    chat.url = stack.url
                node = f"node-{turn % 2}"
                lines = [script(i, TURNS)[turn] for i in range(SESSIONS)]
                answers = list(pool.map(Chat.say, chats, lines, [node] * SESSIONS))
                for i, answer in enumerate(answers):
                    assert answer.text == expected[i][turn], (
                        f"session {i}, turn {turn}, round {rounds}, UPBEAT_FAULTS_SEED={SEED}"
                    )
                turns += len(answers)
                cached += sum(a.cached_tokens for a in answers)
                config = load_config(stack.config_file, {"data": str(stack.data), "nodes": {"count": 2}})
                for number in (0, 1):
                    assert written(stack, config, number)
                met += damaged.met()
                noticed += counted(stack, config)
                if met >= WANTED:
                    break
                stack.stop()
                damaged.more()
                stack.start()
            rounds += 1
    assert noticed > 0
    assert cached > 0, "something of what was sound was used"
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(
            f"\n{turns} turns right over {met} damaged objects ({noticed:.0f} pieces and headers counted), "
            f"{seconds:.0f} s, seed {SEED}",
            end="",
        )
