"""Pieces over several links: each is written once, in layer order, and all links end together, whatever they do."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker.core.link_plan import LinkPaces, LinkPlan

_LANES = 2


@dataclass
class Load:
    """A load in virtual time: `speeds` of links in bytes per second, by which their lanes share; `fails`: links that
    fail when they have staged so many pieces; `stalls`: likewise, but they say nothing for a long time; `held_up`:
    which pieces of a link take ten times as long."""

    sizes: list[int]
    speeds: list[float]
    fails: dict[int, int] = field(default_factory=dict)
    stalls: dict[int, int] = field(default_factory=dict)
    held_up: dict[int, set[int]] = field(default_factory=dict)
    paces: LinkPaces | None = None
    now: float = 0.0
    order: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def run(self) -> LinkPlan:
        lanes = [link for link in range(len(self.speeds)) for _ in range(_LANES)]
        self.paces = self.paces or LinkPaces(len(self.speeds))
        plan, free = LinkPlan(self.sizes, lanes, self.paces), set(range(len(lanes)))
        ends, staged, writes = dict[int, float](), [0] * len(self.speeds), dict[int, int]()
        while not plan.over:
            for lane in sorted(free, key=lambda each: -self.speeds[lanes[each]]):
                if (piece := plan.take(lane, self.now)) is not None:
                    link = lanes[lane]
                    staged[link] += 1
                    stalled = staged[link] > self.stalls.get(link, 1 << 30)
                    takes_s = self.sizes[piece] * _LANES / self.speeds[link]
                    takes_s *= 10 if staged[link] in self.held_up.get(link, ()) else 1
                    ends[lane] = self.now + (1e4 if stalled else takes_s)
                    free.discard(lane)
                    self.taken.append(piece)
            plan.validate()
            if not ends:
                raise AssertionError("nobody brings what is left")
            lane = min(ends, key=lambda each: ends[each])
            if ends[lane] > self.now + 0.01 and free:
                self.now += 0.01  # who is free asks again
                continue
            self.now = max(self.now, ends.pop(lane))
            if staged[lanes[lane]] > self.fails.get(lanes[lane], 1 << 30):
                plan.failed(lane)
            elif lanes[lane] == 0 or plan.claim(lane, self.now):
                piece = plan.done(lane, self.now)
                writes[piece] = writes.get(piece, 0) + 1
                self.order.append(piece)
            if not plan.out(lane):
                free.add(lane)
        assert writes == dict.fromkeys(range(len(self.sizes)), 1)
        return plan


def learned(speeds: list[float]) -> LinkPaces:
    paces = LinkPaces(len(speeds))
    for link, speed in enumerate(speeds * 3):
        paces.note(link % len(speeds), 1, _LANES / speed)
    return paces


def test_one_link_brings_everything_in_order() -> None:
    load = Load([30] * 20, [100.0])
    assert load.run().carried == [600] and load.taken == list(range(20))
    assert load.now == pytest.approx(6.0)


@pytest.mark.parametrize("links", [2, 4, 8])
def test_equal_links_share_evenly_and_in_order(links: int) -> None:
    load = Load([30] * 16 * links, [100.0] * links)
    plan = load.run()
    assert plan.carried == [30 * 16] * links and load.taken == list(range(16 * links))
    assert load.now == pytest.approx(30 * 16 / 100)


@settings(deadline=None)
@given(st.lists(st.floats(20, 400), min_size=1, max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=120))
def test_links_of_known_pace_end_together(speeds: list[float], sizes: list[int]) -> None:
    load = Load(sizes, speeds, paces=learned(speeds))
    load.run()
    # The last piece ends no later than on any other lane behind what that lane brings already.
    others = _LANES * len(speeds) - 1
    assert load.now <= (sum(sizes) + others * max(sizes)) / sum(speeds) + 0.03


@settings(deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_slow_link_does_not_delay_the_next_layers(seed: int) -> None:
    speeds = [100.0, random.Random(seed).uniform(5, 100)]
    load = Load([30] * 80, speeds, paces=learned(speeds))
    load.run()
    times_slower = 100 / speeds[1]
    for place, piece in enumerate(load.order):
        assert abs(place - piece) <= 2 * _LANES * (1 + times_slower), "a piece came long before or after its turn"
    ahead = [piece - place for place, piece in enumerate(load.taken)]
    assert speeds[1] > 50 or max(ahead) > 0, "the slow link takes pieces that are needed later"


@settings(deadline=None)
@given(
    st.integers(2, 5),
    st.dictionaries(st.integers(1, 4), st.integers(0, 5)),
    st.dictionaries(st.integers(1, 4), st.integers(0, 5)),
)
def test_links_that_fail_or_stall_leave_their_pieces_to_others(
    links: int, fails: dict[int, int], stalls: dict[int, int]
) -> None:
    load = Load([30] * 60, [100.0] * links, fails, stalls)
    load.run()
    assert load.now <= 60 * 30 / 100 * 2.2, "as fast as the device's own link, and the time to notice"


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_a_link_that_stalls_with_the_first_pieces_of_all_keeps_none_of_them(pieces: int) -> None:
    load = Load([30] * pieces, [100.0, 200.0], stalls={1: 0})
    assert load.run().carried == [30 * pieces, 0] and load.now < 10


@pytest.mark.parametrize("held_up", [{1, 2}, {9}, {9, 10}])
def test_a_link_that_was_held_up_now_and_then_is_used_on(held_up: set[int]) -> None:
    carried = Load([30] * 120, [100.0, 100.0], held_up={1: held_up}).run().carried
    assert carried[1] > 0.35 * sum(carried)


def test_a_link_that_carried_nothing_is_tried_again_in_the_next_load() -> None:
    paces = LinkPaces(2)
    assert Load([30] * 20, [100.0, 100.0], fails={1: 0}, paces=paces).run().carried == [600, 0]
    assert min(Load([30] * 20, [100.0, 100.0], paces=paces).run().carried) > 0


class Machine(RuleBasedStateMachine):
    """Lanes that do anything at any time."""

    lanes = Bundle("lanes")

    @initialize(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), links=st.lists(st.integers(1, 3), max_size=6)
    )
    def begin(self, sizes: list[int], links: list[int]) -> None:
        self.links = [0, 0, *links]
        self.plan = LinkPlan(sizes, self.links, LinkPaces(4))
        self.holds = dict[int, int]()  # by lane: what it brings
        self.claimed, self.written = set[int](), list[int]()
        self.count, self.now = len(sizes), 0.0

    @rule(lane=st.integers(0, 7), waits=st.floats(0, 20))
    def take(self, lane: int, waits: float) -> None:
        lane, self.now = lane % len(self.links), self.now + waits
        if lane not in self.holds and (piece := self.plan.take(lane, self.now)) is not None:
            assert not self.plan.out(lane)
            self.holds[lane] = piece

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 7), waits=st.floats(0, 2), ends=st.sampled_from(["well", "well", "failed"]))
    def go_on(self, which: int, waits: float, ends: str) -> None:
        lane, self.now = sorted(self.holds)[which % len(self.holds)], self.now + waits
        if ends == "failed" and self.links[lane]:
            self.plan.failed(lane)
            self.holds.pop(lane)
            self.claimed.discard(lane)
        elif self.links[lane] == 0 or lane in self.claimed:
            assert self.plan.writing
            self.written.append(self.plan.done(lane, self.now))
            assert self.written[-1] == self.holds.pop(lane)
            self.claimed.discard(lane)
        elif self.plan.claim(lane, self.now):
            self.claimed.add(lane)
            writing = [n for each, n in self.holds.items() if each in self.claimed or not self.links[each]]
            assert len(set(writing)) == len(writing), "two lanes write one piece"
        else:
            self.holds.pop(lane)

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "plan"):
            self.plan.validate()
            assert len(set(self.written)) == len(self.written), "a piece is written twice"
            assert self.plan.over == (len(self.written) == self.count)

    def teardown(self) -> None:
        """The device's own link brings the rest, whatever the others did."""
        if not hasattr(self, "plan"):
            return
        for lane in [lane for lane in self.holds if self.links[lane]]:
            self.plan.failed(lane)
        for _ in range(10_000):
            if self.plan.over:
                assert sorted(self.written) == list(range(self.count))
                return
            for lane in (0, 1):
                self.now += 1
                if lane in self.holds or self.plan.take(lane, self.now) is not None:
                    self.holds.pop(lane, None)
                    self.written.append(self.plan.done(lane, self.now))
            for link in {*self.links} - {0}:
                self.plan.failed(self.links.index(link))
        raise AssertionError("pieces are left")


TestAnything = Machine.TestCase
