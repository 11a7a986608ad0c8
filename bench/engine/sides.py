"""The two processes that bench/engine compares: how they are made, told and ended."""

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
#: vLLM's OpenMP threads spin this long after their last loop (libiomp5's default is 0.2 s) before the processors are free.
STILL_S = 0.4


#: With which libraries that choose by the processor compute as on one without AVX-512.
AVX2_ONLY = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
#: Of /proc/cpuinfo: what multiplies bfloat16 as such.
MULTIPLIES_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


def best_dtype(avx2: bool) -> str:
    """vLLM's best type for a bfloat16 model: float32 where it would emulate bfloat16."""
    return "bfloat16" if abilities() & MULTIPLIES_BFLOAT16 and not avx2 else "float32"


class NoPeer(Exception):
    """vLLM cannot be had here."""


def environment() -> Path:
    """vLLM's interpreter; its environment is made when it is not there, which takes some minutes. Raises NoPeer."""
    python, done = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed"
    wanted = REQUIREMENTS.read_text()
    if not done.exists() or done.read_text() != wanted:
        print(f"making {ENVIRONMENT} for vLLM (once)", flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", str(REQUIREMENTS)], check=True)
        except subprocess.CalledProcessError as e:
            raise NoPeer(f"{' '.join(e.cmd)} fails with status {e.returncode}; --no-peer measures our side alone") from e
        done.write_text(wanted)
    return python


class Side:
    """A child that answers the commands of `protocol.py`."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], said: dict[str, Any], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(said)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, text=True
            )
        self.ready: dict[str, Any] = self._answer()["ready"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):  # what libraries print is skipped
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{self.name}: {answer['error']}; see {self._log}")
                return answer
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}: {self._log.read_text()[-2000:]}")

    def ask(self, do: str, **arguments: object) -> float:
        """Seconds that the command took, by the child's own clock; returns when its threads are still again."""
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


def ours(said: dict[str, Any], scratch: Path) -> Side:
    """Our engine."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return Side("ours", [sys.executable, str(HERE / "ours.py")], env, said, scratch / "ours.log")


def commit_of(name: str) -> str:
    """The hash of the commit that git knows by this name, which may mean another one tomorrow. Raises NoPeer."""
    return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoPeer(f"git {' '.join(arguments)} fails: {done.stderr.strip() or 'no such commit'}")
    return done.stdout.strip()


def before(commit: str, said: dict[str, Any], scratch: Path) -> Side:
    """Our engine as it was at `commit` (`commit_of`), in a work tree under .cache that stays. Raises NoPeer when there can be none."""
    tree = ROOT / ".cache" / "bench-engine" / commit
    if not tree.exists():
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(tree), commit)
    env = os.environ | {"PYTHONPATH": str(tree)}
    return Side(f"before ({commit})", [sys.executable, str(tree / "bench" / "engine" / "ours.py")], env, said, scratch / "before.log")


def theirs(said: dict[str, Any], scratch: Path) -> Side:
    """vLLM at its best settings on a CPU: Intel's OpenMP of its wheel, its threads bound, all in one process."""
    cache = ENVIRONMENT / ("cache-avx2" if said["avx2"] else "cache")
    cores = sorted(os.sched_getaffinity(0))[: said["threads"]]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "LD_PRELOAD": str(ENVIRONMENT / "lib" / "libiomp5.so"),
        "OMP_NUM_THREADS": str(said["threads"]),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(round(said["kv_gib"])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if said["avx2"]:
        env |= AVX2_ONLY
    return Side("vLLM", [str(environment()), str(HERE / "theirs.py")], env, said, scratch / "vllm.log")
