"""kill -9 of the worker in each state of a model whose weights come and go: every request is held, and answered as by a
model alone; nothing stays in shared memory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from tests.e2e.chat import Answer, Chat, script
from tests.faults.test_kill import wait_ready
from worker.engine.failpoints import OF_MODELS

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(280)]
LAYERS = {"small": 4, "middle": 6, "large": 8}
#: Slow enough that a prefill begins while layers come.
PIECE = "model.piece"
#: Where it is killed by the first test. Draining needs more time than a slice, and lending another setting.
POINTS = [point for point in OF_MODELS if point not in (PIECE, "model.draining", "model.circulating")]
SHORT, LONG = 12, 1500


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape, dtype = SHAPES["tiny"]
    directory = tmp_path_factory.mktemp("models")
    return {
        name: make_random_model(
            directory / name, shape | {"num_hidden_layers": layers, "tie_word_embeddings": False}, layers, dtype
        )
        for name, layers in LAYERS.items()
    }


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, str]:
    """What each model answers on a device of its own."""
    found = {}
    for name, path in models.items():
        with Stack(models={name: path}, nodes=1, hbm_gib=0.1, dram_gib=0.1) as stack:
            found[name] = ask(stack, name, SHORT, "alone").text
            if name != "middle":
                found[f"{name}, long"] = ask(stack, name, LONG, "alone").text
    return found


class Armed:
    """A stack whose workers die where a file says so. shared: its shared memory."""

    def __init__(self, models: dict[str, Path], nodes: int, directory: Path, shared: Path) -> None:
        self.files, self.shared = directory / "points", shared
        self.files.mkdir()
        points = {point: f"once:{self.files / point}" for point in OF_MODELS} | {PIECE: "delay:8"}
        # Each layer, and what is outside the layers, takes one granule of 2 MiB: 5, 7 and 9 of 17.
        self.stack = Stack(
            models=models, nodes=nodes, directory=directory / "stack", hbm_gib=0.0345, dram_gib=0.05,
            settings={"sharing": "prism", "shm_dir": str(shared), "worker": {"failpoints": points}},
        )  # fmt: skip

    def arm(self, point: str) -> Path:
        wait_ready(self.stack, 60)
        file = self.files / point
        file.touch()
        return file


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def armed(
    models: dict[str, Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Armed]:
    shared = Path(tempfile.mkdtemp(prefix="upbeat-test-", dir="/dev/shm"))
    try:
        made = Armed(models, request.param, tmp_path_factory.mktemp("armed"), shared)
        with made.stack:
            yield made
            wait_ready(made.stack, 60)
            assert list(shared.glob("*.image")) and list(shared.glob("*.arena"))
            made.stack.stop()
            assert not list(shared.iterdir()), "left in shared memory"
    finally:
        shutil.rmtree(shared)


def ask(stack: Stack, model: str, tokens: int, session: str, node: str | None = None) -> Answer:
    return Chat(stack.url, session, model=model, max_tokens=tokens).say(script(len(model))[0], node, timeout_s=120)


@pytest.mark.parametrize("point", POINTS)
def test_every_request_is_answered_when_the_worker_dies_at(armed: Armed, alone: dict[str, str], point: str) -> None:
    file = armed.arm(point)
    with ThreadPoolExecutor() as pool:
        asked: list[tuple[str, Future[Answer]]] = [
            # All on one node, which cannot hold them together.
            (name, pool.submit(ask, armed.stack, name, SHORT, f"{point}-{name}-{n}", f"node-{n % armed.stack.nodes}"))
            for n in range(2)
            for name in LAYERS
        ]
        for name, answer in asked:
            assert answer.result().text == alone[name], name
    assert not file.exists(), "the worker was not killed there"


def test_every_request_is_answered_when_the_worker_dies_while_a_busy_model_gives_way(
    armed: Armed, alone: dict[str, str]
) -> None:
    file = armed.arm("model.draining")
    # Longer than a slice of 2 s on each device.
    asked = [("large, long", n) for n in range(2 * armed.stack.nodes)]
    with ThreadPoolExecutor() as pool:
        where = [f"node-{n % armed.stack.nodes}" for _, n in asked]
        going = [
            (what, pool.submit(ask, armed.stack, "large", LONG, f"long-{n}", at))
            for (what, n), at in zip(asked, where, strict=True)
        ]
        time.sleep(0.5)
        going += [
            ("small, long", pool.submit(ask, armed.stack, "small", LONG, f"wait-{n}", at))
            for (_, n), at in zip(asked, where, strict=True)
        ]
        for what, answer in going:
            assert answer.result().text == alone[what], what
    assert not file.exists(), "the worker was not killed there"
    assert httpx.get(f"{armed.stack.url}/v1/fleet", timeout=10).status_code == 200


def test_every_request_is_answered_when_the_worker_dies_while_layers_move(
    models: dict[str, Path], alone: dict[str, str], tmp_path: Path
) -> None:
    shared = Path(tempfile.mkdtemp(prefix="upbeat-test-", dir="/dev/shm"))
    file = tmp_path / "circulating"
    settings = {"remap": "auto", "failpoints": {"model.circulating": f"once:{file}"}}
    try:
        # 9 granules of 2 MiB are weights, 6 are KV: of about three of these requests.
        with Stack(
            models={"large": models["large"]},
            nodes=1,
            hbm_gib=0.0294,
            dram_gib=0.05,
            settings={"shm_dir": str(shared), "worker": settings},
        ) as stack:
            for salt in range(2):
                file.touch()
                with ThreadPoolExecutor() as pool:
                    going = [pool.submit(ask, stack, "large", LONG, f"{salt}-{n}") for n in range(6)]
                    assert [answer.result().text for answer in going] == [alone["large, long"]] * 6
                assert not file.exists(), "the worker was not killed there"
                wait_ready(stack, 60)
        assert not list(shared.iterdir()), "left in shared memory"
    finally:
        shutil.rmtree(shared)
