"""Starts, commands and ends the two processes that bench/engine compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from runtime.native import abilities

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".cache" / "bench-vllm"
REQUIREMENTS = HERE / "vllm-requirements.txt"
#: Seconds to wait until vLLM's OpenMP threads stop spinning (libiomp5's default is 0.2 s).
STILL_S = 0.4

#: Variables that keep libraries from using AVX-512.
AVX2_ONLY = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
#: Flags of /proc/cpuinfo that mean bfloat16 multiplication.
MULTIPLIES_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


def best_dtype(avx2: bool) -> str:
    """vLLM's fastest type for a bfloat16 model: float32 where it would emulate bfloat16."""
    return "bfloat16" if abilities() & MULTIPLIES_BFLOAT16 and not avx2 else "float32"


class NoPeer(Exception):
    """The other side cannot be installed or checked out. The message says why."""


def environment() -> Path:
    """vLLM's interpreter. Makes its environment if missing, which takes minutes. Raises NoPeer."""
    python, done = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed"
    wanted = REQUIREMENTS.read_text()
    if not done.exists() or done.read_text() != wanted:
        print(f"making {ENVIRONMENT} for vLLM (once)", flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", str(REQUIREMENTS)], check=True
            )
        except subprocess.CalledProcessError as e:
            raise NoPeer(
                f"{' '.join(e.cmd)} fails with status {e.returncode}; --no-peer measures our side alone"
            ) from e
        done.write_text(wanted)
    return python


class Side:
    """A child process that answers the commands of `protocol.py`."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], settings: dict[str, Any], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
            )
        self.ready: dict[str, Any] = self._answer()["ready"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):  # skips output of libraries
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{self.name}: {answer['error']}; see {self._log}")
                return answer
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}: {self._log.read_text()[-2000:]}")

    def ask(self, do: str, **arguments: object) -> float:
        """Seconds that the command took by the child's clock. Returns when the child is idle again."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        seconds = float(self._answer()["seconds"])
        time.sleep(STILL_S)
        return seconds

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ours(settings: dict[str, Any], scratch: Path) -> Side:
    """Start our engine."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return Side("ours", [sys.executable, str(HERE / "ours.py")], env, settings, scratch / "ours.log")


def commit_of(name: str) -> str:
    """The hash of the commit that git calls `name`. Raises NoPeer."""
    return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoPeer(f"git {' '.join(arguments)} fails: {done.stderr.strip() or 'no such commit'}")
    return done.stdout.strip()


def before(commit: str, settings: dict[str, Any], scratch: Path) -> Side:
    """Start our engine at `commit` (from `commit_of`), in a work tree that stays under .cache. Raises NoPeer if git
    fails."""
    tree = ROOT / ".cache" / "bench-engine" / commit
    if not tree.exists():
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(tree), commit)
    env = os.environ | {"PYTHONPATH": str(tree)}
    return Side(
        f"before ({commit})",
        [sys.executable, str(tree / "bench" / "engine" / "ours.py")],
        env,
        settings,
        scratch / "before.log",
    )


def theirs(settings: dict[str, Any], scratch: Path) -> Side:
    """Start vLLM as its documents advise on a CPU: its wheel's Intel OpenMP, bound threads; one process."""
    cache = ENVIRONMENT / ("cache-avx2" if settings["avx2"] else "cache")
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "LD_PRELOAD": str(ENVIRONMENT / "lib" / "libiomp5.so"),
        "OMP_NUM_THREADS": str(settings["threads"]),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(round(settings["kv_gib"])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if settings["avx2"]:
        env |= AVX2_ONLY
    return Side("vLLM", [str(environment()), str(HERE / "theirs.py")], env, settings, scratch / "vllm.log")
