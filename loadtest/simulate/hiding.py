"""How much of a load runs under the compute of the layers before, and so is not waited for (SYMPHONY, section 3.4). Pure."""

from __future__ import annotations

from loadtest.simulate.channels import Fetch
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.mechanisms import Mechanisms


def below_hbm_s(kind: NodeKind, has: Mechanisms, tokens: int, cached: int) -> float:
    """Of a load into DRAM, when so many tokens are computed after `cached` ones that come: all but the first layer's share."""
    if not has.layerwise:
        return 0.0
    return kind.costs.prefill_s(tokens, cached) * (kind.shape.layers - 1) / kind.shape.layers


def into_hbm_s(kind: NodeKind, has: Mechanisms, tokens: int, cached: int, load_s: float, share: float) -> float:
    """Of a load into HBM of `load_s` seconds, when the lowest `share` of the layers is there.

    Layer l comes after (l - present + 1) loads and is wanted after l computations: `worker.core.load_plan.may_start`.
    """
    if not has.layerwise:
        return 0.0
    layers = kind.shape.layers
    present = min(int(share * layers), layers - 1)
    compute_s = kind.costs.prefill_s(tokens, cached) / layers
    each_s = load_s / (layers - present)
    return load_s - max(each_s - present * compute_s, load_s - (layers - 1) * compute_s, 0.0)


def is_worth_waiting(kind: NodeKind, fetch: Fetch, near: int, wanted: int) -> bool:
    """Whether waiting for what is under way is sooner done than computing tokens `near` to `wanted`."""
    left_s = max((job.left_s for _, job in fetch.jobs if not job.finished), default=0.0)
    return left_s <= kind.costs.prefill_s(wanted - near, near)
