"""CacheGen by LMCache: each token's K and V quantised to a few levels, then entropy-coded by channel. Needs CUDA.

LMCache serialises its encoder's output with pickle, which must not be read here. So the tensors have our own layout:
both coders' tables (cumulative frequencies of a channel's levels), the largest value of each token, the lengths of the
channels' streams, the streams. LMCache's kernels also exist in plain Python; only tests use them, because they are far
too slow to serve.

Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast LLM Serving", SIGCOMM '24.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.tiers.codec import Unavailable, Unencodable
from kvstore.tiers.codecs_lmcache import load_lmcache, tensor_of

_NEEDS = "install LMCache with its dependencies in an environment that has them (docs/design/0006)"
#: Most tokens that one stream of LMCache's coder is known to hold.
_MAX_TOKENS = 256
#: Bytes that the coder may read past the last stream.
_SLACK_BYTES = 4


def levels_of(layer: int) -> int:
    """Quantisation levels of a layer: LMCache's default for K of models that it does not list. Its default for V of
    layers 2 to 9 is 16."""
    return 32 if layer < 10 else 16


class CacheGen:
    """See the module."""

    name = "cachegen"

    def __init__(self, device: str) -> None:
        """Raises Unavailable where LMCache is missing, or where `device` is "cuda" and there is none."""
        if device == "cuda" and not torch.cuda.is_available():
            raise Unavailable("CacheGen runs on CUDA, and torch sees no CUDA device; choose fp8 or k16v8")
        self._device = device
        package = "lmcache.storage_backend.serde.cachegen"
        self._encoder, self._decoder, self._basics = (
            load_lmcache(f"{package}_{part}", _NEEDS) for part in ("encoder", "decoder", "basics")
        )

    def _levels(self, layer: int) -> torch.Tensor:
        return torch.tensor([float(levels_of(layer))], device=self._device)

    def encode(self, piece: memoryview, shape: KvShape, layer: int) -> memoryview:
        if shape.chunk_tokens > _MAX_TOKENS:
            raise Unencodable(f"chunks of more than {_MAX_TOKENS} tokens")
        # CacheGen's order: layers, K and V, tokens, heads, head_dim.
        kv = tensor_of(piece, shape).to(self._device, torch.float32).permute(1, 2, 0, 3)[None].contiguous()
        largest = kv.abs().amax(dim=(-2, -1))
        if not bool((torch.isfinite(largest) & (largest > 0)).all()):
            raise Unencodable("a token whose values are all zero, or not all finite")
        levels = self._levels(layer)
        out = self._encoder.encode_function(kv, None, levels, levels, shape.chunk_tokens)
        (stream,) = out.data_chunks
        fields = (
            (out.cdf, torch.int16),
            (out.max_tensors_key, torch.float32),
            (out.max_tensors_value, torch.float32),
            (stream.bytestream_lengths, torch.int16),
            (stream.bytestream, torch.uint8),
        )
        return memoryview(b"".join(_bytes_of(tensor, dtype) for tensor, dtype in fields))

    def decode(self, stored: memoryview, into: memoryview, shape: KvShape, layer: int) -> None:
        channels, tokens = shape.kv_heads * shape.head_dim, shape.chunk_tokens
        fields = _Fields(stored, self._device)
        cdf = fields.take(torch.int16, 2, channels, levels_of(layer) + 1)
        largest = [fields.take(torch.float32, 1, tokens, 1) for _ in range(2)]
        lengths = fields.take(torch.int16, 2, channels).to(torch.int32)
        stream = fields.take(torch.uint8, len(fields.rest))
        if int(lengths.min()) < 0 or int(lengths.sum()) != len(stream):
            raise PieceLost("not what CacheGen wrote")
        stream = torch.nn.functional.pad(stream, (0, _SLACK_BYTES))
        coded: Any = self._basics.CacheGenGPUBytestream(stream, lengths, tokens)
        room = torch.zeros((tokens, 2 * channels), dtype=torch.uint8, device=self._device)
        sides = self._decoder.decode_function_gpu(cdf, [coded], 1, tokens, room)
        target = tensor_of(into, shape)
        for side, (values, most) in enumerate(zip(sides, largest, strict=True)):
            exact = self._decoder.do_dequantize(values, self._levels(layer), most)
            target[:, side].copy_(exact.view(tokens, shape.kv_heads, shape.head_dim).permute(1, 0, 2))


def _bytes_of(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    return tensor.to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class _Fields:
    """Takes tensors from stored bytes, in order. Raises PieceLost when there are too few."""

    def __init__(self, stored: memoryview, device: str) -> None:
        self.rest = stored
        self._device = device

    def take(self, dtype: torch.dtype, *extents: int) -> torch.Tensor:
        length = math.prod(extents) * dtype.itemsize
        if not 0 < length <= len(self.rest):
            raise PieceLost("not what CacheGen wrote")
        taken, self.rest = bytearray(self.rest[:length]), self.rest[length:]
        return torch.frombuffer(taken, dtype=dtype).view(extents).to(self._device)
