"""Ways, and the tiers and the device of other systems, each alone: small cases reckoned by hand, and rules that hold
whatever happens."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from loadtest.simulate.channels import Channel
from loadtest.simulate.events import Events
from loadtest.simulate.mean_load import MeanLoad
from loadtest.simulate.mechanisms import DRAM, HBM, PEER, Mechanisms
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.request import Request
from loadtest.simulate.stretch import Stretch
from loadtest.simulate.systems.engine import Engine
from loadtest.simulate.systems.node import OtherNode
from loadtest.simulate.systems.running import Running
from loadtest.simulate.systems.tiers import SessionTier

KIND = PRESETS["a100-llama-3.1-8b"]
FOREVER = lambda: False  # noqa: E731


def key(name: str) -> SessionKey:
    return SessionKey("t", name)


# ---- events and ways --------------------------------------------------------------------------------------------
def test_what_is_due_together_is_done_in_the_order_of_asking() -> None:
    events, seen = Events(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        events.at(at, lambda name=name: seen.append((name, events.now)))
    events.run(FOREVER)
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_what_a_request_waits_for_interrupts_what_a_hint_wants() -> None:
    events, seen = Events(), {}
    way = Channel(events, bytes_per_s=100.0)
    way.send(200, (1, 0), lambda: seen.setdefault("hint", events.now))
    events.at(1.0, lambda: way.send(50, (0, 0), lambda: seen.setdefault("turn", events.now)))
    events.run(FOREVER)
    assert seen == {"turn": pytest.approx(1.5), "hint": pytest.approx(2.5)}


def test_a_cancelled_job_never_ends_and_the_next_begins_at_once() -> None:
    events, seen = Events(), {}
    way = Channel(events, bytes_per_s=100.0)
    jobs = [way.send(100, (1, n), lambda n=n: seen.setdefault(n, events.now)) for n in range(4)]
    for at, n in ((0.5, 3), (1.5, 1)):
        events.at(at, lambda n=n: way.cancel(jobs[n]))
    events.run(FOREVER)
    assert seen == {0: pytest.approx(1.0), 2: pytest.approx(2.5)}


def test_load_over_time_is_a_mean_of_what_was_there() -> None:
    events = Events()
    load = MeanLoad(events)
    for at, requests in ((1.0, 4), (3.0, 1)):
        events.at(at, lambda requests=requests: load.changed(requests))
    events.at(10.0, lambda: None)
    events.run(FOREVER)
    assert load.take(10.0) == pytest.approx((4 * 2 + 1 * 7) / 10) and load.take(10.0) == 0.0


def test_steps_that_are_passed_over_or_cut_off_take_what_each_takes() -> None:
    stretch = Stretch(2.0, 10, first_s=0.1, growth_s=0.01)
    assert stretch.over(-9.0) == 0, "a timer may be long overdue"
    each = [0.1 + 0.01 * n for n in range(10)]
    assert stretch.end_s == pytest.approx(2.0 + sum(each))
    assert [stretch.over(2.0 + sum(each[:n]) + 0.001) for n in range(10)] == list(range(10))
    stretch.pass_over(3)
    assert (stretch.count, stretch.start_s, stretch.first_s) == (
        7,
        pytest.approx(2.0 + sum(each[:3])),
        pytest.approx(each[3]),
    )
    assert stretch.cut(2.0 + sum(each[:5]) + 0.05) and stretch.end_s == pytest.approx(2.0 + sum(each[:6]))
    assert not stretch.cut(2.0 + sum(each[:6]) - 0.001), "it ends there anyway"


# ---- tiers ------------------------------------------------------------------------------------------------------
def test_the_least_recently_used_go_first_and_whole_and_running_requests_go_before_all() -> None:
    left: list[str] = []
    tier = SessionTier(100, lambda session: left.append(session.session_id))
    for name in ("a", "b", "c"):
        assert tier.put(key(name), 30)
    tier.touch(key("a"))
    assert tier.put(key("d"), 30) and left == ["b"]
    assert tier.reserve(60) and left == ["b", "c", "a"] and not tier.reserve(50)
    assert not tier.put(key("e"), 50), "what runs does not give way"
    tier.release(60)
    tier.validate()


DEEDS = ["put", "touch", "take", "reserve"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 70), st.sampled_from(DEEDS)), max_size=60))
def test_a_tier_never_holds_more_than_it_can(steps: list[tuple[int, int, str]]) -> None:
    tier, reserved = SessionTier(100.0), []
    for name, size, what in steps:
        if what == "take":
            tier.take(key(str(name)))
        elif what == "touch":
            tier.touch(key(str(name)))
        elif what == "reserve":
            if tier.reserve(size):
                reserved.append(size)
            elif reserved:
                tier.release(reserved.pop())
        else:
            tier.put(key(str(name)), size)
        tier.validate()


# ---- the device -------------------------------------------------------------------------------------------------
def request(name: str, prompt: int, answer: int, *, history: int = 0, priority: int = 0, session: str = "") -> Request:
    return Request(name, key(session or name), 0, prompt, history, answer, 0.0, lambda r: None, priority=priority)


def running(engine: Engine, r: Request, arrival: int) -> Running:
    return Running(r, arrival, 0.0, engine.steps, 10_000, 0.0)


def test_one_request_takes_its_prefill_and_a_step_a_token() -> None:
    events, ends = Events(), {}
    engine = Engine(
        events, KIND, lambda s: ends.setdefault("first", events.now), lambda s: ends.setdefault("end", events.now)
    )
    engine.join(running(engine, request("a", 500, 11), 1))
    events.run(FOREVER)
    first = KIND.costs.prefill_s(500, 0)
    steps = sum(KIND.costs.decode(1, 501 + n)[0] for n in range(10))
    assert ends == {"first": pytest.approx(first), "end": pytest.approx(first + steps)}


def test_a_stretch_that_is_cut_is_worth_what_its_steps_are_worth() -> None:
    """Two that decode, of which one joins in the middle of the other's stretch, against every step reckoned by
    itself."""
    events, ends = Events(), {}
    engine = Engine(events, KIND, lambda s: None, lambda s: ends.setdefault(s.request.request_id, events.now))
    engine.join(running(engine, request("a", 500, 40), 1))
    events.at(0.2, lambda: engine.join(running(engine, request("b", 300, 5), 2)))
    events.at(0.25, engine.catch_up)
    events.run(FOREVER)
    now, a, b, joined = KIND.costs.prefill_s(500, 0), 1, 0, False
    expected = {}
    while a < 40 or b < 5:
        if now >= 0.2 and not joined:
            now += KIND.costs.mixed_s(1, 500 + a, [(300, 0)])
            a, b, joined = a + 1, 1, True
            continue
        live = [500 + a] * (a < 40) + [300 + b] * (joined and b < 5)
        now += KIND.costs.decode(len(live), sum(live))[0]
        if joined and b < 5:
            b += 1
            if b == 5:
                expected["b"] = pytest.approx(now)
        if a < 40:
            a += 1
            if a == 40:
                expected["a"] = pytest.approx(now)
    assert ends == expected
    engine.validate()


def test_a_long_prompt_is_computed_in_pieces_and_a_more_urgent_one_first() -> None:
    events, first = Events(), {}
    engine = Engine(
        events,
        replace(KIND, step_tokens=512),
        lambda s: first.setdefault(s.request.request_id, events.now),
        lambda s: None,
    )
    engine.join(running(engine, request("long", 4096, 1), 1))
    events.at(0.01, lambda: engine.join(running(engine, request("urgent", 512, 1, priority=-1), 2)))
    events.run(FOREVER)
    one = KIND.costs.prefill_s(512, 0)
    assert first["urgent"] == pytest.approx(2 * one), "the step under way ends, then the urgent one has all of the next"
    assert first["long"] > 8 * one


# ---- a node -----------------------------------------------------------------------------------------------------
HOST = Mechanisms(frozenset((HBM, DRAM, PEER)))


def fleet(events: Events, count: int = 2, **changes: float) -> list[OtherNode]:
    peers: dict[str, OtherNode] = {}
    for n in range(count):
        peers[f"node-{n}"] = OtherNode(
            f"node-{n}", replace(KIND, **changes), events, peers, ended=lambda r: None, has=HOST
        )
    return list(peers.values())


def served(events: Events, node: OtherNode, r: Request, sources: tuple[str, ...] = ()) -> Request:
    r.sent_s = events.now
    node.submit(r, sources)
    events.run(lambda: r.end_s >= 0)
    node.validate()
    return r


def test_a_returning_turn_begins_when_all_of_its_cache_is_there() -> None:
    events = Events()
    here, there = fleet(events)
    first = served(events, here, request("r1", 6000, 400, session="s"))
    assert first.cached_tokens == 0 and here.tokens_in(here.dram, key("s")) == 6400
    at_home = served(events, here, request("r2", 6500, 2, history=6400, session="s"))
    compute_s = KIND.costs.prefill_s(100, 6400)
    assert at_home.cached_tokens == 6400 and at_home.first_s - at_home.sent_s == pytest.approx(compute_s)
    away = served(events, there, request("r3", 6500, 2, history=6400, session="s"), ("node-0",))
    bytes_ = 6400 * KIND.shape.token_bytes
    assert away.cached_tokens == 6400
    # Into HBM it comes beside what is still on the link: a sum of each way's seconds, whichever takes longer.
    load_s = max(bytes_ / KIND.link_bytes_per_s, bytes_ / KIND.dram_bytes_per_s)
    assert away.first_s - away.sent_s == pytest.approx(load_s + compute_s, rel=0.02)


def test_a_turn_that_takes_less_of_hbm_is_admitted_before_a_larger_one_that_came_sooner() -> None:
    events = Events()
    (node,) = fleet(events, 1, hbm_bytes=2000.0 * KIND.shape.token_bytes)
    first, large, small = request("a", 1700, 200), request("b", 1500, 200), request("c", 200, 200)
    for r in (first, large, small):
        node.submit(r, ())
    events.run(lambda: large.end_s >= 0 and small.end_s >= 0)
    assert first.end_s < small.first_s < large.first_s


def test_a_request_that_can_never_fit_is_refused_and_one_that_does_not_yet_waits() -> None:
    events = Events()
    (node,) = fleet(events, 1, hbm_bytes=1000.0 * KIND.shape.token_bytes)
    with pytest.raises(ValueError, match="1200 tokens does not fit"):
        node.submit(request("r0", 1000, 200), ())
    a, b = request("a", 500, 100), request("b", 500, 100)
    node.submit(a, ())
    node.submit(b, ())
    events.run(lambda: b.end_s >= 0)
    assert b.first_s > a.end_s
    node.validate()
