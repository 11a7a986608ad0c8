"""Parses a Hugging Face config.json: which models of the Llama family are served, and how they compute.

Supported: Llama (with SmolLM), Mistral, Qwen2, Qwen3, Qwen3-MoE and Gemma 3's text models, in the formats of
transformers 4 and 5. Of a Gemma 3 model that reads images, the text model is served. An unsupported key that would
change the output is refused by name.
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
from runtime.elsewhere import VLLM, server_of_architecture
from runtime.model_experts import Experts, read_experts
from runtime.model_gemma import GEMMA_WITH_IMAGES, Gemma, gemma_keys, read_gemma
from runtime.model_keys import Keys
from runtime.model_quantised import Quantisation, read_quantisation
from runtime.model_rope import Rope, read_rope
from runtime.model_windows import read_windows

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    GEMMA_WITH_IMAGES,
)
#: The key of config.json with the digest of the adapter that was merged into the weights.
ADAPTER_KEY = "upbeat_adapter"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture and sizes of one model.

    windows: per layer, how many of the last tokens (itself included) a token sees; None: all.
    dtype: the type named in config.json, or None. experts: of layers that have some; None: no layer has.
    gemma: what Gemma computes otherwise; None for other families. rope: of layers without a window, if it has another.
    quantisation: of matrices that the checkpoint has in few bits; None: it has none.
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
    experts: Experts | None = None
    gemma: Gemma | None = None
    quantisation: Quantisation | None = None

    @property
    def attention_scale(self) -> float:
        """The factor of attention's scores."""
        return 1.0 / math.sqrt(self.gemma.query_scalar if self.gemma else self.head_dim)

    def has_experts(self, layer: int) -> bool:
        """Whether a token chooses among experts in this layer."""
        return self.experts is not None and self.experts.layers[layer]

    def mlp_sizes(self) -> set[int]:
        """The intermediate sizes of the layers' MLPs and experts."""
        if self.experts is None:
            return {self.intermediate_size}
        return {self.experts.size} | (set() if all(self.experts.layers) else {self.intermediate_size})


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
    architecture = _architecture(data, where)
    is_gemma = architecture.startswith("Gemma3")
    get = gemma_keys(data, architecture, where) if is_gemma else Keys(data, where)
    gemma, rope = read_gemma(get) if is_gemma else (None, read_rope(get))
    _refuse_unsupported(get, gemma is not None)
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
    bias = get.boolean("attention_bias", False) if llama or qwen3 or gemma else False
    experts = read_experts(get, layers) if architecture.startswith("Qwen3Moe") else None
    quantisation = read_quantisation(get)
    if quantisation and experts:
        raise get.wrong("quantization_config", f"is not supported for models with experts; {VLLM}")
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
        windows=read_windows(get, architecture, layers),
        qkv_bias=True if qwen2 else bias,
        out_bias=bias,
        mlp_bias=get.boolean("mlp_bias", False) if llama else False,
        qk_norm=qwen3 or gemma is not None,
        tied=get.boolean("tie_word_embeddings", False),
        dtype=_dtype(get),
        eos_ids=token_ids(get.data.get("eos_token_id"), f"{get.where}: eos_token_id"),
        experts=experts,
        gemma=gemma,
        quantisation=quantisation,
    )


def token_ids(value: Any, where: str) -> frozenset[int]:
    """One token id, a list of them, or None, as a set."""
    many = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in many):
        raise ConfigError(f"{where} = {value!r} must be a token id or a list of them")
    return frozenset(many)


def _architecture(data: dict[str, Any], where: str) -> str:
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in ARCHITECTURES:
        served = f"served: {', '.join(ARCHITECTURES)}"
        raise ConfigError(f"{where}: architectures = {names!r} is not served; {served}; {server_of_architecture(name)}")
    return str(name)


def _refuse_unsupported(get: Keys, gemma: bool) -> None:
    if not gemma and get.data.get("hidden_act", "silu") not in ("silu", "swish"):
        raise get.wrong("hidden_act", f"is not supported; supported: silu; or {VLLM}")
    if get.data.get("partial_rotary_factor", 1.0) != 1.0:
        raise get.wrong("partial_rotary_factor", "is not supported; supported: 1.0")


def _dtype(get: Keys) -> str | None:
    key = "dtype" if get.data.get("dtype") is not None else "torch_dtype"
    value = get.data.get(key)
    if value is not None and value not in DTYPE_BYTES:
        raise get.wrong(key, f"is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return value
