"""Six models that may lend layers, on devices that hold about half of them, mixed load with kills: every answer is that
of a model alone, and then nothing is held and nothing has grown.

    make soak ARGS=tests/soak/test_soak_models.py      # settings: see test_soak.py
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from contracts.models import ModelState
from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from tests.e2e.chat import Chat, script
from tests.soak.leaks import metrics
from tests.soak.soaking import (
    FAULTY,
    MINUTES,
    REST_S,
    SEED,
    VICTIMS,
    Soak,
    at_rest,
    erase_everything,
    kills,
    looks,
    run_together,
    stop_and_check,
    talk,
)
from worker.core.granules import GranuleState

pytestmark = [pytest.mark.stack, pytest.mark.soak, pytest.mark.timeout(60 * MINUTES + 900)]
#: Layers by model. Each layer, and what is outside the layers, takes one granule of 2 MiB: 39 in all, of 21.
LAYERS = {f"m{layers}": layers for layers in (3, 4, 5, 6, 7, 8)}
GRANULE, HBM_GIB = 2 << 20, 0.0412
TURNS, HINTED, PAUSE_S = 3, 0.4, 2.0


@pytest.fixture
def shared() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="upbeat-soak-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def test_six_models_share_devices_for_as_long_as_they_run(tmp_path: Path, shared: Path) -> None:
    print(f"\nseed {SEED}, {MINUTES:g} minutes")
    shape, dtype = SHAPES["tiny"]
    models = {
        name: make_random_model(
            tmp_path / name, shape | {"num_hidden_layers": layers, "tie_word_embeddings": False}, layers, dtype
        )
        for name, layers in LAYERS.items()
    }
    lines = script(SEED, turns=TURNS)
    with Stack(models=models, nodes=1, cache=False, hbm_gib=0.5, dram_gib=0.1, settings={"sharing": "static"}) as cold:
        expected = {}
        for name in LAYERS:
            chat = Chat(cold.url, f"cold-{name}", model=name)
            expected[name] = [chat.say(line).text for line in lines]
    soak, seconds, left = Soak(), 60 * MINUTES, list[str]()
    settings = {"sharing": "prism", "shm_dir": str(shared), "worker": {"remap": "auto"}}
    with Stack(
        models=models, nodes=2, directory=tmp_path / "stack", hbm_gib=HBM_GIB, dram_gib=0.06, settings=settings
    ) as stack:
        until = time.monotonic() + seconds
        quiet = until - (1 - FAULTY) * seconds
        work: list[Callable[[], None]] = [
            lambda: kills(stack, soak, quiet),
            lambda: looks(stack, soak, quiet + 5.0, until),
            lambda: _leave(stack, until, left),
            *(
                lambda i=i, name=name: talk(  # type: ignore[misc]
                    stack, soak, i, lines, expected[name], until, model=name, hinted=HINTED, pause_s=PAUSE_S
                )
                for i, name in enumerate(LAYERS)
            ),
        ]
        run_together(soak, work, seconds)
        victims = [name for _, name in soak.killed]
        print(f"{soak.talks} talks; killed {', '.join(victims)}")
        assert not soak.failures, soak.failures
        assert not soak.wrong, soak.wrong
        assert soak.talks > 5 * MINUTES and len(set(victims)) >= min(len(VICTIMS), int(MINUTES))
        at_rest(stack, soak)
        erase_everything(stack, left)
        _weights_are_counted(stack)
        moved = [sum(v for k, v in metrics(stack)[f"worker-{n}"].items() if "layers_moved" in k) for n in range(2)]
        print(f"layers lent and taken back since the last kills: {moved}")
        stop_and_check(stack)
        assert not list(shared.iterdir()), "left in shared memory"


def _leave(stack: Stack, until: float, left: list[str]) -> None:
    """Requests whose caller goes away: while weights come, while others are served, in the middle of an answer. Adds
    their sessions to `left`."""
    draw = random.Random(f"{SEED} leave")
    while time.monotonic() < until:
        left.append(f"left-{len(left)}")
        body = {"model": draw.choice(list(LAYERS)), "stream": True, "max_tokens": 200, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": script(draw.randrange(9))[0]}]
        left_s = draw.choice([0.02, 0.1, 0.5])
        with contextlib.suppress(httpx.HTTPError):
            headers = {"X-Upbeat-Session": left[-1]}
            httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=left_s)
        time.sleep(draw.random() * PAUSE_S)


def _weights_are_counted(stack: Stack) -> None:
    """On each device a model that is active has the memory of its weights, and a cold one none; all memory is there."""
    deadline = time.monotonic() + REST_S
    while wrong := [complaint for n in range(stack.nodes) for complaint in _wrong(metrics(stack)[f"worker-{n}"])]:
        assert time.monotonic() < deadline, wrong
        time.sleep(0.5)


def _wrong(samples: dict[str, float]) -> list[str]:
    states = {name: samples[f'upbeat_worker_model_state{{model="{name}"}}'] for name in LAYERS}
    held, total = dict.fromkeys(LAYERS, 0.0), 0.0
    for sample, bytes_ in samples.items():
        if match := re.fullmatch(r'upbeat_worker_device_bytes\{name="(.*)",state="(.*)",use="(.*)"\}', sample):
            total += bytes_ * (match[2] in set(GranuleState))
            if match[3] == "weights":
                held[match[1]] += bytes_
    due = {name: (LAYERS[name] + 1) * GRANULE * (state == ModelState.ACTIVE) for name, state in states.items()}
    settled = {ModelState.ACTIVE, ModelState.COLD}
    moved = [f"{name} is in state {state}" for name, state in states.items() if state not in settled]
    lost = [] if total == int(HBM_GIB * (1 << 30)) // GRANULE * GRANULE else [f"{total} bytes in all"]
    return moved + [f"{n}: {held[n]} bytes, not {due[n]}" for n in LAYERS if held[n] != due[n]] + lost
