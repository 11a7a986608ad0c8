"""The forward pass of the Llama family and its relatives, as functions over packed tokens `[tokens, hidden]`, without
state, KV or batching.

Operations and roundings follow the published implementations (norms in float32, everything else in the model's type),
so that logits agree.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from runtime.model_config import ModelConfig
from runtime.model_experts import Experts
from runtime.model_rope import Rope
from worker.models.low_rank import Groups, linear
from worker.models.quantised import plain
from worker.models.weights import LayerWeights, TopWeights


class RopeTable:
    """cos and sin of every position, `[positions, head_dim]`, in the model's type; grows with longer prompts. rope:
    None: the model's."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, rope: Rope | None = None) -> None:
        rope = rope or config.rope
        self._frequencies, self._scale = rope_frequencies(rope, config.head_dim), rope.scale
        self._dtype = dtype
        self._cos = self._sin = torch.empty(0, config.head_dim, dtype=dtype)

    def at(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[tokens, 1, head_dim]` for `positions [tokens]`, all below `longest`; sin has its first half
        negated."""
        if longest > self._cos.shape[0]:
            count = 1 << max(10, (longest - 1).bit_length())
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self._frequencies
            cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
            self._cos = torch.cat((cos, cos), -1).to(self._dtype)
            self._sin = torch.cat((-sin, sin), -1).to(self._dtype)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rope_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per token, float32 `[head_dim / 2]`.

    llama3 keeps wavelengths that are short compared with the original context, stretches long ones by `factor`, and
    blends in between, by the number of turns within that context. yarn does the same, and blends linearly over the
    dimensions between two such numbers.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        low, high = (_dimension_that_turns(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        dimensions = torch.arange(head_dim // 2, dtype=torch.float32)
        stretched = ((dimensions - low) / (high - low or 0.001)).clamp(0.0, 1.0)
        return plain / rope.factor * stretched + plain * (1 - stretched)
    turns = rope.original_tokens * plain / (2 * math.pi)  # full turns within the original context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain / rope.factor * (1 - blend) + plain * blend


def _dimension_that_turns(turns: float, rope: Rope, head_dim: int) -> float:
    """The (fractional) index of the pair of dimensions that makes `turns` turns within the original context."""
    return head_dim * math.log(rope.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool = False) -> torch.Tensor:
    """`x` divided by its root mean square along the last dimension (in float32), times `weight`; gemma: times 1 +
    `weight`, in float32 too."""
    wide = x.float()
    if gemma:
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `x [tokens, heads, head_dim]`; `cos` and `sin` from `RopeTable.at`."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


def norm(c: ModelConfig, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`rms_norm` as the model's family has it."""
    return rms_norm(x, weight, c.norm_eps, c.gemma is not None)


def embedding_scale(c: ModelConfig, dtype: torch.dtype) -> float:
    """The factor of embeddings, rounded to `dtype`."""
    return float(torch.tensor(c.hidden_size**0.5).to(dtype)) if c.gemma else 1.0


def embed(top: TopWeights, c: ModelConfig, tokens: torch.Tensor) -> torch.Tensor:
    """`[tokens, hidden]` of token ids `[tokens]`."""
    found, scale = F.embedding(tokens, top.embedding), embedding_scale(c, top.embedding.dtype)
    return found if scale == 1.0 else found * scale


def project(
    w: LayerWeights, c: ModelConfig, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, adapted: Groups = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]` of the layer's input `x [tokens, hidden]`;
    q and k are rotated. adapted: rows with adapters."""
    normed, outputs = norm(c, x, w.input_norm), [n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)]
    packed = linear(normed, w.qkv, w.qkv_bias, w.qkv_a, w.qkv_b, adapted, outputs).view(
        -1, c.heads + 2 * c.kv_heads, c.head_dim
    )
    q, k, v = torch.split(packed, [c.heads, c.kv_heads, c.kv_heads], dim=1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = norm(c, q, w.q_norm), norm(c, k, w.k_norm)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish_layer(
    w: LayerWeights, c: ModelConfig, x: torch.Tensor, attended: torch.Tensor, adapted: Groups = ()
) -> torch.Tensor:
    """The layer's output `[tokens, hidden]`, given its input `x` and attention's result `[tokens, heads * head_dim]`.
    adapted: rows with adapters."""
    out = linear(attended, w.out, w.out_bias, w.out_a, w.out_b, adapted, [c.hidden_size])
    x = x + (out if w.attended_norm is None else norm(c, out, w.attended_norm))
    normed = norm(c, x, w.post_norm)
    if w.router is not None and c.experts is not None:
        return x + mix_experts(w, c.experts, w.router, normed)
    both = linear(normed, w.gate_up, w.gate_up_bias, w.gate_up_a, w.gate_up_b, adapted, 2 * [c.intermediate_size])
    gate, up = both.chunk(2, dim=-1)
    gated = F.gelu(gate, approximate="tanh") if c.gemma else F.silu(gate)
    out = linear(gated * up, w.down, w.down_bias, w.down_a, w.down_b, adapted, [c.hidden_size])
    return x + (out if w.mlp_norm is None else norm(c, out, w.mlp_norm))


def route(e: Experts, router: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that each row of `x [tokens, hidden]` takes, int64 `[tokens, per_token]`, and their weights."""
    probabilities = F.linear(x, router).softmax(-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(e.per_token, dim=-1)
    if e.norm:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(x.dtype)


def mix_experts(w: LayerWeights, e: Experts, router: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`[tokens, hidden]`: for each row of `x [tokens, hidden]` the weighted sum of its experts' outputs.

    Each expert computes all of its rows at once. A row's outputs are summed in float32.
    """
    chosen, weights = route(e, router, x)
    gate_up, down = plain(w.gate_up).view(e.count, 2 * e.size, -1), plain(w.down).view(e.count, -1, e.size)
    mixed = x.new_empty(*chosen.shape, x.shape[-1])
    for expert in sorted(set(chosen.flatten().tolist())):
        row, rank = torch.where(chosen == expert)
        gate, up = F.linear(x[row], gate_up[expert]).chunk(2, dim=-1)
        mixed[row, rank] = F.linear(F.silu(gate) * up, down[expert]) * weights[row, rank, None]
    return mixed.sum(1, dtype=torch.float32).to(x.dtype)


def logits(top: TopWeights, c: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    """float32 `[tokens, vocab]` of the last layer's output `x [tokens, hidden]`."""
    return F.linear(norm(c, x, top.norm), top.head).float()
