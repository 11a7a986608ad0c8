"""The size of a model's KV, from its config.json: the scheduler weighs moving a session by it.

Only sizes count here. Which KV fits which engine is decided by the connector's fingerprint, in the keys of chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from contracts.kv import DTYPE_BYTES, MAX_LAYERS, KvShape, check_shape

#: Of a model whose config.json is not known here: a common shape of eight billion parameters.
_NOMINAL = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_USUAL_DTYPE = "bfloat16"


def kv_shape(config: Mapping[str, Any] | None, name: str, chunk_tokens: int, dtype: str = "auto") -> KvShape:
    """The shape of the model `name`. config: its config.json; None, or without the sizes: a common one's. dtype: as it
    is served; auto: as vLLM chooses.

    Raises InvalidRequest when the sizes are impossible.
    """
    whole = config or {}
    inner = whole.get("text_config")
    said = {**whole, **inner} if isinstance(inner, Mapping) else dict(whole)
    layers, heads = _whole(said, "num_hidden_layers"), _whole(said, "num_attention_heads")
    if not layers or not heads or layers > MAX_LAYERS:
        said = {**said, **_NOMINAL}
        layers, heads = _whole(said, "num_hidden_layers"), _whole(said, "num_attention_heads")
    kv_heads = _whole(said, "num_key_value_heads") or heads
    head_dim = _whole(said, "head_dim") or max(_whole(said, "hidden_size") // heads, 1)
    stored = said.get("dtype") or said.get("torch_dtype")
    # By itself vLLM computes models of 32 bits in 16.
    kind = dtype if dtype in DTYPE_BYTES else stored if stored == "float16" else _USUAL_DTYPE
    of = f"{name}\0{layers}\0{kv_heads}\0{head_dim}\0{kind}\0{chunk_tokens}"
    fingerprint = blake3(of.encode(), derive_key_context="upbeat 2026 size of a vLLM model's KV").digest()
    latent = _whole(said, "kv_lora_rank")
    if latent:  # one latent a token instead of keys and values
        values = latent + _whole(said, "qk_rope_head_dim")
        piece_bytes = chunk_tokens * values * DTYPE_BYTES[kind]
        return check_shape(KvShape(fingerprint, layers, 1, values, chunk_tokens, kind, piece_bytes))
    return check_shape(KvShape.of_heads(fingerprint, layers, kv_heads, head_dim, chunk_tokens, kind))


def _whole(said: Mapping[str, Any], key: str) -> int:
    """A positive whole number; else 0."""
    value = said.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 24 else 0
