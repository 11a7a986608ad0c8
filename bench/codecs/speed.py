"""Size ratio and speed of each codec alone: one thread, pieces in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from contracts.kv import KvShape
from kvstore.tiers.codec import Codec, Unavailable
from kvstore.tiers.codecs import Codecs

#: (name, kv_heads, head_dim, dtype) of pieces of 64 tokens: the demo model's and an 8B Llama's.
SHAPES = (("demo", 2, 32, "float32"), ("8B", 8, 128, "bfloat16"), ("8B", 8, 128, "float16"))


def shape_of(kv_heads: int, head_dim: int, dtype: str) -> KvShape:
    """The KV shape of a model of 32 layers."""
    return KvShape.of_heads(b"c" * 32, 32, kv_heads, head_dim, 64, dtype)


def pieces_of(shape: KvShape, count: int) -> list[memoryview]:
    """Pieces of normal values with some K channels ten times larger, as in real models."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        values = torch.randn(shape.kv_heads, 2, shape.chunk_tokens, shape.head_dim, generator=generator)
        values[:, 0, :, :: max(2, shape.head_dim // 4)] *= 10
        made.append(
            memoryview(bytearray(values.to(getattr(torch, shape.dtype)).view(-1).view(torch.uint8).numpy().tobytes()))
        )
    return made


def codecs_here(names: Sequence[str]) -> tuple[dict[str, Codec], dict[str, str]]:
    """(codecs that work here, reasons why the others do not)."""
    found, missing = {}, {}
    for name in names:
        codec = Codecs().find(name)
        if codec is not None:
            found[name] = codec
        else:
            missing[name] = "does not work on this machine (its log line says why)"
    return found, missing


def cachegen_on_the_host() -> Codec | None:
    """CacheGen with LMCache's Python kernels, for its size only; None if they cannot be imported."""
    try:
        from kvstore.tiers.codecs_cachegen import CacheGen

        return CacheGen("cpu")
    except (Unavailable, ImportError):
        return None


def measure(codec: Codec, shape: KvShape, pieces: Sequence[memoryview], seconds: float) -> dict[str, Any]:
    """Size ratio, error, and GB/s of uncompressed bytes: the best round within `seconds` each way."""
    stored = [codec.encode(piece, shape, layer) for layer, piece in enumerate(pieces)]
    into = memoryview(bytearray(shape.piece_bytes))
    size = shape.piece_bytes * len(pieces)

    def encode() -> None:
        for layer, piece in enumerate(pieces):
            codec.encode(piece, shape, layer)

    def decode() -> None:
        for layer, data in enumerate(stored):
            codec.decode(data, into, shape, layer)

    errors = []
    for layer, (piece, data) in enumerate(zip(pieces, stored, strict=True)):
        codec.decode(data, into, shape, layer)
        before, after = (torch.frombuffer(m, dtype=getattr(torch, shape.dtype)).double() for m in (piece, into))
        errors.append(float(((before - after).square().mean() / before.square().mean()).sqrt()))
    return {
        "ratio": round(size / sum(map(len, stored)), 3),
        "encode_gb_s": round(size / best_s(encode, seconds) / 1e9, 3),
        "decode_gb_s": round(size / best_s(decode, seconds) / 1e9, 3),
        "relative_rms_error": round(float(np.mean(errors)), 5),
    }


def raw(shape: KvShape, pieces: Sequence[memoryview], seconds: float) -> dict[str, Any]:
    """The baseline: GB/s of copying and of checksums."""
    into = memoryview(bytearray(shape.piece_bytes))
    size = shape.piece_bytes * len(pieces)

    def copy() -> None:
        for piece in pieces:
            into[:] = piece

    def checksum() -> None:
        for piece in pieces:
            xxhash.xxh3_64_intdigest(piece)

    return {
        "ratio": 1.0,
        "copy_gb_s": round(size / best_s(copy, seconds) / 1e9, 3),
        "checksum_gb_s": round(size / best_s(checksum, seconds) / 1e9, 3),
    }


def best_s(work: Any, seconds: float) -> float:
    """Seconds of the fastest round."""
    work()
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
