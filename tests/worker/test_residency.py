"""Weights come and go: requests wait for them and are answered, idle models give way, busy ones take turns."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from contracts.models import ModelState
from contracts.residency import MOST_MOVES, Why
from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_model import CHUNK, random_prompt
from worker.core.residency import HOLD_S, IDLE_S
from worker.core.resident import Expected
from worker.core.turns import SLICE_S

SLABS, WEIGHTS = 24, 8


def prompt(seed: int, chunks: int) -> list[int]:
    return random_prompt(random.Random(seed), chunks * CHUNK)


def total(device: VirtualDevice, what: str) -> int:
    return sum(getattr(each, what) for each in device.residency.models.values())


def states(device: VirtualDevice) -> list[ModelState]:
    return [each.state for each in device.residency.models.values()]


def moves(device: VirtualDevice, model: str) -> list[tuple[ModelState, Why, str]]:
    return [(move.state, move.why, move.other) for move in device.residency.models[model].moves]


def test_a_request_for_a_cold_model_waits_for_its_weights_and_is_answered() -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    a = device.models[0]
    name = a.submit(prompt(1, 3), 2)
    device.finish()
    assert a.answers[name].end == "length" and total(device, "activations") == 1
    assert states(device) == [ModelState.ACTIVE, ModelState.COLD]


def test_a_long_prefill_begins_while_later_layers_still_come() -> None:
    device = VirtualDevice(1, 90, weights=WEIGHTS)
    a, placing = device.models[0], device.placing
    assert placing is not None
    a.engine.core.pace.prefill_token_s = 0.001
    placing.layer_s = 0.03
    a.submit(prompt(1, 20), 1)
    device.go()
    first_s = a.answers["r0"].times_s[0]
    assert first_s < 0.16, "80 tokens take 82 ms, and three layers 90 ms to come"
    device.finish()


def test_weights_of_an_idle_model_go_for_a_request_of_another() -> None:
    device = VirtualDevice(2, 2 * WEIGHTS, weights=WEIGHTS)
    a, b = device.models
    a.submit(prompt(1, 3), 2)
    device.go()
    b.submit(prompt(2, 3), 2)
    device.finish()
    assert total(device, "evictions") >= 1 and b.answers["r0"].end == "length"
    assert moves(device, "m0") == [
        (ModelState.COLD, Why.START, ""),
        (ModelState.LOADING, Why.REQUEST, ""),
        (ModelState.ACTIVE, Why.LOADED, ""),
        (ModelState.COLD, Why.FOR_WEIGHTS, "m1"),
    ]
    came, left = device.residency.models["m0"].moves[2:]
    assert came.seconds == pytest.approx(came.at_s - device.residency.models["m0"].moves[1].at_s) and came.seconds > 0
    assert 0 <= left.seconds <= left.at_s - came.at_s


def test_models_that_fit_together_stay() -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    a, b = device.models
    for n in range(4):
        a.submit(prompt(n, 3), 2)
        b.submit(prompt(n, 3), 2)
        device.go()
    assert states(device) == [ModelState.ACTIVE] * 2 and not total(device, "evictions")
    device.finish()
    for model in (a, b):
        counts = model.engine.core.counts()
        assert counts.pages_total == counts.pages_free > 0, "what others hold is not in use here"


@pytest.mark.parametrize("idle_s", [IDLE_S - 5, IDLE_S + 5])
def test_kv_takes_the_weights_of_a_model_that_has_long_been_idle_and_only_then(idle_s: float) -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    a, b = device.models
    b.submit(prompt(2, 1), 2)
    device.go()
    device.world.pass_(idle_s)
    first = a.submit(prompt(1, 5), 10)
    device.go(until=lambda: bool(a.answers[first].tokens))
    a.submit(prompt(3, 4), 2, session="other")  # both need 13 slabs, and weights leave 8
    device.go()
    assert (total(device, "evictions") > 0) == (idle_s > IDLE_S)
    assert ((ModelState.COLD, Why.FOR_KV, "m0") in moves(device, "m1")) == (idle_s > IDLE_S)
    device.finish()


def test_the_weights_of_a_model_that_is_used_elsewhere_go_at_any_need() -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    a, b = device.models
    b.submit(prompt(2, 1), 2)
    device.go()
    device.residency.spare("m1", device.world.now() + 60.0)
    first = a.submit(prompt(1, 5), 10)
    device.go(until=lambda: bool(a.answers[first].tokens))
    a.submit(prompt(3, 4), 2, session="other")  # both need 13 slabs, and weights leave 8
    device.go()
    assert (ModelState.COLD, Why.FOR_KV, "m0") in moves(device, "m1")
    b.submit(prompt(4, 1), 2)
    device.finish()
    assert b.answers["r1"].end == "length", "requests that come all the same are answered"


def crowd(device: VirtualDevice, count: int) -> None:
    """Requests of the first model that fill the memory, one after the other, and more of them later."""
    a = device.models[0]
    for n in range(count):
        a.submit(prompt(n, 3), 40, session=f"s{n}")
    device.go(until=lambda: sum(bool(each.tokens) for each in a.answers.values()) >= 4)


def test_a_model_that_moves_here_gets_the_memory_that_running_requests_free() -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    crowd(device, 16)
    residency, now = device.residency, device.world.now()
    residency.expect("m1", Expected(now, now + 60.0, moves=True))
    device.go(until=lambda: residency.models["m1"].state is ModelState.ACTIVE)
    assert residency.models["m1"].state is ModelState.ACTIVE and residency.models["m0"].evictions == 0
    assert len(device.models[0].sequences) > 8, "the others wait"
    device.finish()
    assert all(each.end == "length" for each in device.models[0].answers.values())


def test_a_hint_waits_for_memory_that_requests_hold() -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    crowd(device, 16)
    now = device.world.now()
    device.residency.expect("m1", Expected(now, now + 60.0))
    device.go(until=lambda: len(device.models[0].sequences) <= 8)
    assert states(device)[1] is ModelState.COLD
    device.finish()


def test_a_request_for_a_cold_model_comes_before_later_ones_and_nobody_gives_way() -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    crowd(device, 16)
    b = device.models[1]
    asked = b.submit(prompt(99, 1), 2)
    for n in range(8):
        device.models[0].submit(prompt(40 + n, 3), 40, session=f"later-{n}")
    device.go(until=lambda: bool(b.answers[asked].end))
    assert b.answers[asked].end == "length"
    assert total(device, "evictions") == 0 and len(device.models[0].sequences) >= 8
    device.finish()


def test_of_busy_models_the_one_with_the_fewest_requests_gives_way() -> None:
    device = VirtualDevice(3, 116, weights=40)
    a, b, c = device.models
    for n in range(3):
        a.submit(prompt(n, 1), 24, session=f"s{n}")
    b.submit(prompt(3, 1), 24)
    device.go(until=lambda: all(each.tokens for m in (a, b) for each in m.answers.values()))
    c.submit(prompt(4, 1), 2)
    device.go(until=lambda: bool(c.sequences))
    for resident in device.residency.models.values():
        resident.since_s = resident.waits_s = device.world.now() - 100.0
    device.go(until=lambda: ModelState.DRAINING in states(device), most_s=1.0)
    assert states(device) == [ModelState.ACTIVE, ModelState.DRAINING, ModelState.COLD]
    device.finish()


def test_what_moves_here_is_given_up_where_running_requests_do_not_leave_enough() -> None:
    device = VirtualDevice(2, SLABS, weights=WEIGHTS)
    a, residency = device.models[0], device.residency
    for n in range(4):
        a.submit(prompt(n, 2), 4000, session=f"s{n}")
    device.go(until=lambda: all(each.tokens for each in a.answers.values()))
    began = device.world.now()
    residency.expect("m1", Expected(began, began + 60.0, moves=True))
    device.go(until=lambda: device.world.now() > began + 1.0)
    held = residency.balloon.held is not None
    device.go(until=lambda: device.world.now() > began + HOLD_S + 1.0)
    assert residency.balloon.held is None and (held or states(device)[1] is not ModelState.COLD)
    for n in range(4):
        a.cancel(f"r{n}")
    device.finish()


def test_busy_models_that_do_not_fit_together_take_turns() -> None:
    device = VirtualDevice(2, 2 * WEIGHTS, weights=WEIGHTS)
    a, b = device.models
    for model in (a, b):
        for n in range(3):
            model.submit(prompt(n, 3), 2000, session=f"s{n}")
    device.go(until=lambda: all(m.answers["r0"].tokens for m in (a, b)))
    assert device.world.now() < 3 * SLICE_S + 5.0 and not a.answers["r0"].end
    assert any(m[0] is ModelState.DRAINING and m[2] == "m1" for m in moves(device, "m0"))
    assert (ModelState.COLD, Why.DRAINED, "") in moves(device, "m0")
    for model in (a, b):
        for n in range(3):
            model.cancel(f"r{n}")
    device.finish()


def test_a_hint_wakes_a_model_in_time_for_its_request() -> None:
    device = VirtualDevice(1, SLABS, weights=WEIGHTS)
    a = device.models[0]
    a.submit(prompt(1, 5), 2)
    device.go()
    device.residency._unload(device.residency.models["m0"], Why.FOR_WEIGHTS)
    a.store.hint("s", list(a.store.chunks), arrival_s=2.0, expires_s=10.0)
    device.go(until=lambda: device.world.now() >= a.world.now() and states(device) == [ModelState.ACTIVE], most_s=3.0)
    assert not a.sequences and (ModelState.LOADING, Why.HINT, "") in moves(device, "m0")
    device.finish()


def test_the_hint_of_a_new_session_wakes_a_model_in_time_and_an_expired_one_does_not() -> None:
    device = VirtualDevice(1, SLABS, weights=WEIGHTS)
    residency, now = device.residency, device.world.now()
    residency.expect("m0", Expected(now + 1.0, now + 1.1))
    device.world.pass_(2.0)
    residency.tick(device.world.now())
    assert states(device) == [ModelState.COLD] and not residency.models["m0"].expected
    now = device.world.now()
    residency.expect("m0", Expected(now + 5.0, now + 60.0))
    device.go(until=lambda: device.world.now() >= now + 5.0)
    assert states(device) == [ModelState.ACTIVE] and residency.models["m0"].since_s > now + 4.0
    device.finish()


def test_a_hint_does_not_take_the_weights_of_a_model_that_was_used_lately() -> None:
    device = VirtualDevice(2, 2 * WEIGHTS, weights=WEIGHTS)
    a, b = device.models
    a.submit(prompt(1, 3), 2)
    device.go()
    b.submit(prompt(2, 3), 2)
    device.go()
    a.store.hint("s", list(a.store.chunks), arrival_s=0.1, expires_s=10.0)
    device.go(until=lambda: device.world.now() > 20.0)
    assert states(device) == [ModelState.COLD, ModelState.ACTIVE]
    device.finish()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_hints_of_models_that_do_not_fit_together_do_not_evict_each_other(elsewhere: bool) -> None:
    device = VirtualDevice(2, WEIGHTS + 6, weights=WEIGHTS)
    for model in device.models:
        model.submit(prompt(1, 2), 2)
        device.go()
    for model, resident in zip(device.models, device.residency.models.values(), strict=True):
        if resident.state is ModelState.ACTIVE:
            device.residency._unload(resident, Why.FOR_KV)
        model.store.hint("s", list(model.store.chunks), arrival_s=1.0, expires_s=9.0)
        if elsewhere:
            device.residency.spare(resident.name, device.world.now() + 60.0)
    before = total(device, "activations")
    device.go(until=lambda: device.world.now() > 20.0)
    assert total(device, "activations") - before == (0 if elsewhere else 1)
    device.finish()


def test_a_request_that_is_expected_here_counts_more_than_that_requests_go_elsewhere() -> None:
    device = VirtualDevice(2, WEIGHTS + 6, weights=WEIGHTS)
    now = device.world.now()
    for name in ("m0", "m1"):
        device.residency.spare(name, now + 60.0)
        device.residency.expect(name, Expected(now + 1.0, now + 9.0))
    device.go(until=lambda: device.world.now() > now + 8.0)
    assert total(device, "activations") == 1
    device.finish()


def test_weights_that_cannot_be_read_are_tried_again_and_nothing_is_lost() -> None:
    device = VirtualDevice(1, SLABS, weights=WEIGHTS)
    assert device.placing is not None
    device.placing.fails = 0.5
    a = device.models[0]
    a.submit(prompt(1, 5), 2)
    device.finish()
    assert a.answers["r0"].end == "length" and device.residency.models["m0"].evictions > 0
    assert (ModelState.COLD, Why.FAILED, "") in moves(device, "m0")


def test_only_the_latest_moves_are_remembered() -> None:
    device = VirtualDevice(2, 2 * WEIGHTS, weights=WEIGHTS)
    for n in range(MOST_MOVES):
        device.models[n % 2].submit(prompt(n, 1), 1, session=f"s{n}")
        device.go()
    remembered = device.residency.models["m0"].moves
    assert len(remembered) == MOST_MOVES and remembered[-1].why is Why.FOR_WEIGHTS
    assert [m.at_s for m in remembered] == sorted(m.at_s for m in remembered)
    device.finish()


def test_the_speed_of_copies_is_learned_from_models_that_come_alone() -> None:
    device = VirtualDevice(3, 3 * SLABS, weights=WEIGHTS)
    assert device.placing is not None
    a, b, c = device.models
    device.placing.layer_s = 0.1
    a.submit(prompt(1, 3), 2)
    device.go()
    alone_bytes_s = device.residency.copy_bytes_s
    assert WEIGHTS * 2e7 / 0.45 <= alone_bytes_s <= WEIGHTS * 2e7 / 0.2
    device.placing.layer_s = 1.0  # two at a time
    b.submit(prompt(2, 3), 2)
    c.submit(prompt(3, 3), 2)
    device.finish()
    assert total(device, "activations") == 3 and device.residency.copy_bytes_s == alone_bytes_s


def anything(seed: int, requests: int, sharing: str = "") -> VirtualDevice:
    """As `test_balloon.anything`, with weights. sharing: empty: any with which weights come and go."""
    dice = random.Random(seed)
    models, weights = dice.choice([1, 2, 3, 4]), dice.choice([4, 8])
    device = VirtualDevice(
        models,
        weights + dice.choice([16, 20, 30]),
        priorities=tuple(dice.choice([0, 0, 1]) for _ in range(models)),
        weights=weights,
        sharing=sharing or dice.choice(["prism", "prism", "prism", "swap", "serverless"]),
        store=dice.choice([True, True, True, False]),
        step_tokens=dice.choice([16, 40, 1024]),
        max_batch=dice.choice([1, 2, 5, 64]),
        targets=tuple(dice.choice([0.0, 0.0, 0.05, 1.0]) for _ in range(models)),
        copy_s=dice.choice([None, 1e-5, 1e-4, 1e-3]),
        trains=random.Random(seed) if seed % 3 == 1 else None,
    )
    assert device.placing is not None
    device.placing.layer_s, device.placing.dice = dice.choice([0.001, 0.05, 0.3]), dice
    device.placing.fails = dice.choice([0.0, 0.0, 0.1])
    device.suffer(dice, requests, span_s=requests * dice.choice([0.05, 1.0]), longest=16 - 3)
    return device


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_comes_and_goes_every_request_ends_with_its_tokens(seed: int) -> None:
    anything(seed, requests=8).finish()


@pytest.mark.parametrize("seed", [2320280, 3848647])
def test_nobody_takes_a_place_that_he_gives_back_without_computing(seed: int) -> None:
    anything(seed, requests=15).finish()  # these went on for ever, in no time


def in_no_time(seed: int, moves: bool = False) -> VirtualDevice:
    """Four models that hardly fit in pairs, whose weights come in 2 ms, and hints of new sessions. moves: half of the
    hints are of models that move here."""
    dice = random.Random(seed)
    room, copy_s = dice.choice([16, 20]), dice.choice([None, 1e-4])
    device = VirtualDevice(4, WEIGHTS + room, weights=WEIGHTS, copy_s=copy_s, step_tokens=1024)
    assert device.placing is not None
    device.placing.layer_s, device.placing.dice = 0.0007, dice

    def hint(name: str) -> None:
        now = device.world.now()
        device.residency.expect(name, Expected(now + 1.0, now + 5.0, moves and draw.random() < 0.5))

    draw = random.Random(seed)
    for name in device.residency.models:
        for _ in range(6):
            device.world.at(dice.random() * 6.0, lambda name=name: hint(name))  # type: ignore[misc]
    device.suffer(dice, 10, span_s=6.0, longest=16 - 3)
    return device


@pytest.mark.parametrize(("seed", "moves"), [(1, False), (7, False), (0, True)])
def test_weights_do_not_come_in_vain(seed: int, moves: bool) -> None:
    """Seed 1: 958 times for hints, while others waited for memory. 7: for ever, each model in turn. 0: for a move."""
    device = in_no_time(seed, moves)
    device.finish()
    assert total(device, "activations") < 60, "for forty requests"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1500, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_comes_and_goes_for_long_every_request_ends_with_its_tokens(seed: int) -> None:
    anything(seed, requests=20).finish()
