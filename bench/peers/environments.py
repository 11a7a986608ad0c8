"""The environments of the peers, each made once under .cache/: vLLM's is bench/engine's, LMCache's bench/returning_session_tiers', and
llama.cpp's own. All installed by pip, pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "engine"), str(HERE.parent / "returning_session_tiers")]

import peers  # noqa: E402
import sides  # noqa: E402

LLAMA = ROOT / ".cache" / "bench-llama"
LLAMA_PINNED = ("llama-cpp-python[server]==0.3.36", "gguf==0.19.0")


class NoPeer(Exception):
    """A peer cannot be installed here. The message says which and why."""


@dataclass(frozen=True)
class Installed:
    """Interpreters and folders of what is there; None: not wanted."""

    vllm: Path | None = None
    lmcache: Path | None = None
    llama: Path | None = None


def install(*, vllm: bool, lmcache: bool, llama: bool) -> Installed:
    """Make what is wanted and missing; minutes for each, once. Raises NoPeer."""
    try:
        python, folder = peers.environment() if lmcache else (sides.environment() if vllm else None, None)
    except sides.NoPeer as e:
        raise NoPeer(str(e)) from e
    return Installed(python, folder, _llama() if llama else None)


def gguf(model: Path, python: Path) -> Path:
    """The same weights as llama.cpp reads them, beside the model; made when missing."""
    made = model / "model.gguf"
    if not made.exists():
        subprocess.run([str(python), str(HERE / "gguf_model.py"), str(model), str(made)], check=True)
    return made


def _llama() -> Path:
    python, done = LLAMA / "bin" / "python", LLAMA / "installed"
    if done.exists() and done.read_text() == " ".join(LLAMA_PINNED):
        return python
    print(f"making {LLAMA}: llama.cpp is compiled for this machine (once)", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(LLAMA)], check=True)
        env = os.environ | {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
        subprocess.run([str(python), "-m", "pip", "install", "-q", *LLAMA_PINNED], check=True, env=env)
    except subprocess.CalledProcessError as e:
        raise NoPeer(f"llama.cpp: {' '.join(map(str, e.cmd))} fails with status {e.returncode}; leave it out of --targets") from e
    done.write_text(" ".join(LLAMA_PINNED))
    return python
