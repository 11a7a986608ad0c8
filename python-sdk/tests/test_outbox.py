"""The queue: what is merged, dropped and sent, and that nothing is lost count of."""

from __future__ import annotations

import random

import pytest

from upbeat.backoff import FIRST_S, MOST_S, Backoff
from upbeat.hints import MAX_BATCH, Advisory, BadHint, Invalidation
from upbeat.names import Hop, is_name, name_of
from upbeat.outbox import Outbox
from upbeat.pace import MAX_KEYS, Pace


def sessions(box: Outbox, now_s: float = 0.0) -> list[str | None]:
    return [item.hint.session_id for item in box.take(now_s)]


def test_advisories_travel_together_in_their_order() -> None:
    box = Outbox(1000)
    for i in range(MAX_BATCH + 3):
        box.put(Advisory(f"s{i}"), 0.0)
    assert sessions(box) == [f"s{i}" for i in range(MAX_BATCH)]
    box.arrived()
    assert sessions(box) == [f"s{i}" for i in range(MAX_BATCH, MAX_BATCH + 3)]
    box.arrived()
    assert box.sent == MAX_BATCH + 3 and not len(box)
    box.validate()


def test_an_invalidation_goes_alone_and_keeps_its_place() -> None:
    box = Outbox(10)
    for hint in (Advisory("a"), Invalidation("b"), Advisory("c")):
        box.put(hint, 0.0)
    taken = []
    while len(box):
        taken.append(sessions(box))
        box.arrived()
    assert taken == [["a"], ["b"], ["c"]]


def test_a_newer_hint_of_a_session_takes_the_older_ones_place() -> None:
    box = Outbox(10)
    box.put(Advisory("a", priority=1), 0.0)
    box.put(Advisory("b"), 0.0)
    box.put(Advisory("a", priority=2), 1.0)
    first, second = box.take(1.0)
    assert first.hint == Advisory("a", priority=2) and second.hint == Advisory("b") and box.merged == 1


def test_an_invalidation_takes_the_waiting_advisory_away() -> None:
    box = Outbox(10)
    box.put(Advisory("a"), 0.0)
    box.put(Invalidation("a"), 0.0)
    assert [type(item.hint) for item in box.take(0.0)] == [Invalidation] and box.merged == 1
    box.validate()


def test_a_full_queue_lets_the_oldest_go() -> None:
    box = Outbox(2)
    for name in "abc":
        box.put(Advisory(name), 0.0)
    assert sessions(box) == ["b", "c"] and box.dropped == 1


def test_a_hint_that_waited_too_long_is_dropped_and_others_say_how_much_nearer_it_is() -> None:
    box = Outbox(10)
    box.put(Advisory("old", ttl_s=5.0), 0.0)
    box.put(Advisory("soon", expected_arrival=8.0, ttl_s=5.0), 0.0)
    (left,) = box.take(6.0)
    assert left.hint.session_id == "soon" and box.dropped == 1
    assert isinstance(left.hint, Advisory)
    assert left.hint.body(6.0) == {"session_id": "soon", "expected_arrival": 2.0, "ttl_s": 5.0}
    assert left.hint.body(10.0) == {"session_id": "soon", "expected_arrival": 0.0, "ttl_s": 3.0}


def test_what_did_not_arrive_waits_again_in_front_unless_something_newer_says_more() -> None:
    box = Outbox(10)
    for name in "abc":
        box.put(Advisory(name), 0.0)
    assert sessions(box) == ["a", "b", "c"]
    box.put(Invalidation("a"), 1.0)
    box.put(Advisory("b", priority=3), 1.0)
    box.put(Advisory("d"), 1.0)
    box.give_back()
    assert sessions(box, 1.0) == ["c"] and box.merged == 2
    box.refused()
    assert sessions(box, 1.0) == ["a"]
    box.arrived()
    assert sessions(box, 1.0) == ["b", "d"] and box.failed == 1


@pytest.mark.parametrize("bad", [0, 7, 99])
def test_one_hint_that_the_server_refuses_does_not_spoil_the_others(bad: int) -> None:
    box, tries = Outbox(1000), 0
    for i in range(100):
        box.put(Advisory(f"s{i}"), 0.0)
    arrived: list[str | None] = []
    while batch := sessions(box):
        tries += 1
        if f"s{bad}" in batch:
            box.found_wrong()
        else:
            box.arrived()
            arrived += batch
        box.validate()
    assert sorted(map(str, arrived)) == sorted(f"s{i}" for i in range(100) if i != bad)
    assert (box.sent, box.failed) == (99, 1) and tries < 40


@pytest.mark.parametrize("seed", range(20))
def test_every_hint_is_accounted_for_whatever_happens(seed: int) -> None:
    rng, box, now = random.Random(seed), Outbox(8), 0.0
    for _ in range(400):
        now += rng.random() * 3
        name = rng.choice("abcdefghijkl")
        match rng.randrange(8):
            case 0 | 1 | 2:
                box.put(Advisory(name, expected_arrival=rng.choice([None, 2.0]), ttl_s=rng.choice([1.0, 60.0])), now)
            case 3:
                box.put(Invalidation(name) if rng.random() < 0.5 else Invalidation(advisory_id=name), now)
            case 4:
                box.drop()
            case 5:
                box.take(now)
                rng.choice([box.arrived, box.refused, box.give_back, box.found_wrong])()
            case 6:
                box.take(now)
                box.put(Advisory(name), now)
                box.give_back()
            case 7 if rng.random() < 0.1:
                box.clear()
        box.validate()
    box.take(now)
    box.arrived()
    box.validate()


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"session_id": "a b"}, "session_id"),
        ({"session_id": ".."}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "a", "priority": True}, "priority"),
        ({"session_id": "a", "priority": 1001}, "priority"),
        ({"session_id": "a", "ttl_s": float("nan")}, "ttl_s"),
        ({"session_id": "a", "expected_arrival": -1}, "expected_arrival"),
        ({"session_id": "a", "expected_arrival": "soon"}, "expected_arrival"),
        ({"session_id": "a", "model_id": ""}, "model_id"),
        ({"session_id": "a", "model_id": "a\nb"}, "model_id"),
        ({"session_id": "a", "ordered": 1}, "ordered"),
    ],
)
def test_a_wrong_hint_names_its_argument(arguments: dict[str, object], argument: str) -> None:
    with pytest.raises(BadHint) as caught:
        Advisory(**arguments)  # type: ignore[arg-type]
    assert caught.value.argument == argument and str(caught.value).startswith(argument)


def test_an_invalidation_names_exactly_one_thing() -> None:
    for arguments in ({}, {"session_id": "a", "advisory_id": "b"}):
        with pytest.raises(BadHint):
            Invalidation(**arguments)


def test_pauses_double_and_a_longer_retry_after_counts() -> None:
    backoff = Backoff()
    pauses = []
    for _ in range(10):
        backoff.failed(0.0, 0.0)
        pauses.append(backoff.wait_s(0.0))
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and pauses[-1] == MOST_S
    backoff.failed(0.0, 1.0)
    assert backoff.wait_s(0.0) == MOST_S / 2
    backoff.failed(0.0, 0.0, retry_after_s=100.0)
    assert backoff.wait_s(40.0) == 60.0
    backoff.worked()
    assert backoff.wait_s(0.0) == 0.0
    backoff.failed(0.0, 0.0)
    assert backoff.wait_s(0.0) == FIRST_S


def test_names_are_legal_and_no_two_texts_share_one() -> None:
    assert name_of("qa.engineer:1") == "qa.engineer:1" and name_of("Fact Checker") == "Fact-Checker"
    texts = ["", "..", "研究员", "評論家", "a/b", "a?b", "x" * 200, "x" * 201, "a\nb", "a-b"]
    names = [name_of(text) for text in texts]
    assert all(is_name(name) for name in names) and len(set(names)) == len(texts)


def test_a_hop_is_spelled_the_same_wherever_it_is_made() -> None:
    hop = Hop("software team", "qa", "job7")
    assert (
        hop.session_id == "job7:qa"
        and Hop("w", "a" * 128, "r" * 128).session_id == Hop("w", "a" * 128, "r" * 128).session_id
    )
    assert hop.headers == {
        "X-Session-Id": "job7:qa",
        "X-Upbeat-Workflow": "software-team",
        "X-Upbeat-Agent": "qa",
        "X-Upbeat-Run": "job7",
    }


def test_pace_follows_what_is_seen_and_stays_small() -> None:
    pace = Pace()
    assert pace.expected_s(("a",)) is None
    pace.note(("a",), 2.0)
    assert pace.expected_s(("a",)) == 2.0
    pace.note(("a",), 4.0)
    assert pace.expected_s(("a",)) == pytest.approx(2.6)
    for i in range(MAX_KEYS):
        pace.note((str(i),), 1.0)
    assert pace.expected_s(("a",)) is None
