"""Builds C++ libraries with the machine's compiler, once per machine, compiler and version of the sources.

A library is kept in the user's cache directory; its name is a hash of everything it depends on. Processes that start
together build it once. Callers have a slower fallback for machines without a compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import UpbeatError

_BUILD_S = 600.0


class NotBuilt(UpbeatError):
    """The library cannot be built or used here; the message says why."""


def library(main: Path, flags: Sequence[str]) -> Path:
    """The library built from `main` and the files beside it, built if necessary. Raises NotBuilt."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NotBuilt("there is no C++ compiler; install one (Debian: apt-get install g++)")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "upbeat" / "kernels"
    target = folder / f"{main.parent.name}-{_identity(compiler, main, flags)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(compiler, main, flags, target)
    except OSError as e:
        raise NotBuilt(f"{folder} cannot be written: {e}; set XDG_CACHE_HOME to a directory that can") from e
    return target


def _build(compiler: str, main: Path, flags: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *flags, str(main), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
        except subprocess.TimeoutExpired as e:
            raise NotBuilt(f"{compiler} takes longer than {_BUILD_S:.0f} s") from e
        if done.returncode:
            raise NotBuilt(f"{compiler} fails: {done.stderr.strip()[-500:]}")
        made.rename(target)


def _identity(compiler: str, main: Path, flags: Sequence[str]) -> str:
    """Hash of everything the result depends on: sources, flags, compiler and the processor's features."""
    digest = hashlib.sha256()
    for source in sorted(main.parent.iterdir()):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update(
        "\0".join((*flags, compiler, version, platform.machine(), platform.processor(), *sorted(abilities()))).encode()
    )
    return digest.hexdigest()[:24]


def abilities() -> frozenset[str]:
    """The processor's features as named by the system (/proc/cpuinfo); empty when unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith(("flags", "Features"))), []))
