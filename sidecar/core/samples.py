"""What a vLLM server says of its engine at /metrics, in Prometheus's text format."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

#: By field: the sample's name behind `vllm:`. Of several engines (data parallel) the values are added.
_NAMES: Mapping[str, str] = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "prompt_tokens": "prompt_tokens_total",
    "generated_tokens": "generation_tokens_total",
    "cache_queries": "prefix_cache_queries_total",
    "cache_hits": "prefix_cache_hits_total",
    "external_queries": "external_prefix_cache_queries_total",
    "external_hits": "external_prefix_cache_hits_total",
    "preemptions": "num_preemptions_total",
    "ended": "request_prefill_time_seconds_count",
    "ended_prefill_s": "request_prefill_time_seconds_sum",
    "ended_decode_s": "request_decode_time_seconds_sum",
    "ended_computed_tokens": "request_prefill_kv_computed_tokens_sum",
    "ended_generated_tokens": "request_generation_tokens_sum",
}
_FIELD = {name: field for field, name in _NAMES.items()}
_USAGE, _CACHE = "kv_cache_usage_perc", "cache_config_info"
_LABEL = re.compile(r'(num_gpu_blocks|block_size)="([0-9]{1,12})"')


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine's figures at one time; unknown ones are 0.

    Tokens and queries are totals since the server started; `ended_*` those of requests that have ended, without what
    came from a cache in `ended_computed_tokens`. used: share of its KV blocks that requests hold, from 0 to 1.
    block_tokens: of one block.
    """

    running: float = 0.0
    waiting: float = 0.0
    used: float = 0.0
    blocks: int = 0
    block_tokens: int = 0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    cache_queries: float = 0.0
    cache_hits: float = 0.0
    external_queries: float = 0.0
    external_hits: float = 0.0
    preemptions: float = 0.0
    ended: float = 0.0
    ended_prefill_s: float = 0.0
    ended_decode_s: float = 0.0
    ended_computed_tokens: float = 0.0
    ended_generated_tokens: float = 0.0

    def follows(self, other: Sample) -> bool:
        """Whether both may be of the same start of a server, `other` first: no total has fallen."""
        return all(getattr(self, name) >= getattr(other, name) for name in _TOTALS)

    def moved(self, other: Sample) -> bool:
        """Whether the engine has done anything since `other`, as far as its figures show."""
        return any(getattr(self, name) != getattr(other, name) for name in _MOVING)


_TOTALS = tuple(
    f.name for f in fields(Sample) if f.name not in ("running", "waiting", "used", "blocks", "block_tokens")
)
_MOVING = ("running", "waiting", "used", "prompt_tokens", "generated_tokens", "ended")


def read(text: str) -> Sample | None:
    """The figures in `text`; None: it has none of an engine (a server without statistics). Never raises."""
    found: dict[str, float] = {}
    used: list[float] = []
    blocks = block_tokens = 0
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        head, _, number = line.rpartition(" ")
        name, _, labels = head[5:].partition("{")
        if name == _CACHE:
            said = {key: int(value) for key, value in _LABEL.findall(labels)}
            blocks += said.get("num_gpu_blocks", 0)
            block_tokens = said.get("block_size", block_tokens)
            continue
        field = _FIELD.get(name)
        if field is None and name != _USAGE:
            continue
        with contextlib.suppress(ValueError):
            value = float(number)
            if not (math.isfinite(value) and value >= 0):
                continue
            if field is None:
                used.append(value)
            else:
                found[field] = found.get(field, 0.0) + value
    if "running" not in found:
        return None
    share = min(sum(used) / len(used), 1.0) if used else 0.0
    return Sample(used=share, blocks=blocks, block_tokens=block_tokens, **found)
