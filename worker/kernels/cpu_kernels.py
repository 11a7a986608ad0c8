"""Calls the CPU kernels (cpu/layer.cpp) through ctypes. Memory is passed by address, without copies.

Calls release the GIL and divide their work among the library's threads. One caller at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.model_config import ModelConfig
from worker.core.kernel_speed import KernelSpeed
from worker.models.adapters import MOST_SEGMENTS
from worker.models.llama import embedding_scale
from worker.models.quantised import Matrix, QuantisedMatrix
from worker.models.weights import LayerWeights

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Kinds of bfloat16 products, fastest first: (number in the library, required divisor of a matrix's inputs). tiles:
#: AMX; pairs: AVX-512 BF16; portable: float32 vectors. All use the same layout of weights.
PRODUCTS = {"tiles": (4, 32), "pairs": (3, 2), "portable": (1, 1)}
LANES = 16
#: Padding of activation rows, so that neighbouring rows do not map to the same cache set.
PADDING = LANES
_MOST_SHARED_HEADS = 48
#: Weights that stay plain, and those that are packed in tiles.
_PLAIN = (
    *("input_norm", "post_norm", "qkv_bias", "out_bias", "gate_up_bias", "down_bias", "q_norm", "k_norm"),
    *("router", "attended_norm", "mlp_norm"),
)
_MATRICES = ("qkv", "out", "gate_up", "down")
_CODES = {"int4": 0, "int8": 1, "fp8": 2}
#: Matrices of LoRA adapters: A is plain, B has tiles `[outputs / 16][rank][16]`.
_ADAPTERS = tuple(f"{product}_{matrix}" for product in _MATRICES for matrix in "ab")

#: Tokens of one sequence: rows row .. row + count of q, at positions from `start`, written to rows from `out_row`.
#: pages: address of int64 `[layers, pages_a_layer]`, byte offsets of the sequence's pages.
QUERY = np.dtype(
    [("row", "i4"), ("count", "i4"), ("start", "i4"), ("out_row", "i4"), ("pages", "u8"), ("pages_a_layer", "i8")]
)


class _Shape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                *("hidden", "heads", "kv_heads", "dim", "intermediate", "chunk"),
                *("experts", "per_token", "expert_size", "norm_weights", "gemma", "rank"),
            )
        ),
        *((name, ctypes.c_float) for name in ("eps", "attention_scale", "embedding_scale")),
    ]


class _Speed(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("peak", "product")]


class _Coded(ctypes.Structure):
    """Addresses of a matrix of few bits, see coded.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "group_of")),
        *((name, ctypes.c_int32) for name in ("group", "groups", "code", "scale")),
    ]

    @classmethod
    def of(cls, m: QuantisedMatrix) -> _Coded:
        """The addresses of `m`."""
        tensors = (t if t is None else t.data_ptr() for t in (m.codes, m.scales, m.zeros, m.group_of))
        return cls(*tensors, m.group, m.scales.shape[1], _CODES[m.code], TYPES[m.scales.dtype])


class PackedLayer(ctypes.Structure):
    """Addresses of one layer's packed weights."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "input_norm",
            "post_norm",
            *_MATRICES,
            "qkv_bias",
            "out_bias",
            "gate_up_bias",
            "down_bias",
            "q_norm",
            "k_norm",
            "router",
            "attended_norm",
            "mlp_norm",
            *_ADAPTERS,
        )
    ]
    _fields_ += [("window", ctypes.c_int32), *((f"coded_{name}", _Coded) for name in _MATRICES)]


class Buffers(ctypes.Structure):
    """Addresses of one step's activations: x `[tokens, hidden]`, a and mid (rows padded by PADDING), q, kv, cos, sin.
    Some families also need routed and spare (see layer.cpp). Memory for float32; a, mid and spare are bfloat16 inside
    where the products take that. With LoRA adapters also each row's adapter (see `adapt`), and low."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("x", "a", "mid", "q", "kv", "routed", "spare", "cos", "sin", "adapters", "low")
    ]

    def adapt(self, numbers: np.ndarray) -> None:
        """From the next call on, rows have these adapters, int32 (-1: none). The caller keeps the array alive."""
        self.adapters = numbers.ctypes.data


class CpuKernels:
    """The library's functions, typed. threads: number of computing threads, including the caller.

    products: allowed kinds of bfloat16 products. Used is the first that this machine supports and that agrees with the
    portable one in a test at construction.
    """

    def __init__(self, library: Path, threads: int, products: Sequence[str] = tuple(PRODUCTS)) -> None:
        self._lib: Any = ctypes.CDLL(str(library))
        self._lib.upbeat_usable.argtypes = [ctypes.c_int]
        self._lib.upbeat_registers.restype = ctypes.c_char_p
        self.products = [name for name in products if name == "portable" or self._lib.upbeat_usable(PRODUCTS[name][0])]
        p, i, q = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._lib.upbeat_team.restype = p
        for name, arguments in {
            "speed": [i, p],
            "team": [i],
            "team_use": [p, i],
            "team_end": [p],
            "pack": [i, p, p, q, q, q],
            "embed": [i, p, p, p, i, p],
            "project": [p, i, p, p, p, i],
            "write": [p, i, p, p, i, p, p, p],
            "finish": [p, i, p, p, p, p, i, i, i, p],
            "logits": [p, i, p, p, p, q, p, i, p],
        }.items():
            getattr(self._lib, f"upbeat_{name}").argtypes = arguments
        self.threads = threads
        self._team = self._lib.upbeat_team(threads)

    def use(self, width: int) -> None:
        """From the next call on, `width` threads compute (1 to `threads`); the others sleep. Results do not depend on
        it. Call it on the thread that calls the other functions. Raises ValueError."""
        if not 1 <= width <= self.threads:
            raise ValueError(f"width must be 1 to {self.threads}, got {width}")
        self._lib.upbeat_team_use(self._team, width)

    def speed(self) -> KernelSpeed:
        """Measures the speed of bfloat16 products; takes some ten milliseconds of one thread."""
        measured = _Speed()
        self._lib.upbeat_speed(PRODUCTS[self.products[0]][0], ctypes.byref(measured))
        return KernelSpeed(self._lib.upbeat_registers().decode(), self.products[0], measured.product, measured.peak)

    def close(self) -> None:
        """Ends the threads."""
        self._lib.upbeat_team_end(self._team)

    @staticmethod
    def suits(config: ModelConfig, chunk_tokens: int) -> str:
        """Why these kernels do not suit a model; empty when they do."""
        dense = config.intermediate_size in config.mlp_sizes()
        sizes = {"hidden_size": config.hidden_size, "head_dim": config.head_dim}
        sizes |= {"intermediate_size": config.intermediate_size} if dense else {}
        sizes |= {"moe_intermediate_size": config.experts.size} if config.experts else {}
        for name, size in sizes.items():
            if size % LANES:
                return f"{name} = {size} is no multiple of {LANES}"
        if chunk_tokens % LANES:
            return f"kv.chunk_tokens = {chunk_tokens} is no multiple of {LANES}"
        if config.heads // config.kv_heads > _MOST_SHARED_HEADS:
            return f"{config.heads // config.kv_heads} heads share a KV head"
        return ""

    def pack(self, field: str, sources: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
        """Writes a layer's matrix `field`, made of stacked `sources`, into `out` as tiles; False for fields that are
        not packed.

        gate_up alternates tiles of the gate and up projections of the same outputs, of each expert in turn if there are
        several. B of LoRA adapters has tiles of its own, and so have the parts of a matrix of few bits, `qkv.codes` and
        the like.
        """
        if field in _ADAPTERS and field.endswith("_b"):
            [b] = sources
            number, outputs, rank = b.shape
            out.view(number, outputs // LANES, rank, LANES).copy_(b.view(number, -1, LANES, rank).transpose(2, 3))
            return True
        matrix, _, part = field.partition(".")
        if part:
            _tile(sources, out, 2 if matrix == "gate_up" else 1)
            return True
        if field not in _MATRICES:
            return False
        spread = 2 if field == "gate_up" else 1
        at = 0
        for n, source in enumerate(sources):
            plain = source.to(out.dtype).contiguous()
            rows, width = plain.shape
            # An up projection begins at the second tile of its gate projection.
            first = (at if n % spread == 0 else at - rows + LANES) * width * out.itemsize
            self._lib.upbeat_pack(TYPES[out.dtype], plain.data_ptr(), out.data_ptr() + first, rows, width, spread)
            at += rows
        return True

    def model(self, config: ModelConfig, chunk_tokens: int, dtype: torch.dtype, rank: int = 0) -> ModelKernels:
        """The functions for one model. rank: of its LoRA adapters; 0: it has none."""
        scale = embedding_scale(config, dtype)
        return ModelKernels(self._lib, self._team, config, chunk_tokens, self._type(config, dtype), scale, rank)

    def _type(self, config: ModelConfig, dtype: torch.dtype) -> int:
        if dtype is not torch.bfloat16 or config.quantisation is not None:
            return TYPES[dtype]
        inputs = (config.hidden_size, config.heads * config.head_dim, *config.mlp_sizes())
        suit = (
            kind for kind, multiple in map(PRODUCTS.__getitem__, self.products) if not any(n % multiple for n in inputs)
        )
        return next(suit, TYPES[dtype])


def _tile(sources: Sequence[torch.Tensor], out: torch.Tensor, spread: int) -> None:
    """Writes stacked `sources [outputs, n]` as tiles `[outputs / 16, n, 16]`; with `spread` 2, tiles of two sources in
    turn."""
    tiles = [source.reshape(-1, LANES, source.shape[1]).transpose(1, 2) for source in sources]
    places = out.view(-1, spread, *tiles[0].shape[1:])
    if spread > 1:
        for which, tile in enumerate(tiles):
            places[:, which].copy_(tile)
    else:
        places[:, 0].copy_(torch.cat(tiles))


class ModelKernels:
    """The steps of one model's forward pass. The caller owns buffers and weights and keeps them alive during calls."""

    def __init__(
        self, lib: Any, team: Any, config: ModelConfig, chunk_tokens: int, kind: int, embedding_scale: float, rank: int
    ) -> None:
        self._lib, self._team, self._type = lib, team, kind
        c, e = config, config.experts
        experts = (e.count, e.per_token, e.size, int(e.norm)) if e else (0, 0, 0, 0)
        sizes = c.hidden_size, c.heads, c.kv_heads, c.head_dim, c.intermediate_size, chunk_tokens
        factors = c.norm_eps, c.attention_scale, embedding_scale
        self._shape = _Shape(*sizes, *experts, int(c.gemma is not None), rank, *factors)
        #: Floats of a row of `low`.
        self.low_width = MOST_SEGMENTS * rank
        self._at = ctypes.byref(self._shape)

    def layer(self, weights: LayerWeights, window: int | None) -> PackedLayer:
        """The addresses of a layer's packed weights; valid until its slot changes."""
        made = PackedLayer(window=window or 0)
        for name in (*_PLAIN, *_MATRICES, *_ADAPTERS):
            tensor: Matrix | None = getattr(weights, name)
            if isinstance(tensor, QuantisedMatrix):
                setattr(made, f"coded_{name}", _Coded.of(tensor))
            else:
                setattr(made, name, None if tensor is None else tensor.data_ptr())
        return made

    def embed(self, table: torch.Tensor, tokens: np.ndarray, x: torch.Tensor) -> None:
        """Fills rows of `x` with the embeddings of int64 `tokens`."""
        self._lib.upbeat_embed(self._type, self._at, table.data_ptr(), tokens.ctypes.data, len(tokens), x.data_ptr())

    def project(self, layer: PackedLayer, buffers: Buffers, tokens: int) -> None:
        """x -> q and kv, rotated."""
        self._lib.upbeat_project(self._team, self._type, self._at, ctypes.byref(layer), ctypes.byref(buffers), tokens)

    def write(self, buffers: Buffers, base: int, pages: np.ndarray, slots: np.ndarray) -> None:
        """kv -> pages. Token i goes to slot `slots[i]` (int32) of the page at byte `pages[i]` (int64) from address
        `base`."""
        at = ctypes.byref(buffers)
        self._lib.upbeat_write(
            self._team, self._type, self._at, at, len(slots), base, pages.ctypes.data, slots.ctypes.data
        )

    def finish(
        self, layer: PackedLayer, number: int, buffers: Buffers, queries: np.ndarray, rows: int, base: int
    ) -> None:
        """Attention of `queries` over layer `number`'s pages, and the rest of the layer for `rows` rows of x, in
        place."""
        at = ctypes.byref(layer), ctypes.byref(buffers), queries.ctypes.data
        self._lib.upbeat_finish(self._team, self._type, self._at, *at, len(queries), rows, number, base)

    def logits(self, norm: torch.Tensor, head: torch.Tensor, buffers: Buffers, rows: int, out: torch.Tensor) -> None:
        """`out` float32 `[rows, vocabulary]` from the first `rows` rows of x; `head` is plain."""
        at = norm.data_ptr(), head.data_ptr(), head.shape[0], ctypes.byref(buffers)
        self._lib.upbeat_logits(self._team, self._type, self._at, *at, rows, out.data_ptr())
