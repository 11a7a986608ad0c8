"""Gradients of micro-batches are added in their order, clipped together, and applied by AdamW, in units.

AdamW (torch's) has one parameter a layer, the layer's vector. Its state is float32.
"""

from __future__ import annotations

import math

import torch

from contracts.finetune import Settings
from worker.harvest.adapter import Adapter, Empty
from worker.harvest.gate import Stopped
from worker.harvest.lanes import Chain, Lanes

#: Largest norm of a step's gradient; a larger one is scaled down to it.
MAX_NORM = 1.0
#: Additions of a unit.
_UNIT_ADDITIONS = 1 << 20


class Optimizer:
    """AdamW's state, and the memory of gradients: a vector of a layer for each micro-batch, and the sums of all
    layers."""

    def __init__(self, adapter: Adapter, settings: Settings, micros: int, lanes: Lanes, empty: Empty) -> None:
        """micros: the most micro-batches of a step."""
        self._lanes = lanes
        self._each = empty((micros, adapter.shapes.count), torch.float32)
        self._sums = empty(adapter.flat.shape, torch.float32)
        self._state = empty((2, *adapter.flat.shape), torch.float32).zero_()
        self._squares: list[list[float]] = [[] for _ in adapter.flat]
        self._optimizers = []
        for layer, flat in enumerate(adapter.flat):
            parameter = flat.detach().requires_grad_()
            parameter.grad = self._sums[layer]
            optimizer = torch.optim.AdamW(
                [parameter],
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                foreach=False,
                fused=False,
            )
            mean, square = self._state[:, layer]
            optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": mean, "exp_avg_sq": square}
            self._optimizers.append(optimizer)

    def named(self) -> dict[str, torch.Tensor]:
        """AdamW's state but for its number of steps, which is the trainer's: `[layers, count]`; views."""
        return {"exp_avg": self._state[0], "exp_avg_sq": self._state[1]}

    def resume(self, steps: int) -> None:
        """The tensors of `named` were filled with the state after `steps` steps."""
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                state["step"].fill_(float(steps))

    def gradients(self, micros: int) -> torch.Tensor:
        """Where the micro-batches' gradients of one layer go before `add`: float32 `[micros, count]`."""
        return self._each[:micros]

    def add(self, layer: int, micros: int, targets: int) -> None:
        """Makes the layer's gradient of the micro-batches', divided by `targets`."""
        count = self._sums.shape[1]
        size = max(1, _UNIT_ADDITIONS // micros)
        firsts = range(0, count, size)
        self._squares[layer] = squares = [0.0] * len(firsts)

        def chain(number: int, part: slice) -> Chain[None]:
            def unit(_: None) -> None:
                total = self._sums[layer, part]
                total.copy_(self._each[0, part])
                for micro in range(1, micros):
                    total += self._each[micro, part]
                total /= targets
                squares[number] = total.double().square().sum().item()

            yield unit

        self._lanes.run([chain(n, slice(first, first + size)) for n, first in enumerate(firsts)], lambda: None)

    def norm(self) -> float:
        """Norm of the whole gradient."""
        return math.sqrt(math.fsum(square for layer in self._squares for square in layer))

    def update(self, rate: float, norm: float) -> None:
        """Clips the gradient of `norm` and applies it. An update that has begun is finished, even when the gate says
        Stopped; then the next unit raises it."""
        factor = min(1.0, MAX_NORM / (norm + 1e-6))
        missing = set(range(len(self._optimizers)))

        def update(layer: int) -> None:
            self._sums[layer] *= factor
            self._optimizers[layer].param_groups[0]["lr"] = rate
            self._optimizers[layer].step()
            missing.remove(layer)

        def chain(layer: int) -> Chain[None]:
            yield lambda _: update(layer)

        try:
            self._lanes.run([chain(layer) for layer in range(len(self._optimizers))], lambda: None)
        except Stopped:
            if len(missing) == len(self._optimizers):
                raise
            for layer in sorted(missing):
                update(layer)
