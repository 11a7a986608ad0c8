"""Parses a Hugging Face config.json: which models of the Llama family are served, and how they compute.

Supported: Llama (with SmolLM), Mistral, Qwen2 and Qwen3, in the formats of transformers 4 and 5. An unsupported key
that would change the output is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from contracts.kv import DTYPE_BYTES
from runtime.elsewhere import server_of_architecture, server_of_quantisation

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: The key of config.json with the digest of the adapter that was merged into the weights.
ADAPTER_KEY = "upbeat_adapter"
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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture and sizes of one model.

    windows: per layer, how many of the last tokens (itself included) a token sees; None: all.
    dtype: the type named in config.json, or None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_tokens: int
    windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    dtype: str | None
    eos_ids: frozenset[int]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError when the file is missing or holds no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give --model a Hugging Face directory of the Llama family") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read as JSON: {e}; download the model again") from e
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__} instead of an object; download the model again")
    return data


def load_config(directory: Path) -> ModelConfig:
    """The configuration of the model in `directory`. Raises ConfigError naming key and value."""
    return parse_config(read_json(directory / "config.json"), str(directory / "config.json"))


def adapter_digest(directory: Path) -> bytes:
    """The digest of the adapter that was merged into the model in `directory`, 32 bytes; empty: none was. Raises
    ConfigError."""
    path = directory / "config.json"
    value = read_json(path).get(ADAPTER_KEY)
    if value is None:
        return b""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ConfigError(f"{path}: {ADAPTER_KEY} = {value!r} must be 64 hexadecimal digits; merge the adapter again")
    return bytes.fromhex(value)


def parse_config(data: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """A ModelConfig from config.json's content. Raises ConfigError naming the key, the value and `where`."""
    get = _Reader(data, where)
    architecture = _architecture(data, where)
    _refuse_unsupported(get)
    hidden, heads, layers = (
        get.integer("hidden_size"),
        get.integer("num_attention_heads"),
        get.integer("num_hidden_layers"),
    )
    kv_heads = get.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise get.wrong("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    head_dim = get.integer("head_dim", 0, least=0) or (128 if architecture == "Qwen3ForCausalLM" else hidden // heads)
    if head_dim % 2:
        raise get.wrong("head_dim", "must be even")
    qwen2, llama, qwen3 = (architecture.startswith(name) for name in ("Qwen2", "Llama", "Qwen3"))
    bias = get.boolean("attention_bias", False) if llama or qwen3 else False
    rope = _rope(get)
    max_tokens = get.integer("max_position_embeddings")
    if rope.kind == "yarn":  # published configurations give the length before or after stretching
        max_tokens = max(max_tokens, int(rope.original_tokens * rope.factor))
    return ModelConfig(
        architecture=architecture,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=get.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_tokens=max_tokens,
        windows=_windows(get, architecture, layers),
        qkv_bias=True if qwen2 else bias,
        out_bias=bias,
        mlp_bias=get.boolean("mlp_bias", False) if llama else False,
        qk_norm=qwen3,
        tied=get.boolean("tie_word_embeddings", False),
        dtype=_dtype(get),
        eos_ids=token_ids(data.get("eos_token_id"), f"{where}: eos_token_id"),
    )


def token_ids(value: Any, where: str) -> frozenset[int]:
    """One token id, a list of them, or None, as a set."""
    many = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in many):
        raise ConfigError(f"{where} = {value!r} must be a token id or a list of them")
    return frozenset(many)


class _Reader:
    """Checked access to a config's keys."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def wrong(self, key: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} = {self.data.get(key)!r} {remedy}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"must be an integer of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.wrong(key, "must be a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value


def _architecture(data: dict[str, Any], where: str) -> str:
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in ARCHITECTURES:
        served = f"served: {', '.join(ARCHITECTURES)}"
        raise ConfigError(f"{where}: architectures = {names!r} is not served; {served}; {server_of_architecture(name)}")
    return str(name)


def _refuse_unsupported(get: _Reader) -> None:
    if get.data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise get.wrong("hidden_act", "is not supported; supported: silu")
    quantised = get.data.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        method = "mlx" if method is None and get.data.get("quantization") else method
        raise get.wrong(
            "quantization_config", f"is not supported; use the unquantised weights, or {server_of_quantisation(method)}"
        )
    if get.data.get("quantization"):
        raise get.wrong(
            "quantization", f"is not supported; use the unquantised weights, or {server_of_quantisation('mlx')}"
        )
    if get.data.get("partial_rotary_factor", 1.0) != 1.0:
        raise get.wrong("partial_rotary_factor", "is not supported; supported: 1.0")


def _rope(get: _Reader) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    key = "rope_parameters" if get.data.get("rope_parameters") else "rope_scaling"
    section = get.data.get(key) or {}
    if not isinstance(section, dict):
        raise get.wrong(key, "must be an object")
    inner = _Reader(section, f"{get.where}: {key}")
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


def _yarn(inner: _Reader, theta: float, factor: float, original: int) -> Rope:
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


def _windows(get: _Reader, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Llama never has windows; Mistral has them in all layers; Qwen in the layers that config.json names, if
    enabled."""
    if architecture.startswith("Llama") or get.data.get("sliding_window") is None:
        return (None,) * layers
    window = get.integer("sliding_window")
    if architecture.startswith("Mistral"):
        return (window,) * layers
    if not get.boolean("use_sliding_window", False):
        return (None,) * layers
    kinds = get.data.get("layer_types")
    if kinds is None:
        full = get.integer("max_window_layers", layers, least=0)
        return tuple(window if layer >= full else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise get.wrong("layer_types", f"must name full_attention or sliding_attention for each of {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(get: _Reader) -> str | None:
    key = "dtype" if get.data.get("dtype") is not None else "torch_dtype"
    value = get.data.get(key)
    if value is not None and value not in DTYPE_BYTES:
        raise get.wrong(key, f"is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return value
