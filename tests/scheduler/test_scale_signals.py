"""What an autoscaler is told of the fleet: from workers' and stores' reports, and from gateways' answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.ids import SessionKey
from scheduler.core.control import Ask
from scheduler.core.directory import Held
from scheduler.core.fleet import DEAD_AFTER_S, LoadReport
from scheduler.core.models import ModelLoad
from scheduler.core.recent import Recent
from scheduler.core.resumable import RESUMABLE_S
from scheduler.core.scale_signals import TPOT, TTFT, Attained, Signals, signals
from tests.scheduler.test_core import MODEL, TOKEN_BYTES, Harness

BUSY = LoadReport(outstanding_s=3.0, request_s=2.0, prefill_token_s=1e-3, hbm_pages_total=100, hbm_pages_free=75)


class Seen(Harness):
    """A fleet, and what is seen of it."""

    def __init__(self, nodes: int = 2) -> None:
        super().__init__(nodes)
        self.attained = Attained()
        self.number = 0
        for name in self.fleet.nodes:
            self.fleet.node(name).dram_bytes_total = 1000

    def report(
        self,
        node: str,
        load: LoadReport = BUSY,
        here: tuple[str, ...] = (),
        ended: tuple[str, ...] = (),
        now: float = 0.0,
    ) -> None:
        self.number += 1
        self.fleet.loaded(node, load, here, ended, now, self.number)

    def look(self, now: float = 0.0, wall: float = 1.0, **more: bool) -> Signals:
        return signals(self.fleet, self.directory, self.attained, now, wall, **more)


def test_work_is_that_of_workers_reports_and_of_placements_since() -> None:
    h = Seen()
    h.report("node-0")
    h.report("node-1", replace(BUSY, outstanding_s=0.0))
    h.place(Ask("r1", SessionKey("t", "s"), "m"), 0.0)
    seen = h.look()
    (where,) = [name for name, device in h.fleet.devices.items() if device.unconfirmed]
    assert where == "node-1", "it has nothing to do"
    assert seen.work_s_of["node-0", "m"] == 3.0
    assert seen.work_s_of["node-1", "m"] == pytest.approx(h.fleet.request_s_of("m"))
    assert seen.models["m"].work_s_a_node == pytest.approx(seen.work_s / 2)
    assert (seen.nodes, seen.devices, seen.unmeasured, seen.incomplete) == (2, 2, 0, "")


def test_a_request_arrives_once_however_often_it_is_reported() -> None:
    h = Seen()
    h.report("node-0", here=("a", "b"), now=1.0)
    h.report("node-0", here=("a", "b"), now=2.0)
    h.report("node-0", here=("b",), ended=("a", "short"), now=3.0)
    each = h.fleet.request_s_of("m")
    assert h.fleet.arrived.sums(3.0)["m"] == pytest.approx(3 * each, rel=0.3), (
        "their typical work was still being learnt"
    )
    assert h.look(3.0).arriving > 0 and h.look(120.0).arriving == 0


def test_arrivals_count_a_second_over_the_window_or_the_time_since_the_start() -> None:
    recent = Recent[str](60.0, 5.0)
    recent.add("m", 10.0, 100.0)
    assert recent.rates(110.0) == {"m": 1.0}
    assert recent.rates(155.0) == {"m": pytest.approx(10 / 55)}
    recent.add("m", 6.0, 158.0)
    assert recent.rates(170.0) == {"m": pytest.approx(6 / 60)}


def test_a_node_without_a_profile_is_named_and_its_work_counts_as_typical() -> None:
    h = Seen(1)
    h.report("node-0", LoadReport(), here=("a",))
    seen = h.look()
    assert seen.unmeasured == 1 and seen.models["m"].arriving > 0


def test_work_of_an_unknown_model_counts_for_the_fleet() -> None:
    h = Seen(1)
    other = replace(MODEL, name="n")
    h.fleet.worker_joined("node-0", "w0", (MODEL, other), 0.0)
    h.fleet.placed("node-0", "known", 0.0, model="n")
    h.report("node-0", here=("known", "unknown"))
    seen = h.look()
    assert set(seen.models) == {"m", "n"} and seen.models["n"].arriving > 0 and seen.models["m"].arriving == 0
    assert seen.arriving == pytest.approx(2 * seen.models["n"].arriving)


def test_an_empty_fleet_has_no_signals() -> None:
    seen = signals(Seen(0).fleet, Seen(0).directory, Attained(), 0.0, 0.0)
    assert seen == Signals() and (seen.hbm_needed, seen.dram_needed) == (0.0, 0.0)


def test_a_silent_node_is_no_capacity_its_work_counts_and_nothing_should_be_done() -> None:
    h = Seen()
    for node in ("node-0", "node-1"):
        h.report(node)
    h.report("node-1", now=10.0)
    seen = h.look(10.0)
    assert (seen.nodes, seen.work_s) == (1, 6.0) and seen.incomplete == "no report from node-0"
    h.report("node-1", now=DEAD_AFTER_S + 1.0)
    h.tick(DEAD_AFTER_S + 1.0)
    seen = h.look(DEAD_AFTER_S + 1.0)
    assert (seen.nodes, seen.work_s, seen.incomplete) == (1, 3.0, ""), "it is dead, and its requests are lost"


def test_a_scheduler_that_has_just_started_says_so() -> None:
    assert Seen().look(gathering=True).incomplete == "the scheduler has just started"


def test_draining_and_absent_nodes_are_no_capacity_and_starting_ones_are_coming() -> None:
    h = Seen(4)
    h.fleet.drain("node-1")
    h.worker_left("node-2", 0.0)
    h.fleet.store_joined("node-9", "s9")
    seen = h.look()
    assert (seen.nodes, seen.starting_nodes) == (2, 1)


def test_hbm_is_what_running_requests_hold() -> None:
    h = Seen()
    h.report("node-0")
    h.report("node-1", replace(BUSY, hbm_pages_free=25))
    seen = h.look()
    assert seen.hbm == pytest.approx(1.0) and seen.hbm_needed == pytest.approx(0.5)


def test_models_that_share_a_device_share_its_memory() -> None:
    h = Seen(1)
    other = replace(MODEL, name="n")
    h.fleet.worker_joined("node-0", "w0", (MODEL, other), 0.0, device_bytes=1000)
    loads = {
        "m": ModelLoad(kv_bytes_used=100, kv_bytes_cached=50, kv_bytes_limit=900),
        "n": ModelLoad(kv_bytes_used=50, kv_bytes_limit=900),
    }
    h.report("node-0", LoadReport(models=loads, device_bytes_free=100))
    assert h.look().hbm == pytest.approx(150 / 300)


def test_sessions_that_may_come_back_need_dram_until_they_were_away_for_long() -> None:
    h = Seen()
    h.hold("node-0", 960)
    h.hold("node-1", 480, SessionKey("t", "other"))
    size = 960 * TOKEN_BYTES
    seen = h.look(wall=1.0)
    assert seen.resumable_bytes == 2 * size, "what a node does not hold of a session will be needed too"
    assert seen.dram_needed == pytest.approx(2 * size / 2000)
    assert h.look(wall=RESUMABLE_S + 60.0).resumable_bytes == 0
    h.directory.report("node-0", SessionKey("t", "s"), "m", 960, 500.0, Held(960, size, 0))
    assert h.look(wall=RESUMABLE_S + 60.0).resumable_bytes == size
    h.directory.erase(SessionKey("t", "s"))
    assert h.look(wall=RESUMABLE_S + 60.0).resumable_bytes == 0
    h.directory.validate()


def test_a_time_of_use_that_is_none_counts_nowhere() -> None:
    h = Seen()
    h.directory.report("node-0", SessionKey("t", "s"), "m", 960, float("inf"), Held(960, 5, 0))
    assert h.look().resumable_bytes == 0
    h.directory.validate()


def test_attainment_weighs_models_by_their_answers_and_forgets() -> None:
    h = Seen()
    assert h.look().attainment is None
    h.attained.add("m", TTFT, 90, 90, 0.0)
    h.attained.add("n", TTFT, 10, 0, 0.0)
    h.attained.add("m", TPOT, 10, 10, 0.0)
    seen = h.look(10.0)
    assert (seen.attainment, seen.turns) == (0.9, 100)
    assert seen.models["n"].attainment == {TTFT: 0.0} and seen.models["m"].turns == {TTFT: 90, TPOT: 10}
    assert h.look(400.0).attainment is None


@pytest.mark.parametrize(
    ("target", "turns", "kept", "model"),
    [("ttft", 1, 2, "m"), ("e2e", 1, 1, "m"), ("ttft", 4_000_000, 1, "m"), ("ttft", 1, 1, "")],
)
def test_a_report_of_answers_that_makes_no_sense_is_not_counted(target: str, turns: int, kept: int, model: str) -> None:
    attained = Attained()
    assert not attained.add(model, target, turns, kept, 0.0) and attained.counts(0.0) == {}


def test_names_of_models_are_not_kept_without_end() -> None:
    attained = Attained()
    assert sum(attained.add(f"m{n}", TTFT, 1, 1, 0.0) for n in range(1100)) == 1000
