"""The experts of a layer on a CUDA device: memory of their activations, and the launches of one layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.model_experts import Experts
from worker.kernels.cuda.experts import grouped_product, mix, route, sort_by_expert
from worker.kernels.cuda.rows import gate_mul
from worker.models.quantised import plain
from worker.models.weights import LayerWeights

#: Rows of a product's tile, with few and with many rows for an expert.
_FEW, _MANY = 16, 64

#: product(x, weight, bias, out), see `worker.kernels.cuda.products.product`.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]


class ExpertsMemory:
    """Activations of the experts for `tokens` rows. Memory keeps its addresses."""

    def __init__(self, experts: Experts, hidden: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._experts, e, pairs = experts, experts, tokens * experts.per_token

        def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=kind, device=device)

        self._logits, self._weights = empty(tokens, e.count), empty(tokens, e.per_token)
        self._chosen = empty(tokens, e.per_token, kind=torch.int32)
        self._pairs, self._bounds = empty(pairs, kind=torch.int32), empty(e.count, 2, kind=torch.int32)
        self._gate_up, self._mid, self._outputs = empty(pairs, 2 * e.size), empty(pairs, e.size), empty(pairs, hidden)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of its memory."""
        routing = self._logits, self._weights, self._chosen, self._pairs, self._bounds
        return (*routing, self._gate_up, self._mid, self._outputs)

    def mix(
        self,
        w: LayerWeights,
        router: torch.Tensor,
        x: torch.Tensor,
        out: torch.Tensor,
        places: torch.Tensor | None,
        product: Product,
        batch_invariant: bool,
    ) -> None:
        """`out [rows, hidden]`: the weighted sums of the outputs of the experts of `x [rows, hidden]`. places: see
        `route`."""
        e, n = self._experts, x.shape[0]
        pairs = n * e.per_token
        rows = _MANY if batch_invariant or pairs > _FEW * e.count else _FEW
        order = self._pairs[:pairs], self._bounds, rows
        product(x, router, None, self._logits[:n])
        route(self._logits[:n], places, e.norm, self._chosen[:n], self._weights[:n])
        sort_by_expert(self._chosen[:n], *order[:2])
        grouped_product(x, plain(w.gate_up), *order, self._gate_up[:pairs])
        gate_mul(self._gate_up[:pairs], self._mid[:pairs])
        grouped_product(self._mid[:pairs], plain(w.down), *order, self._outputs[:pairs])
        mix(self._outputs[:pairs], self._weights[:n], out)
