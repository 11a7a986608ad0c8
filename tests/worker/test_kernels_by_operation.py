"""Each operation of the compiled kernels against a float64 reference that reads the checkpoint itself: norms, products,
rope, attention with and without a window, the MLP."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runtime.model_config import ModelConfig
from tests.worker.test_kernels import WAYS, bench_by
from tests.worker.test_models_against_transformers import Bench, prompt, reference
from worker.models.llama import rope_frequencies

TOKENS = 150  # neither full chunks nor full blocks of rows, and more than one stripe of attention by tiles
MODELS = ["llama-biased", "llama-llama3-rope", "llama-other-head-dim", "mistral-window", "qwen3-wide"]
#: How far the norm of the error may be from the reference's, by type: roundings between operations included.
TOLERANCE = {"float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}


@dataclass
class Recorder:
    """Kernels that note what the first layer was given and what it made of it."""

    kernels: Any
    bench: Bench
    seen: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def _note(self, **buffers: str) -> None:
        for name, buffer in buffers.items():
            memory = self.bench.runner._memory[buffer]
            self.seen.setdefault(name, memory[:TOKENS].clone())

    def project(self, layer: Any, buffers: Any, tokens: int) -> None:
        self._note(given="x")
        self.kernels.project(layer, buffers, tokens)
        self._note(q="q", kv="kv")

    def finish(self, layer: Any, number: int, buffers: Any, queries: np.ndarray, rows: int, base: int) -> None:
        if number == 0:
            # no rows: attention, and no products after it
            self.kernels.finish(layer, number, buffers, queries, 0, base)
            self._note(attended="a")
        self.kernels.finish(layer, number, buffers, queries, rows, base)
        self._note(out="x")


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: torch.Tensor, c: ModelConfig) -> torch.Tensor:
    angles = torch.arange(len(x)).double()[:, None] * rope_frequencies(c.rope, c.head_dim).double()
    cos, sin = torch.cat((angles, angles), -1).cos()[:, None], torch.cat((angles, angles), -1).sin()[:, None]
    half = c.head_dim // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Layer:
    """The first layer in float64, from the checkpoint rounded to the served type."""

    def __init__(self, directory: Path, c: ModelConfig, dtype: torch.dtype) -> None:
        self.c = c
        tensors = load_file(directory / "model.safetensors")
        prefix = "model.layers.0."
        self.w = {
            name.removeprefix(prefix): t.to(dtype).double() for name, t in tensors.items() if name.startswith(prefix)
        }

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(1).double())

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c, h = self.c, norm(x, self.w["input_layernorm.weight"], self.c.norm_eps)
        q, k, v = (self.linear(f"self_attn.{n}_proj", h).view(len(x), -1, c.head_dim) for n in "qkv")
        if c.qk_norm:
            q, k = (norm(t, self.w[f"self_attn.{n}_norm.weight"], c.norm_eps) for n, t in (("q", q), ("k", k)))
        return rotated(q, c), rotated(k, c), v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        c, n = self.c, len(q)
        shared = c.heads // c.kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shared, 1)) / c.head_dim**0.5
        behind = torch.arange(n)[:, None] - torch.arange(n)[None]
        scores[:, (behind < 0) | (behind >= (c.windows[0] or n))] = float("-inf")
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(shared, 1)).reshape(n, -1)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.linear("self_attn.o_proj", attended)
        h = norm(x, self.w["post_attention_layernorm.weight"], self.c.norm_eps)
        gate, up = self.linear("mlp.gate_proj", h), self.linear("mlp.up_proj", h)
        return x + self.linear("mlp.down_proj", gate * gate.sigmoid() * up)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.double().reshape(expected.shape) - expected).norm() / expected.norm()
    assert error < tolerance, f"off by {error:.1e} of the reference"


@pytest.mark.parametrize(
    ("way", "model"),  # only the sizes of one suit tiles
    [(way, model) for way in WAYS for model in MODELS if "tiles" not in way or model == "qwen3-wide"],
)
def test_every_operation_of_a_layer_agrees_with_float64(model: str, way: str, tmp_path: Path) -> None:
    reference(tmp_path, model)
    bench = bench_by(way, tmp_path)
    c, tolerance = bench.model.config, TOLERANCE[way.partition("@")[0].partition("-")[0]]
    recorder = bench.runner._kernels = Recorder(bench.runner._kernels, bench)
    bench.step(bench.cut(bench.pages(TOKENS), prompt(TOKENS), 0, TOKENS))
    seen, layer = recorder.seen, Layer(tmp_path, c, bench.model.dtype)
    x, q, kv = (seen[name].double() for name in ("given", "q", "kv"))
    expected_q, expected_k, expected_v = layer.project(x)
    k, v = kv.view(TOKENS, 2, c.kv_heads, c.head_dim).unbind(1)
    close(q, expected_q, tolerance)
    close(k, expected_k, tolerance)
    close(v, expected_v, tolerance)
    # From here on with what the kernels made: an error counts where it is made.
    attended = layer.attend(q.view(TOKENS, c.heads, c.head_dim), k, v)
    close(attended_rows(seen["attended"], way, attended.shape[1]), attended, tolerance)
    close(seen["out"], layer.finish(x, attended), tolerance)


def attended_rows(buffer: torch.Tensor, way: str, width: int) -> torch.Tensor:
    """Rows of the buffer `a` are padded by 16 values, and are bfloat16 where those are multiplied as such."""
    narrow = "pairs" in way or "tiles" in way
    values = buffer.flatten().view(torch.bfloat16) if narrow else buffer.flatten()
    return values[: TOKENS * (width + 16)].view(TOKENS, -1)[:, :width].double()
