"""Scheduling, preemption, admission and cancellation of the production engine, in virtual time. Every turn checks every
invariant."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from storelink.core.load_plan import LoadRate, Source
from tests.worker.trouble import Trouble
from tests.worker.virtual_engine import VirtualEngine
from tests.worker.virtual_model import CHUNK, NO_WINDOWS, Windows, random_prompt
from worker.core.block import SaveState
from worker.core.saving import ANSWER_TIMEOUT_S
from worker.core.sequence import Event, State
from worker.engine.engine import ADMIT_S


def prompt(seed: int, length: int) -> list[int]:
    return random_prompt(random.Random(seed), length)


def longest_gap_s(times_s: list[float]) -> float:
    return max((b - a for a, b in itertools.pairwise(times_s)), default=0.0)


# ---- steps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bounded", [True, False])
def test_beside_a_decode_a_long_prompt_is_computed_in_pieces_that_keep_the_decodes_pace(bounded: bool) -> None:
    e = VirtualEngine(pages=900, mixed_step_s=0.05 if bounded else 0.0, step_tokens=1024)
    decode = e.submit(prompt(1, 10), 60, session="d")
    e.go(until=lambda: len(e.answers[decode].tokens) > 10)
    e.submit(prompt(2, 800), 2, session="long")
    e.finish()
    gap_s = longest_gap_s(e.answers[decode].times_s[10:])
    assert gap_s < 0.06 if bounded else gap_s > 0.8, "one token takes 3 ms, the prompt 0.8 s"


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    e = VirtualEngine(pages=3000, step_tokens=128)
    long = e.submit(prompt(1, 2000), 2, session="long")
    e.go(until=lambda: bool(e.runner.steps))
    asked_s = e.world.now()
    short = e.submit(prompt(2, 20), 2, session="short")
    e.finish()
    assert e.answers[short].times_s[0] - asked_s < 0.3 < 1.5 < e.answers[long].times_s[0] - asked_s


def test_those_that_run_do_not_wait_until_everybody_who_came_is_admitted() -> None:
    e = VirtualEngine(pages=900)
    decode = e.submit(prompt(1, 10), 60, session="d")
    e.go(until=lambda: len(e.answers[decode].tokens) > 3)
    send = e.store.send

    def slowly(message: object) -> None:
        e.world.pass_(ADMIT_S / 2)
        send(message)  # type: ignore[arg-type]

    e.store.send = slowly  # type: ignore[method-assign,assignment]
    names = [e.submit(prompt(n, 30), 2, session=f"s{n}") for n in range(10, 30)]
    e.turn()
    here = [name for name in names if e.sequence(name).state is not State.WAITING]
    assert 1 <= len(here) <= 4
    e.finish()
    assert all(e.answers[name].end == "length" for name in names)


# ---- preemption ------------------------------------------------------------------------------------------------
def test_a_preempted_sequence_comes_back_with_its_tail_to_compute() -> None:
    e = VirtualEngine(pages=60)
    for n in range(6):
        e.submit(prompt(n, 21), 30, session=f"s{n}")
    e.finish()
    scheduling = e.engine.core.scheduling
    assert scheduling.preemptions >= 3
    recomputed = scheduling.recomputed_tokens
    assert recomputed[Event.PREEMPTED] <= scheduling.dropped_tokens <= scheduling.preemptions * (CHUNK - 1), (
        "full chunks were all kept"
    )
    assert not recomputed[Event.LOST] and e.loader.loaded["demand"] > 0, "what had left HBM was read again"


def test_without_a_store_what_is_purged_is_computed_again_and_counted() -> None:
    e = VirtualEngine(pages=60, store=False)
    for n in range(6):
        e.submit(prompt(n, 21), 30, session=f"s{n}")
    e.finish()
    scheduling = e.engine.core.scheduling
    assert (
        scheduling.preemptions
        and scheduling.dropped_tokens >= scheduling.recomputed_tokens[Event.PREEMPTED] > 3 * CHUNK
    )


def test_an_urgent_request_takes_the_place_of_the_least_urgent_youngest_which_then_goes_on() -> None:
    e = VirtualEngine(pages=60)
    names = [e.submit(prompt(n, 30), 15, session=f"s{n}", priority=p) for n, p in enumerate([0, 5, 5])]
    # 20 chunks of room: three of 8 do not fit, two and the urgent one do not either.
    e.go(until=lambda: all(len(e.answers[n].tokens) > 3 for n in names[:2]))
    urgent = e.submit(prompt(9, 30), 4, session="urgent", priority=-1)
    e.go(until=lambda: bool(e.answers[urgent].tokens))
    assert [e.sequence(n).state for n in names] == [State.RUNNING, State.WAITING, State.WAITING]
    assert e.sequence(names[1]).restarted is Event.PREEMPTED
    e.finish()
    assert e.engine.core.scheduling.recomputed_tokens[Event.PREEMPTED] < CHUNK


@pytest.mark.parametrize(("pages", "batch", "preempts"), [(300, 8, False), (60, 8, True), (300, 3, True)])
def test_less_urgent_requests_are_paused_only_where_pages_or_places_are_short(
    pages: int, batch: int, preempts: bool
) -> None:
    e = VirtualEngine(pages=pages, max_batch=batch)
    low = [e.submit(prompt(n, 22), 20, session=f"low{n}", priority=5) for n in range(3)]
    e.go(until=lambda: all(len(e.answers[n].tokens) > 2 for n in low[:2]))
    urgent = [e.submit(prompt(9 + n, 30), 6, session=f"urgent{n}", priority=-1) for n in range(2)]
    e.go(until=lambda: all(e.answers[n].end is not None for n in urgent))
    assert (e.engine.core.scheduling.preemptions > 0) is preempts
    assert all(e.answers[n].end is None for n in low), "they are still at it, or wait"
    waits_s = max(e.answers[n].times_s[0] for n in urgent) - e.answers[low[0]].times_s[2]
    assert waits_s < 0.4, "nobody urgent waits for the 20 tokens of somebody who is not"
    e.finish()


def test_equally_urgent_requests_wait_for_each_other() -> None:
    e = VirtualEngine(pages=60)
    names = [e.submit(prompt(n, 34), 4, session=f"s{n}") for n in range(5)]
    e.finish()
    ends = [e.answers[n].times_s[-1] for n in names]
    assert ends == sorted(ends) and not e.engine.core.scheduling.preemptions


def test_a_place_in_the_batch_goes_to_the_more_urgent() -> None:
    e = VirtualEngine(pages=300, max_batch=2)
    slow = [e.submit(prompt(n, 10), 40, session=f"s{n}", priority=1) for n in range(3)]
    e.go(until=lambda: len(e.answers[slow[1]].tokens) > 2)
    urgent = e.submit(prompt(9, 10), 5, session="urgent")
    e.go(until=lambda: e.answers[urgent].end is not None)
    assert [len(e.answers[n].tokens) > 3 for n in slow] == [True, False, False]
    e.finish()


def test_one_that_is_being_saved_is_passed_over_and_nobody_else_goes_for_its_pages() -> None:
    e = VirtualEngine(pages=60)
    first, second = (e.submit(prompt(n, 26), 40, session=f"s{n}") for n in range(2))
    e.go(until=lambda: bool(e.answers[second].tokens))
    e.loader.copy_s = 5.0  # copies begin now that will end much later
    e.store.latency = lambda: 0.0
    third = e.submit(prompt(3, 14), 30, session="third")
    e.go(until=lambda: e.engine.core.scheduling.preemptions > 0)
    waiting = [b for b in e.cache.index.values() if b.save is SaveState.WAITING]
    assert waiting, "something is being saved"
    assert e.engine.core.scheduling.preemptions == 1 and e.sequence(first).state is State.RUNNING
    assert third in e.engine.core.live
    e.finish()


# ---- a store that says nothing ---------------------------------------------------------------------------------
def test_pages_whose_saving_is_never_answered_are_free_after_a_while() -> None:
    e = VirtualEngine(pages=60)
    e.store.hangs_until_s = 1e6
    for n in range(4):
        e.submit(prompt(n, 40), 8, session=f"s{n}")
    e.go(until=lambda: all(a.end for a in e.answers.values()), most_s=5 * ANSWER_TIMEOUT_S)
    e.store.hangs_until_s = 0.0
    e.finish()


def test_pages_that_wait_for_a_save_which_the_store_forgot_are_free_after_a_while() -> None:
    e = VirtualEngine(pages=60)
    first = e.submit(prompt(1, 40), 8)
    e.go(until=lambda: first in e.engine.core.live and e.sequence(first).state is State.RUNNING)
    e.store.hangs_until_s = 1e6
    e.go(until=lambda: e.answers[first].end is not None)
    assert any(b.save is SaveState.WAITING for b in e.cache.index.values())
    second = e.submit(prompt(2, 60), 4, session="second")
    e.go(until=lambda: e.answers[second].end is not None, most_s=3 * ANSWER_TIMEOUT_S)
    e.store.hangs_until_s = 0.0
    e.finish()


def test_a_load_of_which_nothing_is_heard_is_given_up_and_computed() -> None:
    e = VirtualEngine(pages=60)
    known = prompt(1, 40)
    e.submit(known, 2)
    e.finish()
    e.store.hangs_until_s = 1e6
    again = e.submit(known, 4)
    e.go(until=lambda: e.answers[again].end is not None, most_s=60)
    assert e.answers[again].cached == 0 and len(e.store.asked) <= 2
    e.store.hangs_until_s = 0.0
    e.finish()


# ---- admission -------------------------------------------------------------------------------------------------
def test_a_large_request_is_not_passed_for_ever_by_small_ones() -> None:
    e = VirtualEngine(pages=90)
    for n in range(4):
        e.submit(prompt(n, 20), 20, session=f"s{n}")
    e.go(until=lambda: bool(e.runner.steps))
    large = e.submit(prompt(50, 90), 4, session="large")
    count = 0
    while not e.answers[large].tokens:
        e.submit(prompt(100 + count, 10), 10, session=f"x{count}")
        count += 1
        e.go(until=lambda at=e.world.now() + 0.02: e.world.now() > at)  # type: ignore[misc]  # noqa: B008
        assert count < 400, "it is due after 5.8 s"
    e.finish()


def test_a_turn_whose_history_is_kept_is_admitted_before_a_cold_prompt_that_waits() -> None:
    e = VirtualEngine(pages=60, max_batch=1)
    e.submit(prompt(0, 10), 20)
    e.go(until=lambda: bool(e.runner.steps))
    cold = e.submit(prompt(1, 40), 2, session="cold")
    back = e.submit(prompt(2, 41), 2, session="back", kept=36)
    cold_too = e.submit(prompt(3, 41), 2, session="cold-too")
    e.finish()
    first = [e.answers[name].times_s[0] for name in (back, cold, cold_too)]
    assert first == sorted(first)


def test_of_two_turns_that_have_as_little_to_compute_the_one_that_takes_less_of_hbm_is_admitted_first() -> None:
    e = VirtualEngine(pages=90, max_batch=1)
    e.submit(prompt(0, 10), 20)
    e.go(until=lambda: bool(e.runner.steps))
    long = e.submit(prompt(1, 80), 8, session="long", kept=76)
    short = e.submit(prompt(2, 12), 8, session="short", kept=8)
    e.finish()
    assert e.answers[short].times_s[0] < e.answers[long].times_s[0]


def test_the_queue_is_bounded_for_each_urgency_and_the_rest_is_sent_elsewhere() -> None:
    e = VirtualEngine(pages=60, max_batch=1, max_waiting=3)
    running = e.submit(prompt(0, 10), 20)
    e.go(until=lambda: bool(e.runner.steps))
    waiting = [e.submit(prompt(n, 10), 2, session=f"s{n}") for n in range(1, 6)]
    e.turn()
    assert [e.answers[n].end for n in waiting] == [None] * 3 + ["refused 503"] * 2
    urgent = e.submit(prompt(9, 10), 2, session="urgent", priority=-1)
    e.go(until=lambda: e.answers[urgent].end is not None)
    assert e.answers[urgent].end == "length" and e.answers[running].end is None
    e.finish()


def test_a_newcomer_is_not_admitted_into_the_room_that_others_are_about_to_grow_into() -> None:
    e = VirtualEngine(pages=60)  # 20 chunks
    for n in range(2):
        e.submit(prompt(n, 27), 6, session=f"s{n}")  # 7 chunks, soon 8 or 9
    e.go(until=lambda: bool(e.runner.steps))
    e.submit(prompt(5, 22), 2, session="late")  # 6 chunks fit now
    e.finish()
    assert not e.engine.core.scheduling.preemptions


@pytest.mark.parametrize("behind", [False, True])
def test_what_is_sooner_computed_alone_is_loaded_behind_another_prompt(behind: bool) -> None:
    e = VirtualEngine(pages=400, step_tokens=16)
    known = prompt(1, 60)
    e.submit(known, 1)
    e.finish()
    e.store.latency = lambda: 0.5
    e.engine.core.state.rates.seed(Source.DRAM, LoadRate(0.5, 0.0))
    e.engine.core.pace.prefill_token_s = 0.2 / 60
    if behind:
        e.submit(prompt(2, 200), 1, session="b")
        e.turn()
    again = e.submit(known, 4)
    e.finish()
    assert bool(e.answers[again].cached) == behind


# ---- cancellation ----------------------------------------------------------------------------------------------
def held_for(e: VirtualEngine, name: str) -> int:
    return sum(int((b.pages >= 0).sum()) for b in e.sequence(name).blocks)


@pytest.mark.parametrize("when", ["waiting", "asking", "loading", "prefilling", "decoding"])
def test_within_a_turn_of_a_cancellation_its_pages_are_free_or_cached(when: str) -> None:
    e = VirtualEngine(pages=60, step_tokens=16, layerwise=when != "loading")
    known = prompt(1, 60)
    e.submit(known, 2)
    e.finish()
    blocker = e.submit(prompt(2, 70), 8, session="b") if when == "waiting" else None
    e.go(until=lambda: blocker is None or bool(e.answers[blocker].tokens))
    e.store.latency = lambda: 0.5
    name = e.submit(known if when in ("asking", "loading") else prompt(3, 60), 30, session="n")
    s = None
    for _ in range(10_000):
        if name in e.engine.core.live:
            s = e.sequence(name)
            there = {
                "waiting": s.state is State.WAITING,
                "asking": s.state is State.LOADING and s.found is None,
                "loading": s.state is State.LOADING and any(b.ready.any() for b in s.blocks),
                "prefilling": s.state is State.RUNNING and 0 < s.computed < 60,
                "decoding": s.generated > 5,
            }[when]
            if there:
                break
        e.go(until=lambda turns=e.turns: e.turns > turns)  # type: ignore[misc]
    assert s is not None and (held_for(e, name) > 0) == (when != "waiting")
    e.cancel(name)
    e.turn()
    assert e.answers[name].end == "cancelled" and not e.table.open
    others = sum(held_for(e, o) for o in e.engine.core.live)
    saving = sum(
        int((b.pages >= 0).sum()) for b in e.cache.index.values() if b.save is SaveState.WAITING and not b.users
    )
    assert e.cache.available() + others + saving == e.pool.total
    e.finish()


def test_cancelling_one_of_two_that_wait_for_the_same_load_leaves_the_other_its_load() -> None:
    e = VirtualEngine(pages=120, layerwise=False)
    known = prompt(1, 60)
    e.submit(known, 2)
    e.finish()
    e.store.asked.clear()
    e.store.latency = lambda: 1.0
    first = e.submit(known, 4)
    e.go(until=lambda: first in e.engine.core.live and e.sequence(first).found is not None)
    second = e.submit([*known, 9], 4)
    e.turn()
    e.cancel(first)
    e.turn()
    assert e.sequence(second).blocks and e.table.open
    e.go(until=lambda: e.answers[second].end is not None)
    assert e.answers[second].cached == 60 and not e.engine.core.scheduling.recomputed_tokens
    assert len(e.store.asked) == 2, "the second asked for the one chunk more that it could use"
    e.finish()


# ---- anything --------------------------------------------------------------------------------------------------
def anything(seed: int, requests: int, windows: Windows = NO_WINDOWS) -> VirtualEngine:
    """Requests come and are cancelled, pages are purged, chunks evicted, sessions hinted, and the store fails in every
    way it can."""
    dice, beliefs = random.Random(seed), random.Random(seed)  # what the scheduler believes to be kept need not be so
    e = VirtualEngine(
        pages=dice.choice([48, 60, 90, 300]),
        store=dice.choice([True, True, True, False]),
        step_tokens=dice.choice([16, 40, 1024]),
        max_batch=dice.choice([1, 2, 5, 64]),
        mixed_step_s=dice.choice([0.0, 0.02, 0.2]),
        windows=windows,
    )
    slow_s = dice.choice([0.0, 0.001, 0.05])
    e.store.latency = lambda: dice.random() * slow_s
    e.loader.copy_s = dice.choice([0.0, 0.001, 0.1])
    faults, refusals = dice.choice([0.0, 0.0, 0.05]), dice.choice([0.0, 0.0, 0.2, 1.0])
    e.store.fault = lambda key, layer: dice.random() < faults
    e.store.refuse = lambda key: dice.random() < refusals
    trouble = Trouble(e, dice, beliefs, requests)
    for _ in range(requests * 3):
        e.world.at(dice.random() * requests * 0.05, trouble.something)
    # Later events are part of the world: time passes until the last has happened.
    e.go(until=lambda: e.world.now() >= requests * 0.05)
    if e.store.arena is not None:
        e.store.hangs_until_s = min(e.store.hangs_until_s, e.world.now() + 15.0)
    return e


@pytest.mark.parametrize("seed", [21339])  # a newer hint, of which a load of the older one was given up
def test_what_once_went_wrong_does_not(seed: int) -> None:
    anything(seed, requests=30).finish()


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_every_request_ends_with_its_tokens_and_every_page_comes_back(seed: int) -> None:
    anything(seed, requests=14).finish()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=4000, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_for_long_every_request_ends_with_its_tokens_and_every_page_comes_back(seed: int) -> None:
    anything(seed, requests=30).finish()
