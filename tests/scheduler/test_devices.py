"""Several devices on a node: work goes to devices, what a store holds belongs to the node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.devices import device_name, is_of, node_of, number_of
from contracts.errors import InvalidRequest, Unavailable
from contracts.ids import SessionKey
from scheduler.core import snapshot, terms
from scheduler.core.control import Ask, Control, Prefetch, Withdraw
from scheduler.core.directory import Held
from scheduler.core.fleet import DEAD_AFTER_S, LoadReport
from scheduler.core.snapshot import PlacementRequest
from tests.scheduler.test_core import MODEL, TOKEN_BYTES, S, hint


class Harness(Control):
    """Nodes with two devices each, all serving at time 0."""

    def __init__(self, nodes: int = 2) -> None:
        super().__init__()
        for i in range(nodes):
            self.fleet.add(f"node-{i}", 2)
            for device in range(2):
                self.fleet.worker_joined(f"node-{i}/{device}", f"w{i}/{device}", (MODEL,), 0.0)
            self.fleet.store_joined(f"node-{i}", f"s{i}")

    def hold(self, node: str, tokens: int = 960, key: SessionKey = S) -> None:
        self.held(node, [(key, "m", 960, 1.0, Held(tokens, tokens * TOKEN_BYTES, tokens))])

    def busy(self, device: str, seconds: float, now: float = 0.0) -> None:
        self.fleet.loaded(device, LoadReport(outstanding_s=seconds, request_s=1.0), [], [], now)

    def states(self, now: float = 0.0) -> dict[str, str]:
        return {name: device.state(now) for name, device in self.fleet.devices.items()}


@given(st.integers(0, 999), st.integers(0, 15), st.integers(1, 16))
def test_a_name_says_node_and_number_and_the_only_device_has_its_nodes(node: int, device: int, devices: int) -> None:
    name = device_name(f"node-{node}", device, devices)
    assert (node_of(name), number_of(name)) == (f"node-{node}", device)
    assert is_of(name, name) and is_of(f"node-{node}", name) and not is_of(f"node-{node + 1}", name)
    assert (name == f"node-{node}") == (devices == 1 and device == 0)


def test_the_other_device_of_the_node_that_holds_a_cache_pays_no_way_for_it() -> None:
    h = Harness()
    h.hold("node-0")
    h.busy("node-0/0", 0.5)
    placed = h.place(Ask("r1", S, "m"), 0.0)
    assert placed.node == "node-0/1" and placed.sources == (), "its own node's store is no source"
    scores = dict(placed.choice.scores)
    assert scores["node-0/1"]["load_s"] == scores["node-0/1"]["leaving_s"] == scores["node-0/0"]["load_s"] == 0.0
    assert scores["node-1/0"]["load_s"] > 0.0 and scores["node-1/0"]["leaving_s"] > 0.0
    elsewhere = h.place(Ask("r2", S, "m", pin="node-1"), 0.0)
    assert elsewhere.node in ("node-1/0", "node-1/1") and elsewhere.sources == ("node-0",)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.floats(0, 20), min_size=16, max_size=16),
    st.sets(st.integers(0, 3)),
)
@settings(max_examples=100, deadline=None)
def test_what_a_node_holds_is_as_near_to_each_of_its_devices(
    nodes: int, devices: int, work: list[float], holders: set[int]
) -> None:
    """Also where the rows of a node do not lie together, as one came later."""
    h = Control()
    for device in range(devices):  # so that rows of nodes alternate
        for node in range(nodes):
            name = device_name(f"node-{node}", device, devices)
            h.fleet.worker_joined(name, name, (MODEL,), 0.0)
            h.fleet.loaded(name, LoadReport(outstanding_s=work[4 * node + device]), [], [], 0.0)
    for node in range(nodes):
        h.fleet.store_joined(f"node-{node}", "s")
        if node in holders:
            h.held(f"node-{node}", [(S, "m", 960, 1.0, Held(64 * (node + 1), 64 * (node + 1) * TOKEN_BYTES, 0))])
    h.validate()
    view = snapshot.take(h.fleet, h.directory.get(S), "m", 0.0)
    turn, rows = PlacementRequest("m", prefetched=view.names[0]), np.arange(nodes * devices)
    for term in (
        terms.bring_s(view),
        terms.load_s(view, turn, rows),
        terms.leaving_s(view, PlacementRequest("m"), rows),
    ):
        by_node: dict[str, set[float]] = {}
        for name, value in zip(view.names, term.tolist(), strict=True):
            by_node.setdefault(node_of(name), set()).add(value)
        assert all(len(values) == 1 for values in by_node.values())
    placed = h.place(Ask("r", S, "m"), 0.0)
    assert node_of(placed.node) not in placed.sources


def test_leaving_a_node_is_weighed_against_its_idlest_device() -> None:
    h = Harness()
    h.hold("node-0")
    h.busy("node-0/0", 100.0)
    h.busy("node-0/1", 20.0)
    assert h.place(Ask("r", S, "m"), 0.0).node in ("node-1/0", "node-1/1"), (
        "20 s are more than their half, whatever the other device has"
    )


def test_new_sessions_spread_over_all_devices() -> None:
    h, counts = Harness(), dict.fromkeys(Harness().fleet.devices, 0)
    for n in range(400):
        counts[h.place(Ask(f"r{n}", SessionKey("t", f"s{n}"), "m"), 0.0).node] += 1
    assert set(counts.values()) == {100}


# ---- lives


def test_a_worker_that_dies_leaves_its_nodes_other_device_and_the_cache_in_service() -> None:
    h = Harness(1)
    h.hold("node-0")
    h.place(Ask("r1", S, "m", pin="node-0/0"), 0.0)
    h.worker_left("node-0/0", 1.0)
    assert h.states() == {"node-0/0": "absent", "node-0/1": "serving"}
    assert h.directory.count("node-0") == 1 and not h.fleet.devices["node-0/0"].outstanding
    placed = h.place(Ask("r2", S, "m"), 1.0)
    assert placed.node == "node-0/1" and dict(placed.choice.scores)["node-0/1"]["load_s"] == 0.0
    h.fleet.worker_joined("node-0/0", "w", (MODEL,), 2.0)
    assert h.states() == {"node-0/0": "serving", "node-0/1": "serving"}
    h.validate()


def test_a_store_that_leaves_takes_its_devices_and_no_others_until_it_is_back() -> None:
    h = Harness()
    h.hold("node-0")
    h.store_left("node-0")
    assert h.states() == {"node-0/0": "absent", "node-0/1": "absent", "node-1/0": "serving", "node-1/1": "serving"}
    assert not h.directory.count("node-0")
    h.store_joined("node-0", "s")
    assert set(h.states().values()) == {"serving"}
    h.validate()


def test_a_silent_device_dies_alone_and_what_its_node_holds_is_lost_with_the_last_one() -> None:
    h = Harness(1)
    h.hold("node-0")
    late = DEAD_AFTER_S + 1.0
    h.busy("node-0/1", 0.0, now=late - 0.5)
    h.tick(late)
    assert h.states(late) == {"node-0/0": "dead", "node-0/1": "serving"} and h.directory.count("node-0") == 1
    assert h.place(Ask("r", S, "m"), late).node == "node-0/1"
    h.tick(2 * late)
    assert set(h.states(2 * late).values()) == {"dead"} and not h.directory.count("node-0")
    h.validate()


def test_one_device_drains_and_the_other_takes_its_turns() -> None:
    h = Harness(1)
    h.fleet.drain("node-0/1")
    assert h.states() == {"node-0/0": "serving", "node-0/1": "draining"}
    assert {h.place(Ask(f"r{n}", SessionKey("t", f"s{n}"), "m"), 0.0).node for n in range(20)} == {"node-0/0"}


def test_devices_that_have_not_come_are_starting() -> None:
    h = Control()
    h.fleet.add("node-0", 2)
    h.fleet.worker_joined("node-0/1", "w", (MODEL,), 0.0)
    h.fleet.store_joined("node-0", "s")
    assert {name: d.state(0.0) for name, d in h.fleet.devices.items()} == {
        "node-0/0": "starting",
        "node-0/1": "serving",
    }
    assert h.place(Ask("r", S, "m"), 0.0).node == "node-0/1"


# ---- pins


def test_a_pin_to_a_node_means_its_best_device_and_one_to_a_device_that_one() -> None:
    h = Harness()
    h.busy("node-1/0", 5.0)
    assert h.place(Ask("r1", S, "m", pin="node-1"), 0.0).node == "node-1/1"
    assert h.place(Ask("r2", S, "m", pin="node-1/0"), 0.0).node == "node-1/0"
    assert h.place(Ask("r3", S, "m", pin="node-1", avoid=frozenset({"node-1/1"})), 0.0).node == "node-1/0"
    h.worker_left("node-1/0", 0.0)
    assert h.place(Ask("r4", S, "m", pin="node-1"), 0.0).node == "node-1/1"
    with pytest.raises(Unavailable, match="node-1/0 is not serving"):
        h.place(Ask("r5", S, "m", pin="node-1/0"), 0.0)
    with pytest.raises(InvalidRequest, match="no node is called 'node-1/7'"):
        h.place(Ask("r6", S, "m", pin="node-1/7"), 0.0)


# ---- hints


def test_a_hint_is_for_a_device_and_its_turn_leaves_that_only_for_one_with_less_to_do() -> None:
    h = Harness()
    h.hold("node-0")
    (command,) = h.advise(hint(), 0.0)
    assert isinstance(command, Prefetch) and node_of(command.node) == "node-0" and command.sources == ()
    other = next(name for name in ("node-0/0", "node-0/1") if name != command.node)
    assert h.advise(hint(pin="node-0", advisory_id="a2"), 0.0) == [], "it is on that node already"
    placed = h.place(Ask("r1", S, "m"), 1.0)
    assert placed.node == command.node and placed.advised
    h.fleet.loaded(command.node, LoadReport(), [], ["r1"], 2.0)
    assert [c.node for c in h.advise(hint(), 2.0)] == [command.node]
    h.busy(command.node, 0.5, now=2.0)
    placed = h.place(Ask("r2", S, "m"), 3.0)
    assert placed.node == other and not placed.advised and dict(placed.choice.scores)[other]["load_s"] == 0.0


def test_the_cache_that_a_hint_brings_is_on_its_way_to_every_device_of_the_node() -> None:
    h = Harness()
    h.hold("node-0")
    h.busy("node-0/0", 30.0)
    h.busy("node-0/1", 30.0)
    (command,) = h.advise(hint(arrival_s=10.0), 0.0)
    assert isinstance(command, Prefetch) and node_of(command.node) == "node-1" and command.sources == ("node-0",)
    h.busy(command.node, 3.0)
    placed = h.place(Ask("r", S, "m"), 10.0)
    assert node_of(placed.node) == "node-1" and placed.node != command.node
    assert dict(placed.choice.scores)[placed.node]["load_s"] == 0.0


def test_a_hint_whose_device_is_gone_moves_to_the_nodes_other_one() -> None:
    h = Harness()
    h.hold("node-0")
    (command,) = h.advise(hint(), 0.0)
    other = next(name for name in ("node-0/0", "node-0/1") if name != command.node)
    h.worker_left(command.node, 1.0)
    withdrawn, again = h.tick(1.0)
    assert isinstance(withdrawn, Withdraw) and withdrawn.node == command.node
    assert isinstance(again, Prefetch) and again.node == other
    h.validate()
