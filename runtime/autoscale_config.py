"""The `autoscale` section of the configuration: how many nodes the scheduler recommends, and `upbeat autoscale
--simulate` replays. Upbeat itself starts and stops no nodes (docs/autoscaling.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from runtime.gateway_config import STRICT

#: More nodes are no fleet.
MOST_NODES = 4096
_Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]


class AutoscaleSection(BaseModel):
    """The policy of `scheduler.core.scale_policy`."""

    model_config = STRICT
    min_nodes: int = Field(default=1, ge=1, le=MOST_NODES)
    #: 0: as many as `nodes.count`.
    max_nodes: int = Field(default=0, ge=0, le=MOST_NODES)
    #: Share of its devices' compute, or of their KV memory, that the fleet should use.
    target_utilisation: float = Field(default=0.6, gt=0, le=1)
    #: Within this distance from the target, as part of it, the fleet stays as it is.
    tolerance: float = Field(default=0.1, ge=0, lt=1)
    #: Outstanding work should be done within this time, besides what arrives.
    drain_s: float = Field(default=30.0, gt=0, le=3600)
    #: A step up needs to be wanted for this long; a step down too. As HPA's stabilizationWindowSeconds.
    up_window_s: _Seconds = 0.0
    down_window_s: _Seconds = 300.0
    #: Share of the nodes that one step down takes (at least one node), and the time between two steps.
    down_share: float = Field(default=0.25, gt=0, le=1)
    down_step_s: _Seconds = 60.0
    #: Share of the DRAM that may be needed, by sessions used in the last ten minutes, after a step down.
    kv_most: float = Field(default=0.8, gt=0, le=1)
    #: Share of answers that must keep to their model's ttft_s and tpot_s (of the last five minutes); below it one node
    #: more is wanted, every `slo_step_s`, and none fewer. 0: attainment does not count.
    slo: float = Field(default=0.95, ge=0, le=1)
    slo_step_s: _Seconds = 120.0

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleSection:
        if self.max_nodes and self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is above max_nodes {self.max_nodes}; lower it or raise that")
        return self
