"""The comparison's targets as the data of their YAML files.

Each has the same weights, threads and KV memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environments
from peers import vllm_type  # of bench/returning_session_tiers, which environments puts on the path

HERE = Path(__file__).resolve().parent
#: Block size of every engine. Only whole blocks are cached, so shorter blocks leave less to recompute.
BLOCK_TOKENS = 32
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Settings shared by all targets. Threads follow from the machine's cores and `instances`.

    kv_mib: device memory of an instance for KV. dram_gib: memory of an instance for KV evicted from the device.
    """

    model: Path
    weights_mib: float
    kv_bytes_per_token: int
    kv_mib: float
    dram_gib: float
    instances: int
    longest_tokens: int
    installed: environments.Installed


def upbeat(s: Setting, policy: str) -> dict[str, Any]:
    """An Upbeat stack. Its HBM also holds the weights."""
    hbm_gib = round((s.kv_mib + s.weights_mib) / 1024, 4)
    sizes = {"nodes": s.instances, "model": str(s.model), "hbm_gib": hbm_gib, "dram_gib": s.dram_gib}
    settings = {"kv": {"chunk_tokens": BLOCK_TOKENS}, "worker": {"dtype": "bfloat16", "kernels": "native"}}
    return {"upbeat": {"policy": policy, **sizes, "settings": settings}}


def vllm(
    s: Setting, balance: str, *, caching: bool = True, lmcache: bool = False, disk: bool = False
) -> dict[str, Any]:
    """vLLM's servers, each with a share of the cores: compiled, Intel's OpenMP, bound threads, blocks of 32 tokens, and
    as many KV blocks as ours."""
    assert s.installed.vllm is not None
    environment = s.installed.vllm.parents[1]
    blocks = int(s.kv_mib * MIB / s.kv_bytes_per_token / BLOCK_TOKENS)
    command = [
        str(s.installed.vllm), str(HERE / "vllm_server.py"), "--model", str(s.model), "--served-model-name", "bench",
        "--host", "127.0.0.1",
        "--port", "${port}", "--block-size", str(BLOCK_TOKENS), "--max-model-len", str(s.longest_tokens),
        "--num-gpu-blocks-override",
        str(blocks), "--dtype", vllm_type(), "--enable-prompt-tokens-details", "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--seed", "0",
    ]  # fmt: skip
    if not caching:
        command.append("--no-enable-prefix-caching")
    if lmcache:
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": "PORT"}
        connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": where}
        command += ["--kv-transfer-config", json.dumps(connector).replace('"PORT"', "${port_lmcache}")]
    env = {
        "LD_PRELOAD": str(environment / "lib" / "libiomp5.so"),
        "OMP_NUM_THREADS": "${threads}",
        "VLLM_CPU_OMP_THREADS_BIND": "${cores}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Over LMCache, vLLM cannot load artifacts stored by an earlier start and compiles for 90 s again.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CACHE_ROOT": str(environment / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(environment / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(s.installed.lmcache) if lmcache else "",
    }
    at = "http://127.0.0.1:${port}"
    server = {
        "name": "vllm",
        "count": s.instances,
        "command": command,
        "env": env,
        "ready": f"{at}/health",
        "serves": at,
        "ready_s": 600,
    }
    return {
        "start": [*([_lmcache(s, disk=disk)] if lmcache else []), server],
        "balance": balance,
        "versions": {"vllm": "vllm-cpu 0.32.0"},
    }


def _lmcache(s: Setting, *, disk: bool) -> dict[str, Any]:
    """One LMCache multi-process server for all instances, with memory for as many tokens as all our nodes.

    disk: add its disk tier.
    """
    size = str(max(1, round(s.dram_gib * s.instances * (1 if vllm_type() == "bfloat16" else 2))))
    beneath = ["--l2-adapter", '{"type": "fs_native", "base_path": "${scratch}", "num_workers": 4}']
    command = [
        str(s.installed.vllm), "-c", "from lmcache.cli.main import main; main()", "server", "--host", "127.0.0.1",
        "--port", "${port}",
        "--http-host", "127.0.0.1", "--http-port", "${port2}", "--chunk-size", str(BLOCK_TOKENS), "--l1-size-gb", size,
        "--l1-init-size-gb",
        size, "--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven",
        *(beneath if disk else []),
    ]  # fmt: skip
    env = {"PYTHONPATH": str(s.installed.lmcache), "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
    return {
        "name": "lmcache",
        "command": command,
        "env": env,
        "ready": "http://127.0.0.1:${port2}/healthcheck",
        "ready_s": 180,
    }


#: By name. Ratios are to the first target of a run.
TARGETS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "upbeat": lambda s: upbeat(s, "balanced"),
    "sticky": lambda s: upbeat(s, "sticky"),
    "recompute": lambda s: upbeat(s, "recompute"),
    "vllm": lambda s: vllm(s, "round-robin"),
    "vllm-sticky": lambda s: vllm(s, "sticky"),
    "vllm-recompute": lambda s: vllm(s, "round-robin", caching=False),
    "lmcache": lambda s: vllm(s, "round-robin", lmcache=True),
    "lmcache-sticky": lambda s: vllm(s, "sticky", lmcache=True),
    "lmcache-disk": lambda s: vllm(s, "round-robin", lmcache=True, disk=True),
}


def needs(names: list[str]) -> dict[str, bool]:
    """The packages that these targets need."""
    return {
        "vllm": any(name.startswith(("vllm", "lmcache")) for name in names),
        "lmcache": any(name.startswith("lmcache") for name in names),
    }
