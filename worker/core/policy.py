"""What an engine was told to do, as plain values; see the settings of the same names in the configuration (`kv`, `worker`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """cache: KV is kept across requests. cooperative: hints fill HBM before their requests come. layerwise: a step may begin before all
    of its layers are here, and saves before all are computed. layer_priority: hints bring low layers first. load_plan: what is sooner
    computed than loaded is computed. plan_layers: it reckons with so many, where a piece stands for several layers (a simulator's); 0:
    the shape's."""

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
