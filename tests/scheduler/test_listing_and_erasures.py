"""Pages of sessions, and what a scheduler knows of erasures that it did not order."""

from __future__ import annotations

import random

import pytest

from contracts.ids import SessionKey
from scheduler.core import listing
from scheduler.core.directory import Directory, Held
from scheduler.core.erasures import Erasures, Word

S = SessionKey("t", "s")
GONE, LEFT = Word(True, True, {}, 3), Word(False, True, {"blob": 2}, 3)


def directory(sessions: int) -> Directory:
    made = Directory()
    for n in random.Random(1).sample(range(sessions), sessions):
        made.report("node-0", SessionKey("t", f"s{n:04}"), "m", 64, float(n // 3), Held(64, 1))
        made.report("node-0", SessionKey("other", f"s{n:04}"), "m", 64, float(n), Held(64, 1))
    return made


def page(of: Directory, limit: int, after: str, *, by_id: bool) -> list[str]:
    found = of.page("t", limit, after, by_id=by_id)
    return ["unknown"] if found is None else [s.key.session_id for s in found]


@pytest.mark.parametrize("by_id", [True, False])
def test_pages_together_have_every_session_of_the_tenant_once_and_in_order(by_id: bool) -> None:
    of, seen = directory(50), []
    while part := page(of, 8, seen[-1] if seen else "", by_id=by_id):
        assert len(part) == 8 or len(seen) + len(part) == 50
        seen += part
    rank = (lambda s: s) if by_id else (lambda s: (-(int(s[1:]) // 3), s))
    assert seen == sorted((f"s{n:04}" for n in range(50)), key=rank)


def test_a_list_of_all_tenants_is_merged() -> None:
    found = [(s.key.session_id, s.key.tenant) for s in directory(10).page("", 15, "", by_id=True) or ()]
    assert found == sorted((f"s{n:04}", tenant) for n in range(10) for tenant in ("other", "t"))[:15]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_holds_while_sessions_come_are_used_and_go(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(listing, "_BLOCK", 4)
    order, of = random.Random(seed), Directory()
    for _ in range(600):
        key = SessionKey(order.choice("ab"), f"s{order.randrange(40)}")
        tokens = order.choice([0, 64, 64])
        of.report(order.choice(["n0", "n1"]), key, "m", order.choice([0, tokens]), order.randrange(50), Held(tokens, 1))
        if order.random() < 0.1:
            of.erase(key)
        of.validate()
        for by_id in (True, False):
            every = [s.key for s in of.page("a", 1000, "", by_id=by_id) or ()]
            assert set(every) == {s.key for s in of if s.key.tenant == "a"}
            for n in range(0, len(every), 7):
                part = of.page("a", 3, every[n].session_id, by_id=by_id) or []
                assert [s.key for s in part] == every[n + 1 : n + 4]


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
