"""Whose turn a device is: by slices of time, by groups of requests (QLM), or on demand (ServerlessLLM)."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from contracts.models import ModelState
from contracts.residency import Why
from tests.worker.test_residency import anything, moves, prompt, states
from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_engine import VirtualEngine
from worker.core.resident import Expected
from worker.core.turns import SLICE_S

SLABS, WEIGHTS = 40, 8
ONE_AT_A_TIME = ["swap", "serverless"]


def device_of(sharing: str, models: int = 2, **more: object) -> VirtualDevice:
    return VirtualDevice(models, SLABS, weights=WEIGHTS, sharing=sharing, **more)


def ends(model: VirtualEngine) -> dict[str, float]:
    """When the answers were complete."""
    return {name: answer.times_s[-1] for name, answer in model.answers.items() if answer.end}


def first(model: VirtualEngine, name: str = "r0") -> float:
    return model.answers[name].times_s[0]


def began(device: VirtualDevice, model: VirtualEngine, name: str = "r0") -> None:
    active = device.residency.models[f"m{device.models.index(model)}"]
    device.go(until=lambda: bool(model.answers[name].tokens) and active.state is ModelState.ACTIVE)


def preemptions(model: VirtualEngine) -> int:
    return model.engine.core.scheduling.preemptions


@pytest.mark.parametrize("sharing", ONE_AT_A_TIME)
def test_a_model_stays_until_the_group_that_waited_for_it_is_served(sharing: str) -> None:
    device = device_of(sharing)
    a, b = device.models
    a.runner.token_s = 0.05
    group = [a.submit(prompt(n, 2), 5 if n else 80, session=f"a{n}") for n in range(3)]
    began(device, a)
    b.submit(prompt(5, 2), 5)
    device.go()
    assert max(ends(a)[name] for name in group) < first(b), "the longest of the group, longer than a slice"
    assert max(ends(a).values()) > SLICE_S and preemptions(a) == 0
    device.finish()


def test_by_groups_later_requests_are_preempted_and_are_the_model_s_next_group() -> None:
    device = device_of("swap")
    a, b = device.models
    a.submit(prompt(1, 2), 40, session="a")
    began(device, a)
    b.submit(prompt(2, 2), 5)
    device.go(until=lambda: bool(b.sequences))
    device.world.pass_(0.01)
    late = a.submit(prompt(3, 2), 60, session="late")
    device.go()
    assert first(a, late) < ends(a)["r0"] < first(b) < ends(a)[late], "it ran beside the group, and waited for b"
    assert preemptions(a) == 1
    assert (ModelState.DRAINING, Why.GROUP, "m1") in moves(device, "m0")
    device.finish()


def test_by_groups_a_request_that_came_before_the_other_model_s_is_served_before_it() -> None:
    device = device_of("swap")
    a, b = device.models
    a.submit(prompt(1, 2), 40, session="a")
    began(device, a)
    second = a.submit(prompt(3, 2), 60, session="second")
    device.world.pass_(0.01)
    b.submit(prompt(2, 2), 5)
    device.go()
    assert ends(a)[second] < first(b) and preemptions(a) == 0
    device.finish()


@pytest.mark.parametrize(("sharing", "earlier"), [("swap", "c"), ("serverless", "b")])
def test_groups_are_in_the_order_of_targets_and_on_demand_it_is_first_come_first_served(
    sharing: str, earlier: str
) -> None:
    device = device_of(sharing, models=3, targets=(60.0, 60.0, 1.0))
    a, b, c = device.models
    a.submit(prompt(1, 2), 40)
    began(device, a)
    b.submit(prompt(2, 2), 5)
    device.go(until=lambda: bool(b.sequences))
    device.world.pass_(0.1)
    c.submit(prompt(3, 2), 5)
    device.go()
    assert (first(c) < first(b)) == (earlier == "c")
    device.finish()


def test_on_demand_nothing_is_preempted_and_who_comes_after_another_model_s_request_waits_for_it() -> None:
    device = device_of("serverless")
    a, b = device.models
    a.submit(prompt(1, 2), 40, session="a")
    began(device, a)
    beside = a.submit(prompt(3, 2), 60, session="beside")
    began(device, a, beside)
    b.submit(prompt(2, 2), 5)
    device.go(until=lambda: bool(b.sequences))
    late = a.submit(prompt(4, 2), 5, session="late")
    device.go()
    assert ends(a)[beside] < first(b) < ends(b)["r0"] < first(a, late)
    assert preemptions(a) == preemptions(b) == 0
    device.finish()


def test_on_demand_an_idle_model_leaves_after_the_time_that_loading_takes() -> None:
    device = device_of("serverless", models=1)
    assert device.placing is not None
    device.placing.layer_s = 0.2
    a = device.models[0]
    a.submit(prompt(1, 2), 5)
    device.go()
    resident = device.residency.models["m0"]
    load_s = device.residency.load_s(resident)
    assert states(device) == [ModelState.ACTIVE] and load_s == pytest.approx(0.6, abs=0.1)
    device.go(until=lambda: states(device) == [ModelState.COLD], most_s=10.0)
    left = resident.moves[-1]
    assert left.why is Why.UNUSED and load_s <= left.seconds < load_s + 0.1
    a.submit(prompt(1, 2), 5)
    device.go()
    assert resident.activations == 2
    device.finish()


def test_on_demand_a_hint_wakes_no_model() -> None:
    device = device_of("serverless", models=1)
    now = device.world.now()
    device.residency.expect("m0", Expected(now + 1.0, now + 60.0))
    device.go(until=lambda: device.world.now() > now + 5.0)
    assert states(device) == [ModelState.COLD]


@pytest.mark.parametrize("sharing", ONE_AT_A_TIME)
def test_a_model_that_is_asked_all_the_time_lets_others_have_their_turns(sharing: str) -> None:
    device = device_of(sharing)
    a, b = device.models
    for n in range(60):
        device.world.at(0.05 * n, lambda n=n: a.submit(prompt(n, 2), 20, session=f"a{n}"))  # type: ignore[misc]
    device.world.at(1.0, lambda: b.submit(prompt(1, 2), 5))
    device.go(until=lambda: bool(b.answers) and bool(b.answers["r0"].end))
    assert first(b) < 4.0 and len(a.answers) < 60, "while requests to a still come"
    device.go(until=lambda: len(a.answers) == 60)
    device.finish()


@pytest.mark.parametrize("sharing", ONE_AT_A_TIME)
def test_a_stream_of_urgent_requests_does_not_keep_the_device_for_one_that_never_gets_its_turn(sharing: str) -> None:
    device = device_of(sharing, max_batch=1)
    a, b = device.models
    a.submit(prompt(1, 2), 5, priority=9, session="patient")
    for n in range(40):
        device.world.at(0.05 * n, lambda n=n: a.submit(prompt(n, 2), 20, session=f"a{n}"))  # type: ignore[misc]
    device.world.at(1.0, lambda: b.submit(prompt(1, 2), 5))
    device.go(until=lambda: bool(b.answers) and bool(b.answers["r0"].end))
    assert len(a.answers) < 41, "the patient one has no turn before all of them"
    device.go(until=lambda: len(a.answers) == 41)
    device.finish()


def test_a_model_without_an_image_has_a_speed_of_its_own() -> None:
    device = device_of("prism")
    assert device.placing is not None
    shared, own = device.residency.models["m0"], device.residency.models["m1"]
    own.copy_bytes_s, before = 1e6, device.residency.copy_bytes_s
    assert device.residency.activation_s("m1") > 100 * device.residency.activation_s("m0")
    device.models[1].submit(prompt(1, 2), 2)
    device.go()
    assert device.residency.copy_bytes_s == before and own.copy_bytes_s > 1e6, "measured, and not for the others"
    device.models[0].submit(prompt(1, 2), 2)
    device.finish()
    assert device.residency.copy_bytes_s != before and shared.copy_bytes_s is None


@pytest.mark.parametrize("sharing", ONE_AT_A_TIME)
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_comes_every_request_of_one_model_at_a_time_ends_with_its_tokens(sharing: str, seed: int) -> None:
    anything(seed, requests=8, sharing=sharing).finish()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sharing", ONE_AT_A_TIME)
def test_whatever_comes_for_long_every_request_of_one_model_at_a_time_ends(sharing: str) -> None:
    for seed in random.Random(4).sample(range(1 << 40), 500):
        anything(seed, requests=20, sharing=sharing).finish()
