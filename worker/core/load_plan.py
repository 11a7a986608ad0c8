"""When a sequence whose cache is still coming may start (SYMPHONY, section 3.4, layer-wise reads)."""

from __future__ import annotations


def may_start(ready_layers: int, layers: int, layer_load_s: float, layer_compute_s: float) -> bool:
    """True when, starting now, no layer would have to be waited for by the estimates.

    ready_layers: leading layers that are in HBM. layer_load_s: time between two layers' arrivals. layer_compute_s: time
    one layer of the coming step takes. Layer l arrives after (l - ready + 1) loads and is wanted after l computations.
    The condition is linear in l, so its two ends decide.
    """
    if ready_layers >= layers:
        return True
    if ready_layers < 1:
        return False
    first, last = ready_layers, layers - 1
    return all((layer - ready_layers + 1) * layer_load_s <= layer * layer_compute_s for layer in (first, last))
