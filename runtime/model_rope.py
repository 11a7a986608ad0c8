"""The rotary embedding that a config.json describes, in the formats of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.errors import ConfigError
from runtime.model_keys import Keys

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: Rotary embeddings whose angles depend on the sequence's current length, which makes cached KV wrong as it grows.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. kind: one of ROPE_TYPES; fields from `factor` on apply only to kinds that use them.

    scale: factor of cosines and sines (yarn's attention factor).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0


def read_rope(get: Keys) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    key = "rope_parameters" if get.data.get("rope_parameters") else "rope_scaling"
    section = get.data.get(key) or {}
    if not isinstance(section, dict):
        raise get.wrong(key, "must be an object")
    inner = Keys(section, f"{get.where}: {key}")
    theta = inner.number("rope_theta", get.number("rope_theta", 10_000.0))
    kind = section.get("rope_type", section.get("type", "default"))
    if kind in _ROPE_BY_LENGTH:
        why = "rotates by the sequence's length, so that no cache could be used again"
        raise ConfigError(f"{get.where}: {key}.rope_type = {kind!r} {why}; supported: {', '.join(ROPE_TYPES)}")
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{get.where}: {key}.rope_type = {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if section.get("partial_rotary_factor", 1.0) != 1.0:
        raise inner.wrong("partial_rotary_factor", "is not supported; supported: 1.0")
    if kind == "default":
        return Rope(theta)
    factor = inner.number("factor", 0.0)
    if kind == "linear":
        return Rope(theta, kind, factor)
    original = inner.integer("original_max_position_embeddings", get.integer("max_position_embeddings"))
    if kind == "yarn":
        return _yarn(inner, theta, factor, original)
    rope = Rope(
        theta, kind, factor, inner.number("low_freq_factor", 0.0), inner.number("high_freq_factor", 0.0), original
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise inner.wrong("high_freq_factor", f"must be above low_freq_factor, {rope.low_freq_factor}")
    return rope


def _yarn(inner: Keys, theta: float, factor: float, original: int) -> Rope:
    """YaRN (arXiv 2309.00071). The scale is given, or computed from the factor, optionally with two multipliers of its
    logarithm."""

    def grown(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    if inner.data.get("attention_factor") is not None:
        scale = inner.number("attention_factor", 1.0)
    elif inner.data.get("mscale") and inner.data.get("mscale_all_dim"):
        scale = grown(inner.number("mscale", 1.0)) / grown(inner.number("mscale_all_dim", 1.0))
    else:
        scale = grown(1.0)
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    if fast <= slow:
        raise inner.wrong("beta_fast", f"must be above beta_slow, {slow}")
    truncate = inner.boolean("truncate", True)
    return Rope(
        theta, "yarn", factor, original_tokens=original, beta_fast=fast, beta_slow=slow, truncate=truncate, scale=scale
    )
