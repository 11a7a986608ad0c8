"""The compiled kernels on AArch64: cross-compiled, and run under qemu's emulation of that processor. Debian: apt-get
install g++-aarch64-linux-gnu qemu-user."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from worker.kernels.build import KERNELS, OPTIMISE

DRIVER = Path(__file__).with_name("kernels_driver.cpp")
FLAGS = ("-std=c++17", *OPTIMISE, "-pthread", "-static", f"-I{KERNELS.parent}")
TYPES = ("float32", "bfloat16", "float16", "bfloat16-window")


def compiling(compiler: str, architecture: str, made: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([compiler, *FLAGS, f"-march={architecture}", str(DRIVER), "-o", str(made)])


def results(*command: str) -> dict[str, str]:
    """Of the driver: the digest of each type's results."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: digest for name, _, digest in (line.split() for line in done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_aarch64_results_are_right_and_have_the_bits_of_this_machine_however_they_are_cut_and_batched(
    tmp_path: Path,
) -> None:
    compiler, emulator, here = (shutil.which(name) for name in ("aarch64-linux-gnu-g++", "qemu-aarch64", "c++"))
    if compiler is None or emulator is None:
        pytest.skip("no cross-compiler or no emulator (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)")
    assert here is not None
    there, native = tmp_path / "there", tmp_path / "native"
    compilers = [compiling(compiler, "armv8-a", there), compiling(here, "native", native)]
    assert [c.wait(280) for c in compilers] == [0, 0]
    found = results(emulator, str(there))
    assert tuple(found) == TYPES
    assert results(str(native)) == found
