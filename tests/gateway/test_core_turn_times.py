"""Where a turn's time went: the gateway's phases and its workers' add up, whatever a worker says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.turn_times import OF_WORKER, WORDS, Phase, checked
from gateway.core.turn_times import TurnTimes, server_timing

VALUE = re.compile(r'[a-z-]+;dur=\d+\.\d(;desc="[A-Za-z \']+")?(, [a-z-]+;dur=\d+\.\d;desc="[A-Za-z \']+")*')


def submitted(at_s: float = 3.0) -> TurnTimes:
    """Arrived at 0, placed from 1 on, submitted."""
    times = TurnTimes(0.0)
    times.enter(Phase.PLACE, 1.0)
    times.enter(Phase.PREPARE, at_s)
    return times


def test_every_phase_has_words() -> None:
    assert set(WORDS) == set(Phase)


def test_a_turn_is_admitted_placed_prepared_and_then_what_its_worker_says() -> None:
    times = submitted()
    times.accepted(4.0)
    assert times.waiting and times.so_far(4.5) == {Phase.ADMIT: 1.0, Phase.PLACE: 2.0, Phase.PREPARE: 1.0}
    times.spoke({"queue": 2.0, "compute": 3.0}, 10.0)
    assert times.until_first_s == {
        Phase.ADMIT: 1.0,
        Phase.PLACE: 2.0,
        Phase.PREPARE: 2.0,
        Phase.QUEUE: 2.0,
        Phase.COMPUTE: 3.0,
    }
    assert times.first_token_s == 10.0 and not times.waiting and not times.after_s
    times.ended({"decode": 4.0, "queue": 0.5}, 15.0)
    assert times.after_s == {Phase.DECODE: 4.5, Phase.QUEUE: 0.5}, "what the worker does not tell is decoding"
    assert list(times.whole()) == sorted(times.whole(), key=list(Phase).index) and times.whole()[Phase.QUEUE] == 2.5
    times.validate()


def test_an_attempt_that_is_lost_before_its_first_token_adds_to_the_next_ones() -> None:
    times = submitted()
    times.accepted(4.0)
    times.enter(Phase.PLACE, 6.0)
    times.enter(Phase.PREPARE, 7.0)
    times.spoke({"compute": 1.0}, 9.0)
    assert times.until_first_s == {Phase.ADMIT: 1.0, Phase.PLACE: 3.0, Phase.PREPARE: 4.0, Phase.COMPUTE: 1.0}


def test_one_that_is_lost_later_adds_to_what_came_after() -> None:
    times = submitted()
    times.spoke({"compute": 1.0}, 5.0)
    times.enter(Phase.PLACE, 8.0)
    times.enter(Phase.PREPARE, 9.0)
    assert times.waiting
    times.spoke({"load-peer": 2.0}, 12.0)
    times.ended({"decode": 1.0}, 13.0)
    assert times.first_token_s == 5.0
    assert times.after_s == {Phase.DECODE: 4.0, Phase.PLACE: 1.0, Phase.LOAD_PEER: 2.0, Phase.PREPARE: 1.0}


def test_of_an_older_worker_only_what_passed_until_it_accepted_is_known() -> None:
    times = submitted()
    times.accepted(4.0)
    times.spoke(None, 9.0)
    times.ended(None, 11.0)
    assert times.until_first_s == {Phase.ADMIT: 1.0, Phase.PLACE: 2.0, Phase.PREPARE: 1.0}
    assert times.after_s == {Phase.DECODE: 2.0}


ODD: Any = (
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)
TOLD = (
    st.none()
    | ODD
    | st.dictionaries(
        st.sampled_from([*map(str, Phase), "unheard-of"]) | ODD.filter(lambda k: k.__hash__), ODD, max_size=8
    )
)


@given(TOLD, TOLD, st.floats(0, 100), st.floats(0, 100))
def test_whatever_a_worker_says_the_phases_add_up_to_what_has_passed(
    first: Any, last: Any, waited_s: float, decoded_s: float
) -> None:
    times = submitted()
    times.accepted(3.0)
    times.spoke(first, 3.0 + waited_s)
    times.ended(last, 3.0 + waited_s + decoded_s)
    times.validate()
    assert times.first_token_s == pytest.approx(3.0 + (waited_s if first is not None else 0.0))
    assert sum(times.after_s.values()) == pytest.approx(decoded_s)
    assert {p: times.until_first_s.get(p) for p in (Phase.ADMIT, Phase.PLACE)} == {
        Phase.ADMIT: 1.0,
        Phase.PLACE: 2.0,
    }, "the gateway's own"
    assert VALUE.fullmatch(server_timing(times.whole(), 1.0)), "and nothing of it is anybody's text"


@given(TOLD)
def test_only_seconds_of_known_phases_are_taken(told: Any) -> None:
    found = checked(told)
    assert all(type(p) is Phase and type(s) is float and 0.0 <= s < 1e8 for p, s in found.items())
    assert not set(checked(told, OF_WORKER)) & {Phase.ADMIT, Phase.PLACE, Phase.PREPARE}


def test_the_header_is_in_milliseconds_with_words() -> None:
    said = server_timing({Phase.QUEUE: 0.00123, Phase.LOAD_SSD: 2.0}, 2.5)
    assert (
        said == 'total;dur=2500.0, queue;dur=1.2;desc="waited in the queue", load-ssd;dur=2000.0;desc="loaded from SSD"'
    )
