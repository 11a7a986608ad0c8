"""Builds the CPU kernels with the machine's C++ compiler, once for each machine, compiler and version of the sources.

    python -m worker.kernels.build        builds ahead, so that the first start does not wait

The library is made for the very processor it is built on and kept in the user's cache directory under a name that says all
it depends on. Several processes that start together build it once. Where there is no compiler the engine computes with
torch, which is slower and gives the same answers within rounding.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import UpbeatError

#: What is compiled; everything beside it in its folder belongs to it.
KERNELS = Path(__file__).parent / "cpu" / "layer.cpp"
_OPTIMISE = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c++17", *_OPTIMISE, "-shared", "-fPIC", "-pthread")
_BUILD_S = 600.0


class NoKernels(UpbeatError):
    """The kernels cannot be built or used here; the message says why."""


def library(source: Path = KERNELS, more: Sequence[str] = ()) -> Path:
    """The library built from `source`, with `more` flags; builds it when it is not there. Raises NoKernels."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoKernels("there is no C++ compiler; install one (Debian: apt-get install g++)")
    folder = _cache()
    target = folder / f"{source.parent.name}-{_identity(compiler, source, more)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(compiler, source, target, more)
    except OSError as e:
        raise NoKernels(f"{folder} cannot be written: {e}; set XDG_CACHE_HOME to a directory that can") from e
    return target


def _build(compiler: str, source: Path, target: Path, more: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *_FLAGS, *more, str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
        except subprocess.TimeoutExpired as e:
            raise NoKernels(f"{compiler} takes longer than {_BUILD_S:.0f} s") from e
        if done.returncode:
            raise NoKernels(f"{compiler} fails: {done.stderr.strip()[-500:]}")
        made.rename(target)


def _identity(compiler: str, source: Path, more: Sequence[str]) -> str:
    """What the result depends on: sources, flags, the compiler and the processor's abilities."""
    digest = hashlib.sha256()
    for file in sorted(source.parent.iterdir()):
        digest.update(file.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join((*_FLAGS, *more, compiler, version, platform.machine(), _abilities())).encode())
    return digest.hexdigest()[:24]


def _abilities() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "upbeat" / "kernels"


if __name__ == "__main__":
    try:
        print(library())
    except NoKernels as e:
        print(f"no compiled kernels; the engine will compute with torch: {e}", file=sys.stderr)
