"""How many frozen layers training keeps in device memory, which leaves first and which comes next (HARLI, sections 4.3
and 4.4).

Training uses layers in a circle: 0 to n - 1 forward, then n - 1 to 0 backward. Inference always wins: the window
shrinks at once, and the layer that is used latest leaves first. A frozen layer is never written, so leaving copies
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

#: Least layers with which training goes on: one computes, the next one comes.
LEAST_LAYERS = 2
#: The decode step's target in the paper's reserve, in seconds.
_TARGET_S = 0.05


def window_layers(free: int, reserve: int, layer_granules: int, layers: int) -> int:
    """Layers that may be in memory: clamp((free - reserve) / layer, 2, n); 0 when not even two fit. free: granules that
    nobody has, and those of frozen layers; reserve: granules that inference may need before a layer has left."""
    fit = (free - reserve) // layer_granules
    least = min(LEAST_LAYERS, layers)
    return min(fit, layers) if fit >= least else 0


def reserve_bytes(leave_s: float, max_batch: int, token_bytes: int) -> int:
    """Bytes kept free for inference: what its steps may need while a layer leaves. leave_s: time until a layer's memory
    is free. token_bytes: KV of a token, in all layers."""
    return math.ceil(leave_s / _TARGET_S * max_batch * token_bytes)


def order_of_use(at: int, forward: bool, layers: int) -> list[int]:
    """All layers, by their next use: `at` first, which is computed now, in this direction. Raises ValueError if it is
    none of them."""
    if not 0 <= at < layers:
        raise ValueError(f"layer {at} is none of {layers}")
    start = at if forward else 2 * layers - 1 - at
    circle = (place % (2 * layers) for place in range(start, start + 2 * layers))
    return list(dict.fromkeys(place if place < layers else 2 * layers - 1 - place for place in circle))


def leaving(here: Iterable[int], at: int, forward: bool, layers: int) -> list[int]:
    """Those that are here, the first to leave first: the one used latest. Not the layer that is computed now."""
    resident = set(here)
    return [layer for layer in reversed(order_of_use(at, forward, layers)) if layer in resident and layer != at]


def coming(here: Iterable[int], at: int, forward: bool, layers: int, window: int) -> list[int]:
    """Layers that should be here and are not, by their next use: of the next `window`."""
    resident = set(here)
    return [layer for layer in order_of_use(at, forward, layers)[:window] if layer not in resident]


class Window:
    """The frozen layers of one model that are in memory, or on their way: at most `size`.

    Invariants (`validate`): at most `size` layers are here or coming, at most one of them coming. The layer that is
    computed leaves last.
    """

    def __init__(self, layers: int, layer_granules: int) -> None:
        self.layers, self.layer_granules = layers, layer_granules
        self.size = 0
        self.here: set[int] = set()
        #: The layer that is copied now.
        self.coming: int | None = None
        #: The layer that is computed, or will be next, and the direction.
        self.at, self.forward = 0, True

    @property
    def granules(self) -> int:
        """Held now."""
        return self.layer_granules * (len(self.here) + (self.coming is not None))

    @property
    def ready(self) -> bool:
        """Whether the layer to compute is here."""
        return self.at in self.here

    def resize(self, free: int, reserve: int) -> list[int]:
        """Inference has changed what it holds. free: granules that nobody has, and this window's. Returns what `fit`
        returns."""
        return self.fit(window_layers(free, reserve, self.layer_granules, self.layers))

    def fit(self, size: int) -> list[int]:
        """The window has room for so many layers now. Returns those that must leave at once, the one used latest first;
        the copy under way may be among them."""
        self.size = min(size, self.layers)
        held = self.here | ({self.coming} if self.coming is not None else set())
        order = [*leaving(held, self.at, self.forward, self.layers), self.at]
        left = [layer for layer in order if layer in held][: max(len(held) - self.size, 0)]
        self.here.difference_update(left)
        if self.coming in left:
            self.coming = None
        return left

    def compute(self, layer: int, forward: bool) -> None:
        """This layer is computed next."""
        self.at, self.forward = layer, forward

    def copy_next(self) -> tuple[list[int], int | None]:
        """Layers that leave for the next copy, and the layer to copy now; None: none is due, or one is under way."""
        if self.coming is not None:
            return [], None
        wanted = coming(self.here, self.at, self.forward, self.layers, self.size)
        if not wanted:
            return [], None
        left = leaving(self.here, self.at, self.forward, self.layers)[: max(len(self.here) + 1 - self.size, 0)]
        if len(self.here) - len(left) + 1 > self.size:
            return [], None
        self.here.difference_update(left)
        self.coming = wanted[0]
        return left, self.coming

    def came(self) -> None:
        """The copy under way is complete."""
        if self.coming is not None:
            self.here.add(self.coming)
            self.coming = None

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert len(self.here) + (self.coming is not None) <= self.size <= self.layers
        assert self.coming not in self.here
        assert all(0 <= layer < self.layers for layer in self.here)
