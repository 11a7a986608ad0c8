"""Pages of sessions, and what a scheduler knows of erasures that it did not order."""

from __future__ import annotations

import random

import pytest

from contracts.ids import SessionKey
from scheduler.core.directory import Directory, Held
from scheduler.core.erasures import Erasures, Word
from scheduler.core.listing import Page

S = SessionKey("t", "s")
GONE, LEFT = Word(True, True, {}, 3), Word(False, True, {"blob": 2}, 3)


def directory(sessions: int) -> Directory:
    made = Directory()
    for n in random.Random(1).sample(range(sessions), sessions):
        made.report("node-0", SessionKey("t", f"s{n:04}"), "m", 64, float(n // 3), Held(64, 1))
        made.report("node-0", SessionKey("other", f"s{n:04}"), "m", 64, float(n), Held(64, 1))
    return made


def page(of: Directory, limit: int, after: str, *, by_id: bool) -> list[str]:
    found = Page("t", limit, after, by_id=by_id)
    if not found.begin(of):
        return ["unknown"]
    everything = list(of)
    for start in range(0, len(everything), 7):
        found.look(everything[start : start + 7])
    return [s.key.session_id for s in found.found()]


@pytest.mark.parametrize("by_id", [True, False])
def test_pages_together_have_every_session_of_the_tenant_once_and_in_order(by_id: bool) -> None:
    of, seen = directory(50), []
    while part := page(of, 8, seen[-1] if seen else "", by_id=by_id):
        assert len(part) == 8 or len(seen) + len(part) == 50
        seen += part
    rank = (lambda s: s) if by_id else (lambda s: (-(int(s[1:]) // 3), s))
    assert seen == sorted((f"s{n:04}" for n in range(50)), key=rank)


def test_a_page_by_id_begins_after_a_session_that_is_gone_and_the_other_order_says_that_it_cannot() -> None:
    of = directory(10)
    of.erase(SessionKey("t", "s0004"))
    assert page(of, 2, "s0004", by_id=True) == ["s0005", "s0006"]
    assert page(of, 2, "s0004", by_id=False) == ["unknown"]


def test_a_restarted_scheduler_learns_of_an_erasure_from_a_store_that_goes_on_with_it_and_everybody_owes_it() -> None:
    e = Erasures()
    assert e.heard("node-1", S, LEFT, ["node-0", "node-1", "node-2"]) == ["node-0", "node-2"]
    assert e.get(S) is not None and e.owed_by("node-2") == [(S, 3)]
    assert e.heard("node-1", S, LEFT, ["node-0", "node-1", "node-2"]) == [], "they are told once"
    for node in ("node-0", "node-2", "node-1"):
        assert e.heard(node, S, GONE) == []
    assert e.get(S) is None
    e.validate()


def test_a_confirmation_of_an_unknown_erasure_and_one_that_nobody_has_noted_begin_nothing() -> None:
    e = Erasures()
    assert e.heard("node-1", S, GONE, ["node-0"]) == [] and e.get(S) is None
    assert e.heard("node-1", S, Word(False, True, {}, 3, taken=False), ["node-0"]) == [] and e.get(S) is None
    erasure = e.begin(S, ["node-0"])
    e.heard("node-0", S, Word(False, True, {}, 3, taken=False))
    assert not erasure.taken
    e.give_up(S)
    assert not e.owed_by("node-0")
    e.validate()
