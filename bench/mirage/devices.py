"""Devices and models of the paper's testbed (section 7.1, table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loadtest.simulate.costs import Device, ModelShape, Slowed
from loadtest.simulate.presets import GH200, LLAMA_2_13B, LLAMA_3_8B, OPT_13B, OPT_30B, OPT_67B
from loadtest.simulate.shared_kind import GRANULE_BYTES, SharedKind, shared_kind

#: Table 1: part of the memory of each model.
C1 = {OPT_13B: 0.35, LLAMA_2_13B: 0.35, LLAMA_3_8B: 0.20}
C2 = {OPT_30B: 0.65, OPT_67B: 0.15}
#: HTTP, tokenising and streaming (ours).
REQUEST_S = 0.03
#: vLLM 0.7.3's own time of a step, so that r = T_T / T_c of OPT-13b is about 3, where one slot no longer does for 9 of
#: 40 layers (section 5.4).
STEP_S = 0.008
#: Rates of the links: half of NVLink-C2C's 900 GB/s, and what an H100 reaches over PCIe 5.0.
LINKS = {"GH200": 450e9, "H100": 50e9}
CHUNK_TOKENS = 32


def device(models: Mapping[ModelShape, float], of: Device = GH200, ratio: float = 1.0) -> SharedKind:
    """A device with these models and the parts of its memory that they have together. ratio: of the link's rate to the
    device's own."""
    made = shared_kind(of, list(models), request_s=REQUEST_S, chunk_tokens=CHUNK_TOKENS)
    slowed = []
    for model, part in zip(made.models, models.values(), strict=True):
        costs = Slowed(model.kind.costs, STEP_S, 0.0, 1.0)
        fixed = int(part * of.memory_bytes / GRANULE_BYTES) - model.granules
        slowed.append(replace(model, kind=replace(model.kind, costs=costs), fixed_granules=fixed))
    granules = int(sum(models.values()) * of.memory_bytes / GRANULE_BYTES)
    rate = LINKS[of.name.split("-")[0]] * ratio
    return replace(made, models=tuple(slowed), granules=granules, copy_bytes_s=rate)


def instance(model: ModelShape, part: float, whole: float) -> SharedKind:
    """An instance of a device that is divided strictly (MIG): `part` of its memory, and part / whole of its compute,
    bandwidth and link."""
    share = part / whole
    less = replace(GH200, flops=GH200.flops * share, memory_bytes_per_s=GH200.memory_bytes_per_s * share)
    return device({model: part}, less, share)
