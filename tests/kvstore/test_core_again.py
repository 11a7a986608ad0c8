"""A hint's load that found no room is begun again when there may be some, while its hint counts."""

from __future__ import annotations

from contracts.ids import SessionKey
from kvstore.core.again import MOST_AT_ONCE, MOST_CHUNKS, MOST_S, PAUSE_S, Again

A, B = SessionKey("t", "a"), SessionKey("t", "b")


def test_each_vain_try_is_followed_by_a_longer_pause_up_to_a_limit() -> None:
    again, now, pauses = Again(), 10.0, []
    for _ in range(8):
        again.short(A, now)
        began = now
        while not again.due(now):
            now += PAUSE_S / 4
        pauses.append(now - began)
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S] and pauses[-1] == MOST_S


def test_those_that_are_due_come_once_and_in_order() -> None:
    again = Again()
    again.short(B, 0.0)
    again.short(A, 0.0)
    assert again.waiting and again.due(0.0) == []
    assert again.due(PAUSE_S) == [B, A]
    assert not again.waiting and again.due(PAUSE_S) == []


def test_a_new_hint_begins_afresh() -> None:
    again = Again()
    again.short(A, 0.0)
    again.forget(A)
    assert again.due(MOST_S) == []
    again.short(A, 5.0)
    assert again.due(5.0 + PAUSE_S) == [A]


def test_thousands_that_are_due_together_are_retried_a_few_at_a_time_each_once() -> None:
    again, names = Again(), [SessionKey("t", f"{n}") for n in range(1000)]
    for name in names:
        again.short(name, 0.0)
    retried: list[SessionKey] = []
    while again.waiting:
        due = again.due(PAUSE_S)
        assert 0 < len(due) <= MOST_AT_ONCE
        retried += due
    assert retried == names


def test_of_long_sessions_fewer_are_retried_at_a_time() -> None:
    again = Again()
    for n in range(20):
        again.short(SessionKey("t", f"{n}"), 0.0)
    assert [len(again.due(PAUSE_S, lambda session: MOST_CHUNKS // 8)) for _ in range(3)] == [8, 8, 4]
