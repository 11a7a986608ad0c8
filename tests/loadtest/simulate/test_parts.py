"""Ways, tiers and the device, each alone: small cases reckoned by hand, and rules that hold whatever happens."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from loadtest.simulate.channels import Channel
from loadtest.simulate.engine import Engine
from loadtest.simulate.events import Events
from loadtest.simulate.node import Node
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.sequences import Request, Running
from loadtest.simulate.tiers import DOUBTED, PLAIN, Tier, advised

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


def test_what_is_hidden_under_compute_is_not_waited_for_but_takes_its_time() -> None:
    events, seen = Events(), {}
    way = Channel(events, bytes_per_s=100.0)
    way.send(200, (0, 0), lambda: seen.setdefault("first", events.now), hidden_s=1.5)
    way.send(100, (1, 0), lambda: seen.setdefault("second", events.now))
    events.run(FOREVER)
    assert seen == {"first": pytest.approx(0.5), "second": pytest.approx(3.0)}


def test_a_promoted_job_passes_and_a_cancelled_one_never_ends() -> None:
    events, seen = Events(), {}
    way = Channel(events, bytes_per_s=100.0)
    jobs = [way.send(100, (1, n), lambda n=n: seen.setdefault(n, events.now)) for n in range(4)]
    events.at(0.5, lambda: way.promote(jobs[2], (0, 0), 0.0))
    events.at(0.5, lambda: way.cancel(jobs[3]))
    assert way.ahead_s((1, 2)) == pytest.approx(3.0)
    events.run(FOREVER)
    assert seen == {2: pytest.approx(1.5), 0: pytest.approx(2.0), 1: pytest.approx(3.0)}


# ---- tiers ------------------------------------------------------------------------------------------------------
def test_victims_are_the_doubted_then_the_unadvised_then_the_least_urgent_advised() -> None:
    left: list[str] = []
    tier = Tier(100, lambda session: left.append(session.session_id))
    for name, rank in (("advised", advised(0)), ("plain", PLAIN), ("behind", advised(5)), ("doubted", DOUBTED), ("urgent", advised(-1))):
        assert tier.put(key(name), 20, rank)
    for n in range(5):
        assert tier.put(key(f"new{n}"), 20, advised(-9))
    assert left == ["doubted", "plain", "behind", "advised", "urgent"]


def test_a_hint_never_takes_the_place_of_a_better_one() -> None:
    tier = Tier(100)
    tier.put(key("urgent"), 100, advised(-1))
    assert not tier.put(key("behind"), 10, advised(100)) and tier.bytes_of(key("urgent")) == 100
    assert tier.reserve(60) and tier.bytes_of(key("urgent")) == 0 and not tier.reserve(50)
    tier.release(60)
    tier.validate()


DEEDS = ["plain", "advised", "doubt", "take", "reserve"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 70), st.sampled_from(DEEDS)), max_size=60))
def test_a_tier_never_holds_more_than_it_can(steps: list[tuple[int, int, str]]) -> None:
    tier, reserved = Tier(100.0), []
    for name, size, what in steps:
        if what == "take":
            tier.take(key(str(name)))
        elif what == "doubt":
            tier.touch(key(str(name)), DOUBTED)
        elif what == "reserve":
            if tier.reserve(size):
                reserved.append(size)
            elif reserved:
                tier.release(reserved.pop())
        else:
            tier.put(key(str(name)), size, PLAIN if what == "plain" else advised(name % 3))
        tier.validate()


# ---- the device -------------------------------------------------------------------------------------------------
def request(name: str, prompt: int, answer: int, *, history: int = 0, priority: int = 0, session: str = "") -> Request:
    return Request(name, key(session or name), 0, prompt, history, answer, 0.0, lambda r: None, priority=priority)


def running(engine: Engine, r: Request, arrival: int) -> Running:
    return Running(r, arrival, 0.0, engine.steps, 10_000, 0.0)


def test_one_request_takes_its_prefill_and_a_step_a_token() -> None:
    events, ends = Events(), {}
    engine = Engine(events, KIND, lambda s: ends.setdefault("first", events.now), lambda s: ends.setdefault("end", events.now))
    engine.join(running(engine, request("a", 500, 11), 1))
    events.run(FOREVER)
    first = KIND.costs.prefill_s(500, 0)
    steps = sum(KIND.costs.decode(1, 501 + n)[0] for n in range(10))
    assert ends == {"first": pytest.approx(first), "end": pytest.approx(first + steps)}


def test_a_stretch_that_is_cut_is_worth_what_its_steps_are_worth() -> None:
    """Two that decode, of which one joins in the middle of the other's stretch, against every step reckoned by itself."""
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
    engine = Engine(events, replace(KIND, step_tokens=512), lambda s: first.setdefault(s.request.request_id, events.now), lambda s: None)
    engine.join(running(engine, request("long", 4096, 1), 1))
    events.at(0.01, lambda: engine.join(running(engine, request("urgent", 512, 1, priority=-1), 2)))
    events.run(FOREVER)
    one = KIND.costs.prefill_s(512, 0)
    assert first["urgent"] == pytest.approx(2 * one), "the step under way ends, then the urgent one has all of the next"
    assert first["long"] > 8 * one


# ---- a node -----------------------------------------------------------------------------------------------------
def fleet(events: Events, count: int = 2, **changes: float) -> list[Node]:
    peers: dict[str, Node] = {}
    for n in range(count):
        peers[f"node-{n}"] = Node(f"node-{n}", replace(KIND, **changes), events, peers, ended=lambda r: None)
    return list(peers.values())


def served(events: Events, node: Node, r: Request, sources: tuple[str, ...] = ()) -> Request:
    r.sent_s = events.now
    node.submit(r, sources)
    events.run(lambda: r.end_s >= 0)
    node.validate()
    return r


def test_a_returning_turn_waits_for_what_compute_does_not_hide() -> None:
    events = Events()
    here, there = fleet(events)
    first = served(events, here, request("r1", 6000, 400, session="s"))
    assert first.cached_tokens == 0 and here.tokens_here(key("s")) == 6400
    at_home = served(events, here, request("r2", 6500, 2, history=6400, session="s"))
    compute_s = KIND.costs.prefill_s(100, 6400)
    assert at_home.cached_tokens == 6400 and at_home.first_s - at_home.sent_s == pytest.approx(compute_s)
    away = served(events, there, request("r3", 6500, 2, history=6400, session="s"), ("node-0",))
    load_s = 6400 * KIND.shape.token_bytes / KIND.link_bytes_per_s
    waited = away.first_s - away.sent_s
    assert away.cached_tokens == 6400
    assert waited == pytest.approx(load_s - compute_s * 31 / 32 + compute_s, rel=0.02)


def test_a_prefetched_turn_waits_for_nothing() -> None:
    events = Events()
    here, there = fleet(events)
    served(events, here, request("r1", 6000, 400, session="s"))
    there.prefetch(key("s"), 0, events.now + 60.0, 6400, ("node-0",))
    events.run(FOREVER, limit_s=events.now + 5.0)
    events.now += 5.0
    assert there.tokens_in(there.hbm, key("s")) == there.tokens_in(there.dram, key("s")) == 6400
    away = served(events, there, request("r2", 6500, 2, history=6400, session="s"))
    assert away.first_s - away.sent_s == pytest.approx(KIND.costs.prefill_s(100, 6400))


def test_a_hint_that_is_repeated_lasts_as_long_as_the_later_one() -> None:
    events = Events()
    (node,) = fleet(events, 1)
    for name in ("s", "other"):
        served(events, node, request(name, 3000, 200, session=name))
    start_s = events.now
    for seconds in (60.0, 100.0):
        node.prefetch(key("s"), 0, start_s + seconds, 3200, ())

    def first_victim() -> str:
        left: list[SessionKey] = []
        node.dram._left = left.append
        room = node.dram.capacity_bytes - node.dram.cached_bytes
        assert node.dram.put(key("big"), room + 1.0)
        node.dram.take(key("big"))
        return left[0].session_id

    events.run(FOREVER, limit_s=start_s + 70.0)
    node.dram.put(key("another"), 1e6)
    assert first_victim() == "other", "the hint still holds"
    events.run(FOREVER, limit_s=start_s + 110.0)
    assert first_victim() == "s", "it is over, and what it held goes first"


def test_a_withdrawn_hint_stops_its_load_and_a_cache_that_is_sooner_computed_is_computed() -> None:
    events = Events()
    here, there = fleet(events, link_bytes_per_s=1e6)
    served(events, here, request("r1", 6000, 400, session="s"))
    there.prefetch(key("s"), 0, events.now + 60.0, 6400, ("node-0",))
    there.withdraw(key("s"))
    turn = served(events, there, request("r2", 6500, 2, history=6400, session="s"), ("node-0",))
    assert turn.cached_tokens == 0 and there.recomputed_tokens == 6400
    assert turn.first_s - turn.sent_s < 1.2 * KIND.costs.prefill_s(6500, 0) + 0.1


def test_a_hint_that_cannot_be_in_time_lets_those_pass_that_can() -> None:
    events = Events()
    here, there = fleet(events)
    for name in ("late", "soon"):
        served(events, here, request(name, 6000, 400, session=name))
    load_s, start_s = 6400 * KIND.shape.token_bytes / KIND.link_bytes_per_s, events.now
    there.prefetch(key("late"), 0, start_s + 60.0, 6400, ("node-0",), start_s + 0.5 * load_s)
    there.prefetch(key("soon"), 0, start_s + 60.0, 6400, ("node-0",), start_s + 1.5 * load_s)
    events.run(FOREVER, limit_s=start_s + 1.2 * load_s)
    assert (there.tokens_in(there.dram, key("late")), there.tokens_in(there.dram, key("soon"))) == (0, 6400)
    events.run(FOREVER, limit_s=start_s + 2.2 * load_s)
    assert there.tokens_in(there.dram, key("late")) == 6400, "its turn, as nothing else is to do"


def test_a_request_whose_cache_comes_too_late_ends_its_hints_load() -> None:
    events = Events()
    here, there = fleet(events, link_bytes_per_s=1e6)
    served(events, here, request("r1", 6000, 400, session="s"))
    there.prefetch(key("s"), 0, events.now + 60.0, 6400, ("node-0",), events.now + 1.0)
    turn = served(events, there, request("r2", 6500, 2, history=6400, session="s"), ("node-0",))
    assert turn.cached_tokens == 0 and there.link.ahead_s((9,)) == 0.0


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
