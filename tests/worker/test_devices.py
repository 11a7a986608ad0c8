"""`worker.device` and `worker.batch_invariant`: what is chosen, and what stops the start."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import load_config
from runtime.model_config import load_config as load_model_config
from tests.worker.engine_harness import Harness, tiny_model
from worker.devices.device import Found, choose_device, device_kind, suits_cuda
from worker.devices.runner import Steps
from worker.kernels.cpu_kernels import CpuKernels
from worker.memory.copier import Copier

BARE, WHOLE = Found(cuda=False), Found(cuda=True)
DEMO = Path("models/demo").absolute()


@pytest.mark.parametrize(
    ("choice", "found", "device"),
    [
        ("auto", BARE, "cpu"),
        ("auto", WHOLE, "cuda"),
        ("auto", Found(cuda=True, missing=("triton",)), "cpu"),
        ("cpu", WHOLE, "cpu"),
        ("cuda", WHOLE, "cuda"),
    ],
)
def test_the_device_that_is_there_is_chosen(choice: str, found: Found, device: str) -> None:
    assert device_kind(choice, found) == device


def test_a_missing_device_stops_the_start_with_key_value_and_remedy() -> None:
    with pytest.raises(ConfigError, match=r"worker\.device = 'cuda' .*torch sees no CUDA device.*worker\.device: auto"):
        device_kind("cuda", BARE)


def test_missing_packages_are_named_with_what_installs_them() -> None:
    said = r"worker\.device = 'cuda' .*triton, cuda\.bindings.*deploy/install\.py cuda.*-m pip install .*\[cuda\]"
    with pytest.raises(ConfigError, match=said):
        device_kind("cuda", Found(cuda=True, missing=("triton", "cuda.bindings")))


def test_an_unknown_device_is_refused_by_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"worker\.device = 'rocm'.*'auto', 'cpu' or 'cuda'"):
        load_config(None, {"worker": {"device": "rocm"}})


def _config(**worker: object) -> Config:
    return load_config(None, {"model": str(DEMO), "kv": {"hbm_gib": 0.0625}, "worker": {"device": "cpu", **worker}})


def test_rows_that_depend_on_their_batch_are_refused_where_they_were_excluded() -> None:
    with pytest.raises(ConfigError, match=r"worker\.batch_invariant = true .*worker\.batch_invariant: false"):
        choose_device(_config(kernels="torch", batch_invariant=True), 1)
    assert CpuKernels.suits(load_model_config(DEMO), 64) == ""
    assert choose_device(_config(kernels="native", batch_invariant=True), 1).computes == "native"


def test_shapes_that_the_cuda_kernels_cannot_read_are_named() -> None:
    model = load_model_config(DEMO)
    assert suits_cuda(model, 64) == ""
    assert "kv.chunk_tokens = 20" in suits_cuda(model, 20)
    object.__setattr__(model, "head_dim", 24)
    assert "head_dim = 24" in suits_cuda(model, 64)


def niceness_of(threads: set[str]) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness a thread")
def test_what_computes_on_the_cpu_steps_back_for_the_event_loops(tmp_path: Path) -> None:
    here, before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), set(os.listdir("/proc/self/task"))
    platform = choose_device(_config(kernels="native"), 3)
    deadline = time.monotonic() + 10
    # who made them has ended, but may still be listed
    while len(team := set(os.listdir("/proc/self/task")) - before) != 2:
        assert time.monotonic() < deadline, team
        time.sleep(0.01)
    assert niceness_of(team) == {here + platform.niceness} == {here + 5}

    tiny_model(tmp_path)
    seen: list[int] = []

    class Watched(Harness):
        def assemble(self, *args: Any) -> tuple[Steps, Copier]:
            runner, copier = super().assemble(*args)
            step = runner.step

            def watched(*slices: Any) -> torch.Tensor:
                seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                return step(*slices)

            runner.step = watched  # type: ignore[method-assign]
            return runner, copier

    harness = Watched(tmp_path, niceness=platform.niceness)
    harness.run([3, 4, 5, 6], 2)
    harness.close()
    assert set(seen) == {here + platform.niceness}
