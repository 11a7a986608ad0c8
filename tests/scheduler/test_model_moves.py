"""Models move to where their KV presses least, one at a time, and serve from their old device until then."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.models import ModelState
from scheduler.core.commands import Wake
from scheduler.core.control import Ask, Control, Settings
from scheduler.core.fleet import LoadReport
from scheduler.core.model_moves import GIVE_UP_S, LOOK_S, REST_S
from scheduler.core.model_placement import Demand, Move, moves, roomiest
from scheduler.core.models import ModelLoad
from scheduler.metrics import SchedulerMetrics
from tests.scheduler.test_core import MODEL

GIB = 1 << 30
DEVICES = ("x", "y", "z")


def after(demands: list[Demand], found: list[Move]) -> dict[str, tuple[str, ...]]:
    placed = {d.model: list(d.active) for d in demands}
    for move in found:
        placed[move.model].remove(move.leaves)
        placed[move.model].append(move.to)
    return {model: tuple(at) for model, at in placed.items()}


def worst(demands: list[Demand], placed: dict[str, tuple[str, ...]], bytes_: int) -> float:
    """The greatest pressure of a device."""
    found = []
    for device in DEVICES:
        here = [d for d in demands for at in placed[d.model] if at == device]
        left = bytes_ - sum(d.weight_bytes for d in here)
        w = sum(d.w / len(d.active) for d in here)
        found.append(w / left if left > 0 else float("inf") if w else 0.0)
    return max(found)


DEMANDS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 3), st.sets(st.sampled_from(DEVICES), min_size=1, max_size=2)),
    min_size=1,
    max_size=5,
).map(
    lambda drawn: [
        Demand(f"m{n}", float(w), weights, tuple(sorted(active)), frozenset(DEVICES))
        for n, (w, weights, active) in enumerate(drawn)
    ]
)


@given(DEMANDS)
def test_copies_stay_apart_and_moves_come_to_an_end(demands: list[Demand]) -> None:
    sizes, seen = dict.fromkeys(DEVICES, 20), set()
    while found := moves(demands, sizes):
        placed = after(demands, found)
        assert all(len(set(at)) == len(at) == len(d.active) for d in demands for at in [placed[d.model]])
        assert worst(demands, placed, 20) <= worst(demands, {d.model: d.active for d in demands}, 20)
        demands = [replace(d, active=placed[d.model]) for d in demands]
        state = tuple(tuple(sorted(d.active)) for d in demands)
        assert state not in seen
        seen.add(state)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_without_inertia_the_worst_pressure_is_at_most_twice_the_best_possible(weights: list[int]) -> None:
    """The paper's bound (A.2.1)."""
    demands = [Demand(f"m{n}", float(w), 1, ("x",), frozenset(DEVICES)) for n, w in enumerate(weights)]
    reached = worst(demands, after(demands, moves(demands, dict.fromkeys(DEVICES, 20), tau=0.0)), 20)
    best = min(
        worst(demands, {d.model: (at,) for d, at in zip(demands, places, strict=True)}, 20)
        for places in itertools.product(DEVICES, repeat=len(demands))
    )
    assert reached <= 2.0 * best + 1e-9


def test_a_small_gain_is_no_reason_and_a_pinned_model_stays() -> None:
    may = frozenset(("x", "y"))
    even = [Demand("a", 10.0, 1, ("x",), may), Demand("b", 9.0, 1, ("y",), may), Demand("c", 1.0, 1, ("x",), may)]
    assert moves(even, {"x": 20, "y": 20}) == []
    crowded = [Demand("a", 10.0, 1, ("x",), may), Demand("b", 9.0, 1, ("x",), may)]
    assert moves(crowded, {"x": 20, "y": 20}) == [Move("b", "x", "y")]
    assert moves([replace(d, stays=True) for d in crowded], {"x": 20, "y": 20}) == []
    assert roomiest(crowded[0], crowded, {"x": 20, "y": 20}) == "y"
    assert roomiest(replace(crowded[0], weight_bytes=30), crowded, {"x": 20, "y": 20}) == ""


A, B = (replace(MODEL, name=name, weight_bytes=GIB) for name in "ab")


def fleet(**settings: object) -> Control:
    control = Control(Settings(models=("a", "b"), **settings))  # type: ignore[arg-type]
    for n in range(2):
        control.fleet.worker_joined(f"node-{n}", f"w{n}", (A, B), 0.0, device_bytes=10 * GIB)
        control.fleet.store_joined(f"node-{n}", f"s{n}")
    return control


def report(control: Control, now: float, *active: set[str], rate: float = 100.0) -> None:
    for n, here in enumerate(active):
        loads = {
            name: ModelLoad(
                ModelState.ACTIVE if name in here else ModelState.COLD,
                token_rate=rate if name in here else 0.0,
                activation_s=0.0 if name in here else 0.5,
                request_s=0.1,
            )
            for name in "ab"
        }
        control.fleet.loaded(f"node-{n}", LoadReport(models=loads), [], [], now)


def woken(control: Control, now: float) -> list[Wake]:
    return [c for c in control.tick(now) if isinstance(c, Wake)]


def asks(control: Control, model: str, number: int, now: float) -> str:
    return control.place(Ask(f"r{model}{number}", SessionKey("t", f"s{number}"), model), now).node


def test_of_two_busy_models_on_one_device_one_moves_and_turns_follow_once_it_is_there() -> None:
    control, now = fleet(), 10.0
    report(control, now, {"a", "b"}, set())
    [wake] = woken(control, now)
    model = wake.model
    assert wake.node == "node-1" and wake.expires_s > now
    assert asks(control, model, 0, now) == "node-0", "it serves until the other can"
    now += LOOK_S
    report(control, now, {"a", "b"}, {model})
    assert not woken(control, now) and control.model_moves.arrived == 1
    assert {asks(control, model, n, now) for n in range(1, 6)} == {"node-1"}
    other = ({"a", "b"} - {model}).pop()
    assert asks(control, other, 9, now) == "node-0"
    now += LOOK_S
    report(control, now, {other}, {model})
    assert not woken(control, now) and not control.model_moves.leaving(model)


def test_a_move_that_does_not_arrive_is_given_up_and_rests() -> None:
    control, now = fleet(), 10.0
    report(control, now, {"a", "b"}, set())
    first = woken(control, now)[0].model
    for _ in range(int(GIVE_UP_S / LOOK_S) + 1):
        now += LOOK_S
        report(control, now, {"a", "b"}, set())
        assert not woken(control, now) and not control.model_moves.leaving(first)
    assert control.model_moves.given_up == 1
    now += max(REST_S, LOOK_S)
    report(control, now, {"a", "b"}, set())
    assert woken(control, now)


def test_idle_models_stay_and_one_scheduler_of_a_fleet_moves() -> None:
    control = fleet()
    report(control, 10.0, {"a", "b"}, set(), rate=0.0)
    assert not woken(control, 10.0)
    control = fleet(moves_models=False)
    report(control, 10.0, {"a", "b"}, set())
    assert not woken(control, 10.0)


def test_a_model_is_kept_active_on_as_many_nodes_as_configured() -> None:
    control = fleet(min_nodes={"a": 2})
    report(control, 10.0, {"a", "b"}, set(), rate=0.0)
    assert [(w.node, w.model) for w in woken(control, 10.0)] == [("node-1", "a")]
    report(control, 20.0, {"a", "b"}, {"a"}, rate=0.0)
    assert not woken(control, 20.0)


C = replace(MODEL, name="c", weight_bytes=8 * GIB)


def crowded(*, cold: bool = True) -> Control:
    """Two devices with a and b active, and c cold, unless it is on none."""
    models = (A, B, C) if cold else (A, B)
    control = Control(Settings(models=("a", "b", "c")))
    for n in range(2):
        control.fleet.worker_joined(f"node-{n}", f"w{n}", models, 0.0, device_bytes=10 * GIB)
        control.fleet.store_joined(f"node-{n}", f"s{n}")
    return control


def say(control: Control, now: float, **seconds: float) -> None:
    """Both devices report so much work for each model, c cold."""
    for n in range(2):
        loads = {
            model.name: ModelLoad(
                ModelState.COLD if model is C else ModelState.ACTIVE,
                request_s=0.1,
                token_rate=1.0,
                activation_s=0.5 if model is C else 0.0,
                by_priority={0: seconds.get(model.name, 0.0)},
            )
            for model in control.fleet.devices[f"node-{n}"].models
        }
        report = LoadReport(outstanding_s=sum(seconds.values()), models=loads)
        control.fleet.loaded(f"node-{n}", report, [], [], now)


def test_an_idle_model_leaves_all_copies_but_one_and_uses_them_again_when_work_piles_up() -> None:
    control = crowded()
    say(control, 10.0)
    control.tick(10.0)
    spare = {model: control.model_moves.leaving(model) for model in "ab"}
    assert all(len(left) == 1 for left in spare.values()) and spare["a"] != spare["b"], "a device each"
    [gone] = spare["a"]
    assert {asks(control, "a", n, 11.0) for n in range(5)} == {"node-0", "node-1"} - {gone}
    say(control, 20.0, a=30.0)
    control.tick(20.0)
    assert not control.model_moves.leaving("a") and control.model_moves.leaving("b") == spare["b"]


def test_where_all_models_fit_copies_stay() -> None:
    control = crowded(cold=False)
    say(control, 10.0)
    control.tick(10.0)
    assert not control.model_moves.leaving("a") and not control.model_moves.leaving("b")


def test_copies_that_are_wanted_stay() -> None:
    control = fleet(min_nodes={"a": 2}, pinned=frozenset("b"))
    report(control, 10.0, {"a", "b"}, {"a", "b"}, rate=1.0)
    control.tick(10.0)
    assert not control.model_moves.leaving("a") and not control.model_moves.leaving("b")


def test_the_pressure_of_devices_is_shown_whoever_moves_models() -> None:
    for moves_models in (True, False):
        control = fleet(moves_models=moves_models)
        report(control, 10.0, {"a", "b"}, set())
        control.tick(10.0)
        shown = pressures_shown(control)
        token_bytes = MODEL.shape.piece_bytes * MODEL.shape.layers / MODEL.shape.chunk_tokens
        assert shown["node-0"] == pytest.approx(2 * 100.0 * token_bytes / 0.05 / (8 * GIB))
        assert shown["node-1"] == 0.0
        control.tick(10.0 + LOOK_S)
        control.worker_left("node-1")
        control.tick(10.0 + 2 * LOOK_S)
        assert "node-1" not in pressures_shown(control), "a device that does not serve has none"


def pressures_shown(control: Control) -> dict[str, float]:
    families = {family.name: family for family in SchedulerMetrics(control).collect()}
    return {sample.labels["node"]: sample.value for sample in families["upbeat_scheduler_kv_pressure"].samples}
