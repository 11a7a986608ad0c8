"""Devices that models share, in virtual time: every request is answered, nothing is mapped that is not there, and all
cores keep their invariants after every event."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.models import ModelState
from kvstore.core.store import Store
from loadtest.simulate.events import Events
from loadtest.simulate.many import ManyOutcome, ManyRun, ModelRequest, SharedFleet, simulate_many
from loadtest.simulate.presets import H100, LLAMA_31_8B, LLAMA_32_1B, LLAMA_32_3B, QWEN_25_7B
from loadtest.simulate.shared_device import SharedDevice, Sharing
from loadtest.simulate.shared_kind import MAP_S, UNMAP_S, shared_kind
from scheduler.core.control import Control
from worker.core.balloon import Balloon
from worker.core.engine_core import EngineCore
from worker.core.residency import Residency

ROOT = Path(__file__).parents[3]
#: Four models, of which two or three fit.
FULL = shared_kind(H100, [LLAMA_31_8B, QWEN_25_7B, LLAMA_32_3B, LLAMA_32_1B])
TIGHT = replace(FULL, granules=12_000)
SHARINGS: tuple[Sharing, ...] = ("static", "elastic", "swap", "serverless", "prism")


def trace(seed: int, seconds: float, rate: float, models: list[str], most: int = 600) -> list[ModelRequest]:
    dice, time_s, found = random.Random(seed), 0.0, list[ModelRequest]()
    while (time_s := time_s + dice.expovariate(rate)) < seconds:
        found.append(ModelRequest(time_s, dice.choice(models), dice.randint(1, most), dice.randint(1, most // 3)))
    return found


def names() -> list[str]:
    return [model.name for model in FULL.models]


def times(found: ManyOutcome) -> list[tuple[float, float, str]]:
    return [(a.first_s, a.end_s, a.device) for a in found.answers]


def check(fleet: SharedFleet) -> None:
    for device in fleet.devices.values():
        device.balloon.validate()
        if device.residency is not None:
            device.residency.validate()
            here = {n for n, each in device.residency.models.items() if each.state is not ModelState.COLD}
            weights = sum(model.granules for model in device.kind.models if model.name in here)
            assert device.mapped >= weights or device.residency.out, "weights are here and not mapped"
        assert 0 <= device.mapped <= device.kind.granules


@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_request_is_answered_and_every_core_keeps_its_invariants(sharing: Sharing) -> None:
    kind = FULL if sharing in ("static", "elastic") else TIGHT
    asked = trace(3, 20.0, 3.0, names())
    found = simulate_many(ManyRun(kind, 1, sharing), asked, check)
    assert [a.asked for a in found.answers] == asked
    assert all(a.asked.time_s < a.first_s <= a.end_s for a in found.answers)
    device = found.fleet.devices["device-0"]
    for name, hosted in device.models.items():
        assert not hosted.outstanding and not hosted.core.live
        steps_for = sum(a.asked.model == name for a in found.answers)
        assert (hosted.engine.steps > 0) == (steps_for > 0)


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_whatever_comes_every_request_is_answered(seed: int) -> None:
    dice = random.Random(seed)
    sharing: Sharing = dice.choice(["swap", "serverless", "prism"])
    kind = replace(FULL, granules=dice.choice([9_000, 12_000, 17_000]))
    events = 0

    def look(fleet: SharedFleet) -> None:
        nonlocal events
        events += 1
        check(fleet)
        if events % 50 == 0:
            fleet.validate()

    rate, most = dice.choice([(0.5, 3_000), (4.0, 900), (10.0, 600)])
    asked = trace(seed, 30.0 / rate, rate, names()[: dice.choice([2, 4])], most)
    found = simulate_many(ManyRun(kind, dice.choice([1, 2]), sharing), asked, look)
    assert all(a.asked.time_s < a.first_s <= a.end_s for a in found.answers)


def test_a_shared_fleet_is_made_of_productions_cores() -> None:
    fleet = SharedFleet.of(Events(), FULL, 2, "prism")
    assert type(fleet.control) is Control
    for device in fleet.devices.values():
        assert type(device) is SharedDevice and type(device.balloon) is Balloon and type(device.residency) is Residency
        assert type(device.store.core) is Store
        assert all(type(hosted.core) is EngineCore for hosted in device.models.values())


@pytest.mark.parametrize("sharing", SHARINGS)
def test_equal_traces_give_equal_runs(sharing: Sharing) -> None:
    asked = trace(5, 10.0, 4.0, names())
    first, second = (simulate_many(ManyRun(FULL, 2, sharing), asked) for _ in range(2))
    assert times(first) == times(second) and first.totals == second.totals


@pytest.mark.parametrize("sharing", ["elastic", "prism"])
def test_rounds_that_are_one_event_take_as_long_as_single_steps(
    sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = trace(7, 12.0, 5.0, names())
    together = simulate_many(ManyRun(FULL, 1, sharing), asked)
    monkeypatch.setattr(SharedDevice, "_go_on_together", lambda device: False)
    alone = simulate_many(ManyRun(FULL, 1, sharing), asked)
    assert together.fleet.events.done < alone.fleet.events.done
    for a, b in zip(together.answers, alone.answers, strict=True):
        assert (a.first_s, a.end_s) == pytest.approx((b.first_s, b.end_s), abs=0.02)


def test_two_models_that_do_not_fit_together_are_both_activated_when_they_alternate() -> None:
    kind = replace(FULL.of(["Llama-3.1-8B", "Qwen2.5-7B"]), granules=10_000)
    asked = [ModelRequest(5.0 * n, kind.models[n % 2].name, 100, 20) for n in range(6)]
    found = simulate_many(ManyRun(kind, 1, "prism"), asked)
    residency = found.fleet.devices["device-0"].residency
    assert residency is not None
    assert [each.activations for each in residency.models.values()] == [3, 3]
    first = found.answers[0]
    assert 0.45 < first.ttft_s < 0.75, "an activation of 0.5 s, and weights of 0.1 s that leave before it"


def test_models_with_fixed_parts_are_never_activated_or_evicted() -> None:
    found = simulate_many(ManyRun(FULL, 1, "static"), trace(2, 20.0, 4.0, names()))
    assert found.totals["activations"] == found.totals["evictions"] == 0
    device = found.fleet.devices["device-0"]
    total = sum(model.granules for model in FULL.models)
    limits = [h.core.state.cache.pool.limit * device._by_name[n].slab_granules for n, h in device.models.items()]
    assert device.residency is None and total + sum(limits) <= FULL.granules


def test_a_model_s_flood_gets_the_memory_of_others_only_where_memory_moves() -> None:
    kind = replace(FULL.of(["Llama-3.1-8B", "Qwen2.5-7B"]), granules=17_000)
    asked = [ModelRequest(0.01 * n, "Llama-3.1-8B", 700, 300) for n in range(60)]
    waits = {
        sharing: sum(a.ttft_s for a in simulate_many(ManyRun(kind, 1, sharing), asked).answers)
        for sharing in ("static", "elastic")
    }
    assert waits["elastic"] < 0.7 * waits["static"]


def test_kv_gets_the_memory_of_models_that_have_long_been_idle_when_a_trace_begins() -> None:
    kind = replace(FULL.of(["Llama-3.1-8B", "Qwen2.5-7B"]), granules=17_000)
    asked = [ModelRequest(0.01 * n, "Llama-3.1-8B", 700, 300) for n in range(60)]
    soon, late = (simulate_many(ManyRun(kind, 1, "prism", lead_s=lead_s), asked) for lead_s in (0.0, 60.0))
    assert soon.totals["evictions"] == 0 and late.totals["evictions"] == 1
    assert sum(a.ttft_s for a in late.answers) < 0.7 * sum(a.ttft_s for a in soon.answers)


def test_with_fixed_devices_a_request_goes_to_its_model_s_device() -> None:
    where = [names()[:2], names()[2:]]
    found = simulate_many(ManyRun(FULL, 2, "elastic", where), trace(4, 10.0, 4.0, names()))
    assert all(a.asked.model in where[int(a.device.removeprefix("device-"))] for a in found.answers)


def test_models_that_leave_no_room_for_kv_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no room for KV of Llama-3\.1-8B"):
        SharedFleet.of(Events(), replace(FULL, granules=19_000), 1, "static")
    with pytest.raises(ValueError, match="does not fit device-0"):
        simulate_many(ManyRun(replace(FULL, granules=19_600), 1, "static"), [ModelRequest(0.0, names()[0], 90_000, 1)])


def test_mapping_and_copying_are_as_measured_on_a_device() -> None:
    measured = json.loads((ROOT / "bench" / "gpu" / "result.json").read_text())["figures"]
    assert pytest.approx(measured["granules"]["map_again_us"] * 1e-6, rel=0.1) == MAP_S
    model = next(m for m in FULL.models if m.name == "Llama-3.1-8B")
    assert pytest.approx(measured["granules"]["unmap_us"] * 1e-6, rel=0.1) == UNMAP_S
    seconds = FULL.activation_s(model)
    assert seconds == pytest.approx(measured["activation"]["weights_warm_s"], rel=0.15)
    assert seconds == pytest.approx(measured["activation"]["weights_new_s"], rel=0.15)
