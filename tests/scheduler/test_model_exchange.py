"""Two devices exchange models where no single move helps: each step has room, the source serves until the target is
ready, and it all comes to an end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.models import ModelState
from contracts.v1 import scheduler_pb2 as pb
from runtime.clock import VirtualClock
from scheduler.core.commands import Spare, Wake
from scheduler.core.control import Ask, Control, Settings
from scheduler.core.fleet import LoadReport
from scheduler.core.model_exchange import KV_SHARE, exchange
from scheduler.core.model_moves import GIVE_UP_S, LOOK_S, NO_EXCHANGE_S, REST_S
from scheduler.core.model_placement import TAU, Demand, Move, moves, pressures
from scheduler.core.models import ModelLoad
from scheduler.reports import Reports
from tests.scheduler.test_core import MODEL

GIB, TOTAL = 1 << 30, 32
DEVICES = ("x", "y", "z")
SIZES = dict.fromkeys(DEVICES, TOTAL)


def moved(demands: list[Demand], done: list[Move]) -> list[Demand]:
    at = {d.model: set(d.active) for d in demands}
    for move in done:
        at[move.model].remove(move.leaves)
        assert move.to not in at[move.model], "copies of a model stay apart"
        at[move.model].add(move.to)
    return [replace(d, active=tuple(sorted(at[d.model]))) for d in demands]


def fits(demands: list[Demand]) -> bool:
    return all(device.left > 0 for device in pressures(demands, SIZES).values())


DEMANDS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 12),
        st.sets(st.sampled_from(DEVICES), min_size=1, max_size=2),
        st.booleans(),
        st.booleans(),
        st.sampled_from([0.0, 1.0, 10.0]),
    ),
    min_size=2,
    max_size=8,
).map(
    lambda drawn: [
        Demand(f"m{n}", 0.0 if idle else float(w), weights, tuple(sorted(at)), frozenset(DEVICES), stays, idle, load_s)
        for n, (w, weights, at, stays, idle, load_s) in enumerate(drawn)
    ]
)


@given(DEMANDS)
def test_an_exchange_lowers_the_greater_pressure_of_both_and_each_of_its_steps_has_room(demands: list[Demand]) -> None:
    found = exchange(demands, SIZES)
    if not found:
        return
    by_name = {d.model: d for d in demands}
    pair = {name for move in found for name in (move.leaves, move.to)}
    assert len(pair) == 2 and len(found) >= 2
    assert not any(by_name[move.model].stays or by_name[move.model].idle for move in found)
    before = max(pressures(demands, SIZES)[name].ratio for name in pair)
    after = max(pressures(moved(demands, found), SIZES)[name].ratio for name in pair)
    assert after < (1.0 - TAU - sum(by_name[move.model].load_s for move in found) / REST_S) * before
    here = {name: device.left for name, device in pressures(demands, SIZES).items()}
    for move in found:  # the source serves until the target is ready, so both are there for a while
        here[move.to] -= by_name[move.model].weight_bytes
        assert here[move.to] >= KV_SHARE * TOTAL
        here[move.leaves] += by_name[move.model].weight_bytes


@given(DEMANDS)
def test_moves_and_exchanges_come_to_an_end(demands: list[Demand]) -> None:
    if not fits(demands):
        return
    seen = set()
    while found := moves(demands, SIZES)[:1] or exchange(demands, SIZES):
        demands = moved(demands, found)
        assert fits(demands)
        state = tuple(d.active for d in demands)
        assert state not in seen
        seen.add(state)


def two(heavy_bytes: int = 10, light_bytes: int = 4) -> list[Demand]:
    """Two heavy models on x; y is full of light ones."""
    may = frozenset("xy")
    heavy = [Demand(name, 40.0, heavy_bytes, ("x",), may) for name in ("h0", "h1")]
    return heavy + [Demand(f"l{n}", 1.0, light_bytes, ("y",), may) for n in range(6)]


def test_a_heavy_model_and_light_ones_change_places() -> None:
    demands, sizes = two(), {"x": TOTAL, "y": TOTAL}
    assert not moves(demands, sizes), "a heavy model has no room on y, and a light one does not help"
    found = exchange(demands, sizes)
    assert {move.model[0] for move in found} == {"h", "l"}
    assert [move.model[0] for move in found].index("h") > 0, "light ones make room first"


def test_a_model_that_stays_or_takes_too_long_to_load_is_not_exchanged() -> None:
    sizes = {"x": TOTAL, "y": TOTAL}
    assert not exchange([replace(d, stays=d.model[0] == "h") for d in two()], sizes)
    assert not exchange([replace(d, stays=d.model[0] == "l") for d in two()], sizes)
    assert not exchange([replace(d, load_s=REST_S) for d in two()], sizes)
    assert exchange(two(), sizes)
    assert not exchange(two(), {"x": 24, "y": TOTAL}), "x has no room for a light one beside its own"


NAMES = ("h0", "h1", "l0", "l1", "l2")
WEIGHTS = {name: int((3 if name[0] == "h" else 2.15) * GIB) for name in NAMES}


class Fleet:
    """Two devices of 10 GiB, and which models each has; requests are those of models with a rate."""

    def __init__(self, **settings: object) -> None:
        self.control = Control(Settings(models=NAMES, **settings))  # type: ignore[arg-type]
        models = [replace(MODEL, name=name, weight_bytes=WEIGHTS[name]) for name in NAMES]
        for n in range(2):
            self.join(f"node-{n}", models)
        self.models, self.now = models, 10.0
        self.here = {"node-0": {"h0", "h1"}, "node-1": {"l0", "l1", "l2"}}
        self.busy: set[tuple[str, str]] = set()

    def join(self, name: str, models: list[object]) -> None:
        self.control.fleet.worker_joined(name, f"w{name}", tuple(models), 0.0, device_bytes=10 * GIB)  # type: ignore[arg-type]
        self.control.fleet.store_joined(name, f"s{name}")

    def look(self) -> list[Wake | Spare]:
        """Report, and let the scheduler look."""
        self.now += LOOK_S
        for device, here in self.here.items():
            loads = {
                name: ModelLoad(
                    ModelState.ACTIVE if name in here else ModelState.COLD,
                    running=int((name, device) in self.busy),
                    token_rate=(1000.0 if name[0] == "h" else 10.0) if name in here else 0.0,
                    activation_s=0.0 if name in here else 0.5,
                    request_s=0.1,
                    by_priority={0: 20.0},
                )
                for name in NAMES
            }
            if self.control.fleet.devices[device].worker_here:
                self.control.fleet.loaded(device, LoadReport(models=loads), [], [], self.now)
        return [c for c in self.control.tick(self.now) if isinstance(c, Wake | Spare)]

    def woken(self) -> list[tuple[str, str]]:
        return [(c.node, c.model) for c in self.look() if isinstance(c, Wake)]

    def asks(self, model: str) -> str:
        return self.control.place(
            Ask(f"r{self.now}{model}", SessionKey("t", f"{model}{self.now}"), model), self.now
        ).node


def test_an_exchange_happens_one_move_after_the_other_and_turns_follow() -> None:
    fleet, order = Fleet(), list[str]()
    for _ in range(12):
        for device, model in fleet.woken():
            assert fleet.control.tick(fleet.now) == [], "a look at a time"
            old = {"node-0": "node-1", "node-1": "node-0"}[device]
            assert fleet.asks(model) == old, "it serves until the other can"
            fleet.here[device].add(model)
            order.append(model)
        fleet.look()
        for model in NAMES:
            for left in fleet.control.model_moves.leaving(model):
                fleet.here[left].discard(model)
    assert {"h", "l"} == {name[0] for name in order} and len(order) == len(set(order))
    assert len(fleet.here["node-0"] & {"h0", "h1"}) == 1 == len(fleet.here["node-1"] & {"h0", "h1"})
    assert not fleet.woken()


def test_the_next_move_waits_until_the_requests_of_the_last_one_have_left_if_it_needs_their_room() -> None:
    fleet = Fleet()
    [(device, first)] = fleet.woken()
    old = {"node-0": "node-1", "node-1": "node-0"}[device]
    fleet.here[device].add(first)
    fleet.here[old].add("l2" if first != "l2" else "l1")
    fleet.busy = {(name, old) for name in fleet.here[old]}
    told = fleet.look()
    assert [c for c in told if isinstance(c, Spare)] == [Spare(old, first, told[0].expires_s)]
    waits = [fleet.woken() for _ in range(3)]
    assert not any(waits)
    fleet.busy.clear()
    assert fleet.woken()


def test_an_exchange_that_fails_is_given_up_and_not_tried_again_soon() -> None:
    fleet = Fleet()
    assert fleet.woken()
    begun = fleet.now
    while fleet.now - begun <= GIVE_UP_S + REST_S:
        assert not fleet.woken()
    assert fleet.control.model_moves.given_up == 1
    while fleet.now - begun < NO_EXCHANGE_S:
        assert not fleet.woken()
    assert [fleet.woken() for _ in range(20)] != [[]] * 20


def test_a_lost_device_ends_the_exchange_and_its_models_are_served_elsewhere() -> None:
    fleet = Fleet()
    [(device, first)] = fleet.woken()
    fleet.here[device].add(first)
    fleet.look()
    old = {"node-0": "node-1", "node-1": "node-0"}[device]
    assert fleet.control.model_moves.leaving(first) == {old}
    fleet.control.worker_left(device, fleet.now)
    fleet.here[device].clear()
    assert not fleet.look() and not fleet.control.model_moves.leaving(first)
    assert fleet.asks(first) == old


def test_pinned_models_are_not_exchanged() -> None:
    fleet = Fleet(pinned=frozenset({"l0", "l1", "l2"}))
    assert not any(fleet.woken() for _ in range(10))


def test_workers_are_told_from_now() -> None:
    reports = Reports(Control(Settings()), VirtualClock())
    queue = reports._workers["node-0"] = asyncio.Queue()
    reports.carry_out(
        [Wake("node-0", "a", 7.0, 9.0, moves=True), Spare("node-0", "b", 8.0), Spare("gone", "b", 8.0)], 5.0
    )
    assert [queue.get_nowait() for _ in range(queue.qsize())] == [
        pb.WorkerCommand(wake=pb.WakeModel(model="a", arrival_s=2.0, expires_s=4.0, moves=True)),
        pb.WorkerCommand(spare=pb.SpareModel(model="b", expires_s=3.0)),
    ]
