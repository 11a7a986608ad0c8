"""Every term in seconds, by hand; and what a term must do when something is added to a node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape
from scheduler.core import snapshot, terms
from scheduler.core.advisories import Pending
from scheduler.core.columns import urgency_class
from scheduler.core.control import Control
from scheduler.core.directory import Held
from scheduler.core.fleet import LoadReport, Model, Rates
from scheduler.core.snapshot import PlacementRequest, Snapshot
from tests.scheduler.test_core import hint

#: A chunk of 10 tokens is 2,000 bytes in 2 pieces.
MODEL = Model("m", KvShape.of_heads(b"f" * 32, 2, 1, 25, 10, "float16"), 1000, 0)
RATES = Rates(link_bytes_per_s=100.0, ssd_bytes_per_s=500.0, blob_bytes_per_s=10.0)
S = SessionKey("t", "s")


class Nodes(Control):
    """Three serving nodes at time 0; a session of 100 tokens: 20,000 bytes, 20 pages."""

    def __init__(self, rates: Rates = RATES) -> None:
        super().__init__()
        for i in range(3):
            self.fleet.worker_joined(f"node-{i}", f"w{i}", (MODEL,), 0.0, rates)
            self.fleet.store_joined(f"node-{i}", f"s{i}")

    def holds(self, node: int, tokens: int, in_dram: int) -> None:
        size = tokens * MODEL.shape.chunk_bytes // 10
        self.directory.report(f"node-{node}", S, "m", 100, 1.0, Held(tokens, size, in_dram))

    def see(self) -> Snapshot:
        return snapshot.take(self.fleet, self.directory.get(S), "m", 0.0)


ROWS = np.arange(3)


def seconds(found: Any) -> list[float]:
    return [round(value, 9) for value in found.tolist()]


def test_work_counts_what_is_as_urgent_in_full_and_what_gives_way_a_little() -> None:
    h = Nodes()
    h.fleet.loaded("node-0", LoadReport(by_priority={-1: 2.0, 0: 3.0, 5: 10.0}), [], [], 0.0)
    for priority, felt in ((-1, 2.0 + 0.1 * 13.0), (0, 5.0 + 0.1 * 10.0), (5, 15.0), (-7, 0.1 * 15.0)):
        turn = PlacementRequest("m", urgency=urgency_class(priority))
        assert seconds(terms.work_s(h.see(), turn, ROWS)) == pytest.approx([felt, 0.0, 0.0])


def test_a_placement_that_no_report_has_seen_counts_as_a_typical_request() -> None:
    h = Nodes()
    h.fleet.request_s = 0.5
    h.fleet.placed("node-1", "r1", 0.0)
    h.fleet.placed("node-1", "r2", 0.0, priority=3)
    assert seconds(terms.work_s(h.see(), PlacementRequest("m"), ROWS)) == pytest.approx([0.0, 0.5 + 0.1 * 0.5, 0.0])
    assert seconds(terms.work_s(h.see(), PlacementRequest("m", urgency=urgency_class(3)), ROWS)) == pytest.approx(
        [0.0, 1.0, 0.0]
    )


def test_arrivals_count_with_their_chance_and_less_urgent_ones_a_little() -> None:
    h = Nodes()
    h.fleet.request_s = 2.0
    h.advisories.place(Pending(hint(SessionKey("t", "a")), "node-0", 0.0, chance=0.75))
    h.advisories.place(Pending(hint(SessionKey("t", "b"), "a2", priority=4), "node-0", 0.0, chance=0.5))
    h.advisories.place(Pending(hint(SessionKey("t", "c"), "a3", priority=-4), "node-2", 0.0, chance=0.5))
    assert seconds(terms.arrivals_s(h.see(), PlacementRequest("m", advised=True), ROWS)) == pytest.approx(
        [1.5 + 0.1 * 1.0, 0.0, 1.0]
    )
    assert seconds(terms.arrivals_s(h.see(), PlacementRequest("m"), ROWS)) == [0.0] * 3, (
        "hardly one comes while it runs"
    )


def test_a_cache_comes_from_dram_ssd_a_peer_or_the_blob_tier_each_at_its_pace() -> None:
    h, chunk = Nodes(), MODEL.shape.chunk_bytes
    h.directory.report("node-0", S, "m", 100, 1.0, Held(0, 0))
    assert seconds(terms.bring_s(h.see())) == pytest.approx([0.0] * 3), "nothing is known of it"
    h.holds(0, 80, in_dram=60)
    size = {tokens: tokens * chunk / 10 for tokens in (20, 60, 80)}
    # Node 0 reads 20 tokens from its SSD and 20 from the blob tier; the others read 80 over the link and 20 from the
    # blob tier.
    others = size[80] / 100 + size[20] / 10
    assert seconds(terms.bring_s(h.see())) == pytest.approx([size[20] / 500 + size[20] / 10, others, others])
    h.holds(2, 60, in_dram=60)
    assert seconds(terms.bring_s(h.see())) == pytest.approx(
        [size[20] / 500 + size[20] / 10, others, size[20] / 100 + size[20] / 10]
    )


def test_a_link_slower_than_the_blob_tier_is_not_used() -> None:
    h = Nodes(Rates(link_bytes_per_s=1.0, ssd_bytes_per_s=500.0, blob_bytes_per_s=1000.0))
    h.holds(0, 100, in_dram=100)
    there = 10 * MODEL.shape.chunk_bytes / 1000
    assert seconds(terms.bring_s(h.see())) == pytest.approx([0.0, there, there])


def test_a_load_never_counts_for_more_than_computing_it_again() -> None:
    h = Nodes()
    h.holds(0, 100, in_dram=100)
    h.fleet.loaded("node-1", LoadReport(prefill_token_s=0.01), [], [], 0.0)
    there = 10 * MODEL.shape.chunk_bytes / 100
    assert there > 1.0
    assert seconds(terms.bring_s(h.see())) == pytest.approx([0.0, 1.0, there])


def test_a_hint_hides_a_load_as_far_as_it_leaves_time_for_it() -> None:
    h = Nodes()
    h.holds(0, 100, in_dram=100)
    there = 10 * MODEL.shape.chunk_bytes / 100
    for lead_s, left_s in ((1e9, 0.0), (there - 5.0, 5.0), (0.0, there)):
        turn = PlacementRequest("m", advised=True, lead_s=lead_s)
        assert seconds(terms.load_s(h.see(), turn, ROWS)) == pytest.approx(
            [0.0] + 2 * [there * terms.HIDDEN + terms.MOVING * left_s]
        )


def test_after_a_hint_only_what_time_has_left_over_is_felt_and_only_there() -> None:
    h = Nodes()
    h.holds(0, 100, in_dram=100)
    there = 10 * MODEL.shape.chunk_bytes / 100
    for ago_s, left_s in ((0.0, there), (there - 1.0, 1.0), (there + 9.0, 0.0)):
        turn = PlacementRequest("m", prefetched="node-1", prefetched_s=ago_s)
        assert seconds(terms.load_s(h.see(), turn, ROWS)) == pytest.approx(
            [0.0, terms.MOVING * left_s, terms.MOVING * there]
        )


def test_a_session_leaves_its_cache_for_four_requests_less_by_the_share_that_is_missing() -> None:
    h = Nodes()
    h.fleet.request_s = 0.5
    assert seconds(terms.leaving_s(h.see(), PlacementRequest("m"), ROWS)) == [0.0, 0.0, 0.0], "nothing is cached"
    h.holds(0, 100, in_dram=100)
    h.holds(1, 25, in_dram=25)
    assert seconds(terms.leaving_s(h.see(), PlacementRequest("m", advised=True), ROWS)) == pytest.approx(
        [0.0, 1.5, 2.0]
    )
    assert seconds(terms.leaving_s(h.see(), PlacementRequest("m"), ROWS)) == pytest.approx([0.0, 6.0, 8.0]), (
        "nobody announced it: for sixteen"
    )
    assert seconds(terms.leaving_s(h.see(), PlacementRequest("m", prefetched="node-2"), ROWS)) == pytest.approx(
        [0.0, 1.5, 0.0]
    )
    h.fleet.loaded("node-0", LoadReport(outstanding_s=20.0), [], [], 0.0)
    assert seconds(terms.leaving_s(h.see(), PlacementRequest("m"), ROWS)) == pytest.approx([0.0, 0.75 * 10.0, 10.0]), (
        "half of what is to do there"
    )
    assert seconds(terms.leaving_s(h.see(), PlacementRequest("m"), ROWS[1:])) == pytest.approx([6.0, 8.0]), (
        "of those that can be had"
    )


def test_work_that_is_done_when_the_request_of_a_hint_comes_counts_among_equals_only() -> None:
    h = Nodes()
    for node, outstanding_s in ((0, 8.0), (1, 2.0)):
        h.fleet.loaded(f"node-{node}", LoadReport(outstanding_s=outstanding_s), [], [], 0.0)
    assert seconds(terms.work_s(h.see(), PlacementRequest("m"), ROWS)) == pytest.approx([8.0, 2.0, 0.0])
    unknown = [8.0 - terms.LEAD_S + 8.0 * terms.HIDDEN, 2.0 * terms.HIDDEN, 0.0]
    assert seconds(terms.work_s(h.see(), PlacementRequest("m", advised=True), ROWS)) == pytest.approx(unknown)
    soon = [7.0 + 8.0 * terms.HIDDEN, 1.0 + 2.0 * terms.HIDDEN, 0.0]
    assert seconds(terms.work_s(h.see(), PlacementRequest("m", advised=True, lead_s=1.0), ROWS)) == pytest.approx(soon)


def test_what_a_peer_has_on_its_ssd_only_comes_as_fast_as_that() -> None:
    h = Nodes()
    h.holds(0, 100, in_dram=0)
    size = 10 * MODEL.shape.chunk_bytes
    view = h.see()
    from_ssd, on_link = size / view.ssd_bytes_per_s[0], size / view.link_bytes_per_s[1]
    assert seconds(terms.bring_s(view)) == pytest.approx([from_ssd] + 2 * [max(from_ssd, on_link)])


def test_pressure_is_the_share_of_pages_that_are_lacking() -> None:
    h = Nodes()
    h.fleet.request_s = 4.0
    h.holds(0, 100, in_dram=100)  # 20 pages
    for node, free in ((0, 5), (1, 20)):
        h.fleet.loaded(f"node-{node}", LoadReport(hbm_pages_total=40, hbm_pages_free=free), [], [], 0.0)
    assert seconds(terms.pressure_s(h.see(), PlacementRequest("m"), ROWS)) == pytest.approx([0.75 * 4.0, 0.0, 0.0]), (
        "nothing is known of node-2"
    )


def test_a_session_of_another_model_has_nothing_to_load() -> None:
    h = Nodes()
    h.directory.report("node-0", S, "other", 100, 1.0, Held(100, 1, 100))
    assert seconds(terms.pressure_s(h.see(), PlacementRequest("m"), ROWS)) == pytest.approx(
        seconds(terms.bring_s(h.see())) == [0.0] * 3 and [0.0] * 3
    )
