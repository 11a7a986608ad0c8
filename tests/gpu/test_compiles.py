"""The kernels of an 8B shape, and of other families, compile for Hopper, without a device: tensor cores, wide loads,
no spills, shared memory that fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no build for this machine")
ROOT = Path(__file__).parents[2]
#: What one block may use on sm_90, in bytes.
SHARED_BYTES = 227 << 10


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_as_it_was_meant_to() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        name: dict(zip(words[::2], map(int, words[1::2]), strict=True))
        for name, *words in map(str.split, done.stdout.splitlines())
    }
    dense = {"prefill", "decode", "merge", "add_norm", "rotate_write", "gate_mul"}
    experts = {"route", "sort", "grouped", "grouped_few", "mix"}
    quantised = {f"{code}{few}" for code in ("int4", "int8", "fp8") for few in ("", "_few")}
    others = {"product", "lower", "raise"} | experts | quantised
    assert set(found) == dense | {f"gemma_{name}" for name in dense} | others
    for name, seen in found.items():
        assert seen["shared"] <= SHARED_BYTES, name
        assert seen["stack"] == 0, f"{name} spills registers"
        # A row's weights are a few numbers, and so are a group's scales and zeros.
        assert seen["narrow"] == 0 or name in ("route", "mix", "raise", *quantised), f"{name} loads 2 bytes at a time"
    assert found["prefill"]["wgmma"] and found["product"]["wgmma"] and found["grouped"]["wgmma"]
    assert found["gemma_prefill"]["wgmma"] and found["gemma_decode"]["mma"]
    assert found["decode"]["mma"] and found["grouped_few"]["mma"]
