"""A layer with LoRA, forward and backward, in units of a fixed number of rows (tokens) of one example.

Forward: `project` rows to q, k and v; then `finish` rows: they attend to all rows before them, and the rest of the
layer follows. Only a layer's input is saved. Backward: project again; then each `finish` again with its
vector-Jacobian product, which gives the gradient of q for its rows and adds to those of k and v; then that of
`project`. A unit computes gradients by torch.autograd.grad within itself, never across units.

Operations and roundings of the frozen part are those of `worker.models.llama`. LoRA computes in the frozen weights'
type; its gradients are added in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.model_config import ModelConfig
from worker.harvest.adapter import Empty, seeded
from worker.harvest.lanes import Chain
from worker.models.llama import rms_norm, rotate
from worker.models.quantised import linear
from worker.models.weights import LayerWeights

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
_PROJECTED, _FINISHED = ("q", "k", "v"), ("o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of LoRA's inputs. A mask depends on `seeds` (seed, step, example), the layer, the first row of its unit
    and the module only, so that recomputing draws it again. share 0: none."""

    share: float = 0.0
    seeds: tuple[int, ...] = ()

    def mask(self, layer: int, row: int, module: str, like: torch.Tensor) -> torch.Tensor | None:
        """Factors of the input `like [rows, width]`: 0, or 1 / (1 - share)."""
        if not self.share:
            return None
        generator = seeded(*self.seeds, layer, row, module)
        kept = torch.empty(like.shape, dtype=torch.float32).bernoulli_(1 - self.share, generator=generator)
        return kept.mul_(1 / (1 - self.share)).to(like.dtype)


@dataclass(frozen=True, slots=True)
class Deltas:
    """What LoRA adds to the projections of one layer, for the rows of one unit, which begin at `row`."""

    pairs: Pairs
    scale: float
    dropout: Dropout
    layer: int
    row: int

    def of(self, module: str, x: torch.Tensor) -> torch.Tensor:
        """B (scale * A dropout(x)), for `x [rows, input]`."""
        a, b = self.pairs[module]
        mask = self.dropout.mask(self.layer, self.row, module, x)
        x = x if mask is None else x * mask
        return F.linear(F.linear(x, a.to(x.dtype)) * self.scale, b.to(x.dtype))


def project(
    w: LayerWeights, c: ModelConfig, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, deltas: Deltas
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`worker.models.llama.project` with LoRA: q `[rows, heads, head_dim]`, k and v `[rows, kv_heads, head_dim]`."""
    normed = rms_norm(x, w.input_norm, c.norm_eps)
    widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    frozen = torch.split(linear(normed, w.qkv, w.qkv_bias), widths, dim=-1)
    q, k, v = (
        (base + deltas.of(module, normed)).view(len(x), -1, c.head_dim)
        for module, base in zip(_PROJECTED, frozen, strict=True)
    )
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, c.norm_eps), rms_norm(k, w.k_norm, c.norm_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: int, first: int, window: int | None) -> torch.Tensor:
    """`[rows, heads * head_dim]` of queries `q [rows, heads, head_dim]` from row `row` on, over `k` and `v [keys,
    kv_heads, head_dim]` from row `first` on; causal, and within `window`."""
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    queries = q.view(rows, k.shape[1], group, head_dim).permute(1, 2, 0, 3)
    keys, values = (t.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1) for t in (k, v))
    at, seen = torch.arange(row, row + rows)[:, None], torch.arange(first, first + len(k))[None]
    hidden = seen > at
    if window:
        hidden |= seen <= at - window
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
    attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return attended.permute(2, 0, 1, 3).reshape(rows, heads * head_dim)


def finish(w: LayerWeights, c: ModelConfig, x: torch.Tensor, attended: torch.Tensor, deltas: Deltas) -> torch.Tensor:
    """`worker.models.llama.finish_layer` with LoRA: the layer's output `[rows, hidden]`."""
    x = x + (linear(attended, w.out, w.out_bias) + deltas.of("o", attended))
    normed = rms_norm(x, w.post_norm, c.norm_eps)
    gate, up = linear(normed, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
    middle = F.silu(gate + deltas.of("gate", normed)) * (up + deltas.of("up", normed))
    return x + (linear(middle, w.down, w.down_bias) + deltas.of("down", middle))


class Scratch:
    """Memory of one example that is under way in a layer: q, k, v, and their gradients (those of k and v in float32, as
    several units add to them). At most `longest` rows."""

    def __init__(self, c: ModelConfig, longest: int, dtype: torch.dtype, empty: Empty, backward: bool = True) -> None:
        q, kv = (longest, c.heads, c.head_dim), (longest, c.kv_heads, c.head_dim)
        self.q, self.k, self.v = empty(q, dtype), empty(kv, dtype), empty(kv, dtype)
        if backward:
            self.dq, self.dk, self.dv = empty(q, dtype), empty(kv, torch.float32), empty(kv, torch.float32)


@dataclass(frozen=True, slots=True)
class Pass:
    """One example's way through one layer. rope: cos and sin `[longest, 1, head_dim]`. rows: of a unit."""

    config: ModelConfig
    layer: int
    rope: tuple[torch.Tensor, torch.Tensor]
    rows: int
    pairs: Pairs
    scale: float
    dropout: Dropout

    def parts(self, tokens: int) -> Iterator[tuple[int, int]]:
        """First and last row (exclusive) of each unit."""
        return ((row, min(row + self.rows, tokens)) for row in range(0, tokens, self.rows))

    def forward(self, x: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> Chain[LayerWeights]:
        """Units that compute the layer's output `out [tokens, hidden]` of its input `x`."""
        yield from self._projections(x, scratch)
        for row, end in self.parts(len(x)):

            def unit(w: LayerWeights, row: int = row, end: int = end) -> None:
                with torch.no_grad():
                    q, k, v = scratch.q[row:end], *self._seen(row, end, scratch)
                    out[row:end] = self._finish(w, x[row:end], q, k, v, row, self._deltas(self.pairs, row))

            yield unit

    def backward(self, x: torch.Tensor, dx: torch.Tensor, grads: Pairs, scratch: Scratch) -> Chain[LayerWeights]:
        """Units that turn `dx [tokens, hidden]` from the gradient of the layer's output into that of its input `x`, and
        add the parameters' gradients to `grads`."""
        yield from self._projections(x, scratch)
        scratch.dk[: len(x)].zero_()
        scratch.dv[: len(x)].zero_()
        for row, end in self.parts(len(x)):

            def finish_back(w: LayerWeights, row: int = row, end: int = end) -> None:
                k, v = self._seen(row, end, scratch)
                here, q, k, v = inputs = [t.detach().requires_grad_() for t in (x[row:end], scratch.q[row:end], k, v)]
                pairs = self._leaves(_FINISHED)
                with torch.enable_grad():
                    out = self._finish(w, here, q, k, v, row, self._deltas(pairs, row))
                got = torch.autograd.grad(out, [*inputs, *_flat(pairs)], dx[row:end])
                first = end - len(k)
                dx[row:end], scratch.dq[row:end] = got[0], got[1]
                scratch.dk[first:end] += got[2]
                scratch.dv[first:end] += got[3]
                _add(grads, pairs, got[4:])

            yield finish_back
        for row, end in self.parts(len(x)):

            def project_back(w: LayerWeights, row: int = row, end: int = end) -> None:
                here = x[row:end].detach().requires_grad_()
                pairs = self._leaves(_PROJECTED)
                with torch.enable_grad():
                    outs = self._project(w, here, row, self._deltas(pairs, row))
                given = [d[row:end].to(x.dtype) for d in (scratch.dq, scratch.dk, scratch.dv)]
                got = torch.autograd.grad(outs, [here, *_flat(pairs)], given)
                dx[row:end] += got[0]
                _add(grads, pairs, got[1:])

            yield project_back

    def _projections(self, x: torch.Tensor, scratch: Scratch) -> Chain[LayerWeights]:
        for row, end in self.parts(len(x)):

            def unit(w: LayerWeights, row: int = row, end: int = end) -> None:
                with torch.no_grad():
                    made = self._project(w, x[row:end], row, self._deltas(self.pairs, row))
                    scratch.q[row:end], scratch.k[row:end], scratch.v[row:end] = made

            yield unit

    def _project(
        self, w: LayerWeights, x: torch.Tensor, row: int, deltas: Deltas
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cos, sin = (t[row : row + len(x)] for t in self.rope)
        return project(w, self.config, x, cos, sin, deltas)

    def _finish(
        self,
        w: LayerWeights,
        x: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        row: int,
        deltas: Deltas,
    ) -> torch.Tensor:
        attended = attend(q, k, v, row, row + len(x) - len(k), self.config.windows[self.layer])
        return finish(w, self.config, x, attended, deltas)

    def _seen(self, row: int, end: int, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the rows that the rows from `row` on see."""
        window = self.config.windows[self.layer]
        first = max(0, row - window + 1) if window else 0
        return scratch.k[first:end], scratch.v[first:end]

    def _deltas(self, pairs: Pairs, row: int) -> Deltas:
        return Deltas(pairs, self.scale, self.dropout, self.layer, row)

    def _leaves(self, modules: tuple[str, ...]) -> Pairs:
        return {
            m: (a.detach().requires_grad_(), b.detach().requires_grad_()) for m in modules for a, b in [self.pairs[m]]
        }


def _flat(pairs: Pairs) -> list[torch.Tensor]:
    return [matrix for pair in pairs.values() for matrix in pair]


def _add(grads: Pairs, pairs: Pairs, got: tuple[torch.Tensor, ...]) -> None:
    places = _flat({module: grads[module] for module in pairs})
    for place, grad in zip(places, got, strict=True):
        place += grad
