"""The KV of a vLLM engine as the store knows it: shape, fingerprint, and which share of a piece a rank has.

Bytes are never converted. How vLLM orders them within a block differs by backend, instruction set, layout and version;
all of that is in the fingerprint, so that only engines of one order share KV.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from contracts.kv import KvShape, fingerprint
from upbeat_vllm.digests import directory_digest
from upbeat_vllm.settings import Refused, Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True)
class Geometry:
    """parts: shares of a piece, one for each tensor-parallel rank that has KV of its own. ranks: that copy."""

    shape: KvShape
    parts: int
    replicas: int
    ranks: int


def why_uncached(config: VllmConfig, kv: KVCacheConfig) -> str:
    """Why this model's KV is not cached; empty: it is."""
    groups = kv.kv_cache_groups
    draft = config.speculative_config
    if draft is not None and draft.method not in _DRAFTS_WITHOUT_KV:
        return f"speculative decoding by {draft.method} has KV of its own"
    if len(groups) != 1:
        return f"it has {len(groups)} groups of KV (sliding windows or recurrent layers beside full attention)"
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec"):
        return f"its KV is a {kind}"
    return ""


def geometry(config: VllmConfig, kv: KVCacheConfig, settings: Settings, version: str) -> Geometry:
    """Raises Refused when the weights cannot be identified."""
    spec: Any = kv.kv_cache_groups[0].kv_cache_spec
    parallel, model = config.parallel_config, config.model_config
    replicas = getattr(kv, "kv_tp_replicas", 1) or 1
    if type(spec).__name__ == "MLAAttentionSpec":
        replicas = parallel.tensor_parallel_size
    parts = parallel.tensor_parallel_size // replicas
    layers = int(model.hf_text_config.num_hidden_layers)
    dtype = str(spec.dtype).removeprefix("torch.")
    layout = f"vllm/{'.'.join(version.split('.')[:2])}/{_backend(config, spec)}/{kv.kv_cache_layout or ''}"
    if changed := _changes(model):
        layout += f"/{changed}"
    found = fingerprint(
        _digest(model, settings),
        dtype=f"{dtype}/{config.cache_config.cache_dtype}",
        chunk_tokens=spec.block_size,
        layout=layout.encode(),
    )
    shape = KvShape(
        fingerprint=found,
        layers=layers,
        kv_heads=int(spec.num_kv_heads) * parts,
        head_dim=int(spec.head_size),
        chunk_tokens=int(spec.block_size),
        dtype=dtype if len(dtype) <= 16 else dtype[:16],
        piece_bytes=int(spec.page_size_bytes) * parts,
    )
    return Geometry(shape, parts, replicas, parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def _changes(model: Any) -> str:
    """What flags change in the model that its files describe."""
    parts = {"overrides": model.hf_overrides or None, "quantization": model.quantization}
    if not any(parts.values()):
        return ""
    return blake3(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _backend(config: VllmConfig, spec: Any) -> str:
    """What orders bytes within a block."""
    import torch

    if torch.cuda.is_available():
        return f"cuda/{getattr(config, 'attention_config', None) and config.attention_config.backend}"
    from vllm.v1.attention.backends import cpu_attn

    try:
        return f"cpu/{cpu_attn._get_attn_isa(spec.dtype, spec.block_size, spec.head_size)}"
    except TypeError:
        return f"cpu/{cpu_attn._get_attn_isa(spec.dtype, spec.block_size)}"


def _digest(model: Any, settings: Settings) -> bytes:
    if settings.digest:
        return bytes.fromhex(settings.digest)
    path = Path(model.model)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    try:
        return directory_digest(path, settings.cache)
    except OSError as e:
        raise Refused(
            f"the weights of {model.model} cannot be identified ({e}); give kv_connector_extra_config.digest"
        ) from e
