"""What identifies a model's weights: a digest of their names, types, shapes and bytes, and of the mathematics around them.

It is what the KV fingerprint is made from, so it must not depend on a path, a time, or on how the checkpoint is sharded.
Reading every byte takes a moment, so the result is remembered in a cache directory, keyed by the files' paths, sizes and
times of change; that key only finds the entry and never enters the digest.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from blake3 import blake3

from worker.models.config import ModelConfig
from worker.models.weights import Checkpoint


def weights_digest(tensors: dict[str, torch.Tensor], forget: Callable[[torch.Tensor], None]) -> bytes:
    """32 bytes over (name, dtype, shape, bytes) of all tensors, in the order of their names; `forget` is told of each when it is done."""
    digest = blake3(b"upbeat weights", max_threads=blake3.AUTO)
    for name in sorted(tensors):
        tensor = tensors[name]
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(struct.pack("<I", len(head)) + head)
        if tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            forget(tensor)
    return digest.digest()


def cached_weights_digest(checkpoint: Checkpoint, cache_dir: Path | None) -> bytes:
    """The digest of a checkpoint's tensors, remembered in `cache_dir` for as long as its files do not change. None: not remembered."""
    files = checkpoint.files
    if cache_dir is None:
        return weights_digest(checkpoint.tensors, checkpoint.forget)
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    entry = cache_dir / f"weights-{blake3(json.dumps(stats).encode()).hexdigest()[:32]}.digest"
    try:
        known = bytes.fromhex(entry.read_text().strip())
        if len(known) == 32:
            return known
    except (OSError, ValueError):
        pass
    digest = weights_digest(checkpoint.tensors, checkpoint.forget)
    cache_dir.mkdir(parents=True, exist_ok=True)
    temporary = entry.with_suffix(f".{os.getpid()}")
    temporary.write_text(digest.hex() + "\n")
    temporary.replace(entry)
    return digest


def model_digest(weights: bytes, config: ModelConfig) -> bytes:
    """32 bytes over the weights' digest and everything in `config` that changes what the weights compute.

    Two models with equal weights and another rotary base have another KV cache. End tokens and the length limit change no KV.
    """
    said = asdict(config)
    for name in ("architecture", "eos_ids", "max_tokens", "dtype"):
        del said[name]
    return blake3(b"upbeat model" + weights + json.dumps(said, sort_keys=True).encode()).digest()
