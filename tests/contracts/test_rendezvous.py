"""Which scheduler a session belongs to."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.rendezvous import rendezvous

ADDRESSES = [f"10.0.0.{n}:8081" for n in range(5)]
SESSIONS = [SessionKey("t", f"s{n}") for n in range(4000)]


@given(
    session=st.tuples(st.text(max_size=9), st.text(max_size=9)),
    addresses=st.sets(st.text(max_size=9), max_size=6),
    seed=st.randoms(),
)
@settings(deadline=None)
def test_everybody_comes_to_the_same_order(session: tuple[str, str], addresses: set[str], seed) -> None:
    shuffled = sorted(addresses)
    order = rendezvous(SessionKey(*session), shuffled)
    seed.shuffle(shuffled)
    assert rendezvous(SessionKey(*session), shuffled) == order and set(order) == addresses


@given(gone=st.integers(0, 4))
@settings(deadline=None, max_examples=5)
def test_losing_one_moves_only_its_share_to_who_stood_in_for_it(gone: int) -> None:
    left = [a for a in ADDRESSES if a != ADDRESSES[gone]]
    for session in SESSIONS[:500]:
        order = rendezvous(session, ADDRESSES)
        assert rendezvous(session, left) == [a for a in order if a != ADDRESSES[gone]]


def test_shares_and_what_a_lost_one_leaves_are_even() -> None:
    orders = [rendezvous(session, ADDRESSES) for session in SESSIONS]
    shares = Counter(order[0] for order in orders)
    assert all(abs(share - 800) < 120 for share in shares.values()), shares
    heirs = Counter(order[1] for order in orders if order[0] == ADDRESSES[0])
    assert len(heirs) == 4 and all(abs(n - 200) < 70 for n in heirs.values()), heirs


def test_tenants_do_not_share_their_session_names() -> None:
    orders = {tuple(rendezvous(SessionKey(t, "s"), ADDRESSES)) for t in "abcdefgh"}
    assert len(orders) > 4
