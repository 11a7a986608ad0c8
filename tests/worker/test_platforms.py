"""`worker.device` and `worker.batch_invariant`: what is chosen, and what stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import ConfigError
from runtime.config import Config, load_config
from runtime.model_config import load_config as load_model_config
from worker.kernels.cpu_kernels import CpuKernels
from worker.platforms import Found, choose_device, choose_platform, suits_cuda

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
    assert choose_device(choice, found) == device


def test_a_missing_device_stops_the_start_with_key_value_and_remedy() -> None:
    with pytest.raises(ConfigError, match=r"worker\.device = 'cuda' .*torch sees no CUDA device.*worker\.device: auto"):
        choose_device("cuda", BARE)


def test_missing_packages_are_named_with_what_installs_them() -> None:
    with pytest.raises(ConfigError, match=r"worker\.device = 'cuda' .*triton, cuda\.bindings.*-m pip install .*\.\[cuda\]"):
        choose_device("cuda", Found(cuda=True, missing=("triton", "cuda.bindings")))


def test_an_unknown_device_is_refused_by_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"worker\.device = 'rocm'.*'auto', 'cpu' or 'cuda'"):
        load_config(None, {"worker": {"device": "rocm"}})


def _config(**worker: object) -> Config:
    return load_config(None, {"model": str(DEMO), "kv": {"hbm_gib": 0.0625}, "worker": {"device": "cpu", **worker}})


def test_rows_that_depend_on_their_batch_are_refused_where_they_were_excluded() -> None:
    with pytest.raises(ConfigError, match=r"worker\.batch_invariant = true .*worker\.batch_invariant: false"):
        choose_platform(_config(kernels="torch", batch_invariant=True), 1)
    assert CpuKernels.suits(load_model_config(DEMO), 64) == ""
    assert choose_platform(_config(kernels="native", batch_invariant=True), 1).computes == "native"


def test_shapes_that_the_cuda_kernels_cannot_read_are_named() -> None:
    model = load_model_config(DEMO)
    assert suits_cuda(model, 64) == ""
    assert "kv.chunk_tokens = 20" in suits_cuda(model, 20)
    object.__setattr__(model, "head_dim", 24)
    assert "head_dim = 24" in suits_cuda(model, 64)
