"""Owners take turns, whatever each of them asks for."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.turns import Turns


def order(turns: Turns[str]) -> list[str]:
    """The work in the order in which one place serves it."""
    served = []
    while (started := turns.start()) is not None:
        served.append(started[1])
        turns.finish(started[0])
    return served


def test_an_owner_with_much_work_delays_the_others_by_one_turn() -> None:
    turns: Turns[str] = Turns(1, 1, 100)
    for n in range(50):
        assert turns.ask("greedy", f"g{n}")
    for owner in ("a", "b"):
        assert turns.ask(owner, owner)
    assert order(turns)[:4] == ["g0", "a", "b", "g1"]


def test_an_owner_has_a_bounded_part_of_the_places_and_of_the_queue() -> None:
    turns: Turns[str] = Turns(3, 2, 4)
    assert [turns.ask("greedy", f"g{n}") for n in range(6)] == [True] * 4 + [False] * 2
    assert turns.start() == ("greedy", "g0") and turns.start() == ("greedy", "g1")
    assert turns.start() is None, "one place is kept for somebody else"
    assert turns.ask("a", "a") and turns.start() == ("a", "a")
    turns.finish("greedy")
    assert turns.start() == ("greedy", "g2")


def test_work_that_was_withdrawn_has_no_turn() -> None:
    turns: Turns[str] = Turns(1, 1, 4)
    for name in ("a", "b", "c"):
        turns.ask(name, name)
    assert turns.withdraw("b", "b") and not turns.withdraw("b", "b")
    assert order(turns) == ["a", "c"]


def test_who_may_not_wait_leaves_nothing_behind() -> None:
    turns: Turns[str] = Turns(1, 1, 0)
    assert not turns.ask("a", "a") and turns.start() is None
    turns.validate()


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.turns: Turns[int] = Turns(3, 2, 3)
        self.running: list[str] = []
        self.waiting: list[tuple[str, int]] = []
        self.asked = 0

    @rule(owner=st.sampled_from("abcd"))
    def ask(self, owner: str) -> None:
        self.asked += 1
        fits = sum(o == owner for o, _ in self.waiting) < 3
        assert self.turns.ask(owner, self.asked) is fits
        if fits:
            self.waiting.append((owner, self.asked))

    @rule()
    def start(self) -> None:
        started = self.turns.start()
        could = len(self.running) < 3 and any(self.running.count(o) < 2 for o, _ in self.waiting)
        assert (started is not None) is could
        if started is not None:
            owner = started[0]
            assert started == next(w for w in self.waiting if w[0] == owner), "an owner's work keeps its order"
            self.waiting.remove(started)
            self.running.append(owner)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.running))
        self.running.remove(owner)
        self.turns.finish(owner)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(work)
        assert self.turns.withdraw(*work)

    @invariant()
    def holds(self) -> None:
        self.turns.validate()
        assert self.turns.waiting == len(self.waiting) and self.turns.running == len(self.running)


TestTurns = Machine.TestCase
