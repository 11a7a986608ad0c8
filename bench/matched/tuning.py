"""The targets, and the search for each peer's best settings.

vLLM and LMCache are those of bench/vllm: compiled, bound threads, the fastest type on this processor (float32 where
bfloat16 would be emulated), balanced by the clients or by vLLM's router (`router`). llama.cpp is its own server
(`llama`). `upbeat-vllm` is Upbeat over the same vLLM, so its difference to a peer is Upbeat; `upbeat` is our own
engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "vllm")]

import llama  # noqa: E402
import router  # noqa: E402
import servers  # noqa: E402
from servers import Setting, target_file, vllm_type  # noqa: E402

from loadtest.compare.settings import TargetFile  # noqa: E402

FIRST = "upbeat-vllm"
#: LMCache's disk: `Programs` gives each server a scratch folder.
_DISK = Path("${scratch}")


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings of a peer. batched_tokens, sequences: vLLM's limits of a step; 0: its default. instances: servers; one
    has all threads and memory. balance: the clients' or the router's."""

    batched_tokens: int = 512
    sequences: int = 0
    instances: int = 2
    balance: str = "sticky"

    @property
    def label(self) -> str:
        """Its name, after the peer's: `b512 s0 2x sticky`."""
        return f"b{self.batched_tokens} s{self.sequences} {self.instances}x {self.balance}"


#: What a sweep tries of each setting, one setting after the other, the others at their best so far. First the step
#: size, which matters most on slow cores.
SWEPT: dict[str, tuple[Any, ...]] = {
    "batched_tokens": (128, 256, 512, 1024, 2048),
    "instances": (2, 1),
    "balance": ("sticky", "sticky-least-busy", "least-busy"),
    "sequences": (0, 8, 32),
}
#: Instead, of a peer with a router: its policies.
ROUTED = {"balance": router.POLICIES}
QUICK: dict[str, tuple[Any, ...]] = {"batched_tokens": (256, 512), "balance": ("sticky", "sticky-least-busy")}


def applied(s: Setting, choice: Choice) -> Setting:
    """The setting of a peer. One instance has the KV memory of all."""
    times = s.instances // choice.instances
    return replace(
        s,
        instances=choice.instances,
        kv_tokens=s.kv_tokens * times,
        dram_gib=s.dram_gib * times,
        batched_tokens=choice.batched_tokens,
        sequences=choice.sequences,
    )


#: Peers by name: their target's data.
PEERS: dict[str, Callable[[Setting, str], dict[str, Any]]] = {
    "vllm": lambda s, balance: servers.bare(s, balance),
    "lmcache": lambda s, balance: servers.lmcache(s, balance, disk=_DISK),
    "vllm-router": lambda s, policy: router.before(servers.bare(s), policy),
    "lmcache-router": lambda s, policy: router.before(servers.lmcache(s, disk=_DISK), policy),
    "llama": lambda s, balance: llama_server(s, balance),
}
#: Ours by name. The native engine has the same KV memory, in its own type.
OURS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    FIRST: lambda s: servers.upbeat(s),
    "upbeat-vllm-unhinted": lambda s: servers.upbeat(s, hints=False),
    "upbeat": lambda s: native(s, "balanced"),
    "upbeat-sticky": lambda s: native(s, "sticky"),
}
DEFAULT_OURS = (FIRST, "upbeat-vllm-unhinted", "upbeat")


def first_choice(name: str) -> Choice:
    """Where a peer's search begins."""
    return Choice(balance=router.POLICIES[0]) if name.endswith("-router") else Choice()


def swept(name: str, *, quick: bool = False) -> dict[str, tuple[Any, ...]]:
    """What a sweep tries of a peer, by setting."""
    return (QUICK if quick else SWEPT) | (ROUTED if name.endswith("-router") else {})


def llama_server(s: Setting, balance: str) -> dict[str, Any]:
    """llama.cpp's server, with 16 bits of the kind that this processor multiplies."""
    return llama.target(
        s.model,
        "bfloat16" if vllm_type() == "bfloat16" else "float16",
        instances=s.instances,
        kv_tokens=s.kv_tokens,
        dram_gib=s.dram_gib,
        batched=s.batched_tokens,
        slots=s.sequences,
        balance=balance,
    )


def native(s: Setting, policy: str) -> dict[str, Any]:
    """A stack with our own engine, with its defaults."""
    settings = {"kv": {"chunk_tokens": servers.PEER_BLOCK_TOKENS}, "worker": {"dtype": "bfloat16"}}
    weights = (s.model / "model.safetensors").stat().st_size
    hbm_gib = round((weights + s.kv_tokens * s.kv_token_bytes) / (1 << 30), 4)
    sizes = {"nodes": s.instances, "model": str(s.model), "hbm_gib": hbm_gib, "dram_gib": s.dram_gib}
    return {"upbeat": {"policy": policy, **sizes, "settings": settings}}


def peer(name: str, s: Setting, choice: Choice) -> TargetFile:
    """A peer with these settings, as a target. Raises KeyError for an unknown name."""
    return target_file(f"{name} {choice.label}", PEERS[name](applied(s, choice), choice.balance))


def of_ours(name: str, s: Setting, batched_tokens: int) -> TargetFile:
    """One of ours. batched_tokens: of its vLLM, if it has one."""
    return target_file(name, OURS[name](replace(s, batched_tokens=batched_tokens)))


Measured = Mapping[Choice, Mapping[str, float]]


def next_choices(setting: str, values: Sequence[Any], best: Choice) -> list[Choice]:
    """What to measure for one setting, the others as in `best`. Balance means nothing for one instance."""
    made = [replace(best, **{setting: value}) for value in values]
    if setting == "balance" and best.instances == 1:
        return [best]
    return list(dict.fromkeys(made))


def best_by_metric(measured: Measured, metrics: Mapping[str, bool]) -> dict[str, Choice]:
    """By metric, the best choice. metrics: whether less is better."""
    found = {}
    for metric, less in metrics.items():
        having = {choice: of[metric] for choice, of in measured.items() if metric in of}
        if having:
            found[metric] = (min if less else max)(having, key=having.__getitem__)
    return found
