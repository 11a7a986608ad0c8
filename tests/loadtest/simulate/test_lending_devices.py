"""Simulated devices whose models lend layers to KV: production's controller decides, and what it says takes time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from loadtest.simulate.circulating import CirculatingCosts
from loadtest.simulate.many import ManyOutcome, ManyRun, ModelRequest, SharedFleet, simulate_many
from loadtest.simulate.presets import GH200, LLAMA_3_8B, OPT_13B
from loadtest.simulate.shared_device import SharedDevice
from loadtest.simulate.shared_kind import SharedKind, shared_kind
from loadtest.simulate.token_gaps import TokenGaps, percentiles
from worker.core.lending import Lending
from worker.core.remap import Remap

PAIR = shared_kind(GH200, [OPT_13B, LLAMA_3_8B], chunk_tokens=64)
NAMES = [model.name for model in PAIR.models]
#: Little more than the weights.
TIGHT = replace(PAIR, granules=sum(model.granules for model in PAIR.models) + 1_500)
ALONE = replace(PAIR.of(["OPT-13B"]), granules=PAIR.models[0].granules + 1_500)


def trace(seed: int, seconds: float, rate: float, models: list[str]) -> list[ModelRequest]:
    dice, time_s, found = random.Random(seed), 0.0, list[ModelRequest]()
    while (time_s := time_s + dice.expovariate(rate)) < seconds:
        found.append(ModelRequest(time_s, dice.choice(models), dice.randint(1, 400), dice.randint(1, 300)))
    return found


def simulate(kind: SharedKind, cap: float, asked: list[ModelRequest], **rest: object) -> ManyOutcome:
    return simulate_many(ManyRun(kind, 1, "prism", lead_s=0.0, remap_cap=cap, **rest), asked)  # type: ignore[arg-type]


def device_of(found: ManyOutcome | SharedFleet) -> SharedDevice:
    return (found.fleet if isinstance(found, ManyOutcome) else found).devices["device-0"]


def ttft_s(found: ManyOutcome) -> float:
    return sum(a.ttft_s for a in found.answers) / len(found.answers)


@pytest.mark.parametrize("kind", [TIGHT, ALONE], ids=["two models", "one model"])
def test_every_request_is_answered_and_memory_is_counted_after_every_event(kind: SharedKind) -> None:
    most = 0

    def look(fleet: SharedFleet) -> None:
        nonlocal most
        device = device_of(fleet)
        assert device.weights is not None and device.residency is not None
        device.residency.validate()
        weights = 0
        for model in kind.models:
            costs, lending = device.weights.lenders[model.name], device.residency.models[model.name].lending
            lent = len(costs.chosen) - costs.slots
            assert lending is not None and (device.residency.out or lent == lending.lent)
            weights += model.granules - lent * model.layer_granules
            most = max(most, lent)
        assert weights <= device.mapped <= kind.granules

    asked = trace(1, 20.0, 8.0, [model.name for model in kind.models])
    found = simulate_many(ManyRun(kind, 1, "prism", lead_s=0.0, remap_cap=0.5, drain_s=60.0), asked, look)
    assert all(a.asked.time_s < a.first_s <= a.end_s for a in found.answers)
    assert most > 0 and found.totals["lendings"] >= most


def test_where_memory_is_short_requests_wait_less_when_layers_lend_theirs() -> None:
    asked = trace(2, 20.0, 8.0, ["OPT-13B"])
    never, lends = (simulate(ALONE, cap, asked) for cap in (0.0, 0.5))
    assert ttft_s(lends) < 0.7 * ttft_s(never)


def test_where_memory_suffices_nothing_is_lent_and_times_are_the_same() -> None:
    asked = trace(3, 20.0, 1.0, NAMES)
    never, lends = (simulate(PAIR, cap, asked) for cap in (0.0, 0.5))
    assert lends.totals["lendings"] == 0
    assert [(a.first_s, a.end_s) for a in never.answers] == [(a.first_s, a.end_s) for a in lends.answers]


def test_a_link_that_is_slow_beside_computing_lends_nothing_of_a_model_alone() -> None:
    found = simulate(replace(ALONE, copy_bytes_s=10e9), 0.5, trace(2, 20.0, 8.0, ["OPT-13B"]))
    assert found.totals["lendings"] == 0


def test_all_layers_have_come_back_a_while_after_a_peak() -> None:
    asked = [*trace(2, 10.0, 8.0, ["OPT-13B"]), ModelRequest(60.0, "OPT-13B", 10, 1000)]
    found = simulate(ALONE, 0.5, asked)
    residency = device_of(found).residency
    assert residency is not None and found.totals["lendings"] == found.totals["returns"] > 0


def test_production_s_controller_decides_with_what_a_worker_measures() -> None:
    seen = list[SharedFleet]()
    simulate(TIGHT, 0.5, [ModelRequest(0.0, NAMES[0], 10, 2)], prepare=seen.append)
    device = device_of(seen[0])
    assert device.residency is not None and type(device.residency.remap) is Remap
    for model in TIGHT.models:
        lending = device.residency.models[model.name].lending
        assert type(lending) is Lending and type(device.models[model.name].kind.costs) is CirculatingCosts
        assert lending.most == model.layers // 2 and lending.granules == model.granules // model.layers
        assert lending.transfer_s == pytest.approx(model.weight_bytes / model.layers / 450e9)
        assert lending.prefill_s == pytest.approx(model.kind.costs.prefill_s(512, 0))


def test_a_step_waits_for_layers_that_come_back() -> None:
    """A change of what is lent takes the link and the device time: the step after it is longer."""
    asked = trace(2, 20.0, 8.0, ["OPT-13B"])
    found = simulate(ALONE, 0.5, asked)
    quick = simulate(replace(ALONE, map_s=0.0, unmap_s=0.0), 0.5, asked)
    slowest, without_maps = (percentiles([device_of(each).models["OPT-13B"].gaps], [100])[0] for each in (found, quick))
    assert slowest > 1.2 * without_maps


def test_gaps_between_tokens_are_those_of_answers() -> None:
    asked = trace(4, 20.0, 2.0, NAMES)
    found = simulate(PAIR, 0.0, asked)
    for name in NAMES:
        own = [a for a in found.answers if a.asked.model == name]
        gaps = device_of(found).models[name].gaps
        assert sum(gaps.counts) == sum(a.asked.output_tokens - 1 for a in own)
        spent_s = sum(s * n for s, n in zip(gaps.seconds, gaps.counts, strict=True))
        request_s = device_of(found).models[name].kind.request_s
        assert spent_s == pytest.approx(sum(a.end_s - a.first_s - request_s for a in own), rel=1e-6)


def test_percentiles_count_every_gap() -> None:
    gaps = TokenGaps()
    gaps.add(0.3, 1)
    gaps.add(0.1, 98)
    gaps.add(0.2, 1)
    assert percentiles([gaps], [50, 98, 99, 100]) == [0.1, 0.1, 0.2, 0.3]
    assert percentiles([TokenGaps()], [50]) == [0.0]
