"""An engine's settings as plain values, named as in the configuration (`kv`, `worker`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """cache: KV is kept across requests. cooperative: hints fill HBM before their requests come. layerwise: steps begin
    before all layers are loaded, and saves before all are computed. layer_priority: hints load low layers first.
    load_plan: recompute what is faster to compute than to load. plan_layers: number of layers for the load plan, where
    a simulator's piece stands for several; 0: the shape's."""

    cache: bool = True
    cooperative: bool = True
    layerwise: bool = True
    layer_priority: bool = True
    load_plan: bool = True
    plan_layers: int = 0
    max_batch: int = 64
    max_waiting: int = 1024
    step_tokens: int = 512
    mixed_step_s: float = 0.0
    shared_step_s: float = 0.005
