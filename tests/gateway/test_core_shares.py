"""No owner can take all of something scarce."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.shares import Shares


def test_one_owner_gets_its_share_and_no_more_and_the_others_still_get_theirs() -> None:
    shares = Shares(10, 0.5)
    assert shares.take("greedy", 5) and not shares.take("greedy")
    assert shares.take("other", 5)
    assert not shares.take("third"), "all of it is held"
    shares.give("greedy", 1)
    assert shares.take("third")
    shares.validate()


def test_a_share_is_never_nothing() -> None:
    assert Shares(1, 0.1).take("only")


def test_nothing_is_kept_of_an_owner_who_holds_nothing() -> None:
    shares = Shares(4, 1.0)
    for n in range(1000):
        assert shares.take(f"owner {n}")
        shares.give(f"owner {n}")
    assert not shares.of("owner 1") and shares.held == 0
    shares.validate()


class Holding(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shares, self.held = Shares(20, 0.4), {"a": 0, "b": 0, "c": 0}

    @rule(owner=st.sampled_from("abc"), amount=st.integers(1, 12))
    def take(self, owner: str, amount: int) -> None:
        fits = self.held[owner] + amount <= 8 and sum(self.held.values()) + amount <= 20
        assert self.shares.take(owner, amount) == fits
        self.held[owner] += amount if fits else 0

    @rule(owner=st.sampled_from("abc"), data=st.data())
    def give(self, owner: str, data: st.DataObject) -> None:
        if self.held[owner]:
            amount = data.draw(st.integers(1, self.held[owner]))
            self.shares.give(owner, amount)
            self.held[owner] -= amount

    @invariant()
    def holds(self) -> None:
        self.shares.validate()
        assert all(self.shares.of(owner) == amount for owner, amount in self.held.items())


TestHolding = Holding.TestCase
