"""The order of victims in HBM, clause by clause, and then all at once against a plain sort."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.memory.layer_bands import BANDS, layers_of
from contracts.memory.victim_order import Rank, VictimKey, victim_key
from tests.worker.test_core_hbm import LAYERS, A, B, C, cached, here, make
from worker.core.block import Block, SaveState
from worker.core.hbm import HbmCache
from worker.core.owners import MOST_OWNERS
from worker.core.prefetch import Offer, in_order
from worker.core.standings import MOST_SESSIONS, Standings
from worker.core.victims import KEPT_S, victims, within_parts


def advise(cache: HbmCache, session: SessionKey, priority: int = 0, now: float = 0.0) -> None:
    cache.standings.advise(session, priority, now + 60, now)


def test_class_comes_before_priority() -> None:
    cache = make(8)
    urgent, plain = cached(cache, b"u", A), cached(cache, b"p", B)
    advise(cache, A, priority=-10)
    cache.standings.withdraw(A)
    assert cache.make_room(4, now=1)
    assert here(urgent) == [] and len(here(plain)) == 4


def test_an_expired_hint_leaves_before_what_nobody_hinted() -> None:
    cache = make(8)
    expired, plain = cached(cache, b"e", A, used_s=9), cached(cache, b"p", B, used_s=1)
    cache.standings.advise(A, 0, 10, 9)
    assert cache.make_room(4, now=11)
    assert here(expired) == [] and len(here(plain)) == 4


def test_the_least_urgent_priority_comes_before_the_highest_layer() -> None:
    cache = make(8)
    patient, urgent = cached(cache, b"p", A), cached(cache, b"u", B)
    advise(cache, A, priority=5)
    advise(cache, B, priority=0)
    assert cache.make_room(4, now=1)
    assert here(patient) == [] and len(here(urgent)) == 4


def test_the_highest_layer_comes_before_the_least_recently_used_session() -> None:
    cache = make(8)
    old, new = cached(cache, b"o", A, used_s=1), cached(cache, b"n", B, used_s=2)
    assert cache.make_room(3, now=3)
    assert here(old) == [0, 1] and here(new) == [0, 1, 2]


def test_the_least_recently_used_session_comes_before_the_latest_chunk() -> None:
    cache = make(16)
    old, new = cached(cache, b"o", A, index=0, used_s=1), cached(cache, b"n", B, index=3, used_s=2)
    assert cache.make_room(9, now=3)
    assert here(old) == [0, 1, 2] and len(here(new)) == 4


def test_a_session_is_as_recent_as_its_last_use_whenever_its_chunks_came() -> None:
    cache = make(16)
    early = cached(cache, b"1", A, index=0, used_s=1)
    other = cached(cache, b"o", B, index=0, used_s=2)
    late = cached(cache, b"2", A, index=1, used_s=3)
    assert cache.make_room(4 + 1, now=4)
    assert (len(here(early)), len(here(other)), len(here(late))) == (4, 3, 4), "B was used before A's last use"
    assert cache.make_room(4 + 2, now=4)
    assert (len(here(early)), len(here(late))) == (4, 3), (
        "of one session the latest chunk goes, not the one that came first"
    )


def test_what_is_held_for_a_hint_stays_until_it_is_used_or_the_hint_has_ended() -> None:
    cache = make(16)
    cache.hold_hinted = True
    fetched, used, plain = cached(cache, b"f", A), cached(cache, b"u", B), cached(cache, b"p", C, used_s=3)
    for block, session in ((fetched, A), (used, B)):
        cache.hint(block, list(range(LAYERS)))
        advise(cache, session)
    cache.claim([used])
    assert not cache.make_room(4 + 9, now=1), "the held block counts as no room"
    assert cache.make_room(4 + 8, now=1)
    assert len(here(fetched)) == 4 and here(used) == here(plain) == []
    assert cache.make_room(16, now=61), "the hint has expired"
    cache.validate()


def test_without_holding_a_hints_pages_make_way_like_any_others() -> None:
    cache = make(4)
    fetched = cached(cache, b"f", A)
    cache.hint(fetched, list(range(LAYERS)))
    advise(cache, A)
    assert cache.make_room(4, now=1) and here(fetched) == []


def test_what_was_not_saved_goes_first_and_whole_and_is_counted() -> None:
    cache = make(16)
    first, last = (
        cached(cache, b"1", A, index=0, save=SaveState.REFUSED),
        cached(cache, b"2", A, index=1, save=SaveState.REFUSED),
    )
    dropped = cached(cache, b"d", B)
    cache.standings.withdraw(B)
    assert cache.make_room(4 + 1, now=1)
    assert last.lost and here(last) == [] and len(here(first)) == 4, "half of it would be worth nothing"
    assert len(here(dropped)) == 4
    assert cache.make_room(8 + 1, now=1) and first.lost
    assert cache.purged == {Rank.UNSAVED: 8}


def test_what_several_sessions_share_stands_with_the_strongest() -> None:
    cache = make(8)
    shared, own = cached(cache, b"s", A), cached(cache, b"o", B)
    cache.want(shared, C)
    advise(cache, C)
    cache.standings.withdraw(A)
    assert cache.make_room(4, now=1)
    assert len(here(shared)) == 4 and here(own) == []
    cache.standings.withdraw(C)
    assert cache.standings.strongest(shared.sessions, 1)[0] == Rank.DROPPED


def test_of_many_owners_the_latest_are_remembered() -> None:
    cache = make(4)
    block = cached(cache, b"s", A)
    for n in range(MOST_OWNERS + 5):
        cache.want(block, SessionKey("t", str(n)))
    cache.want(block, B)
    assert len(block.sessions) == MOST_OWNERS and A not in block.sessions and B in block.sessions


def test_the_oldest_unused_hint_leaves_first_layer_by_layer() -> None:
    cache = make(16)
    spurious = [cached(cache, bytes([n]), SessionKey("t", str(n))) for n in range(3)]
    for n in range(3):
        advise(cache, SessionKey("t", str(n)), now=n)
    left = []
    while any(here(b) for b in spurious):
        before = [len(here(b)) for b in spurious]
        assert cache.make_room(cache.pool.free + 1, now=5)
        left.append(next(n for n in range(3) if len(here(spurious[n])) < before[n]))
    assert left == [0, 1, 2] * LAYERS


def test_a_standing_holds_from_the_request_to_the_end_of_its_turn() -> None:
    standings = Standings()
    standings.advise(A, -2, 10, 0)
    standings.came(A, 9)
    assert standings.of(A, 1000)[:2] == (Rank.ADVISED, 2), "a request that waits for room keeps what was fetched for it"
    standings.ended(A, 1001)
    assert standings.of(A, 1001) == (Rank.UNADVISED, 0, 1001)
    standings.withdraw(A)
    standings.came(A, 1002)
    assert standings.of(A, 1003)[0] == Rank.ADVISED, "it came after all"
    standings.advise(A, 0, 2000, 1004)
    standings.ended(A, 1005)
    assert standings.of(A, 1006)[0] == Rank.ADVISED, "the hint that came during the turn is for the next one"
    assert standings.of(A, 2000)[0] == Rank.DROPPED


def test_of_very_many_sessions_the_oldest_are_forgotten() -> None:
    standings = Standings()
    for n in range(MOST_SESSIONS + 1):
        standings.advise(SessionKey("t", str(n)), 0, math.inf, n)
    assert standings.of(SessionKey("t", "0"), 0) == (Rank.UNADVISED, 0, 0.0)
    assert standings.of(SessionKey("t", str(MOST_SESSIONS)), 0)[0] == Rank.ADVISED
    assert len(standings.advice) <= MOST_SESSIONS


def test_hinted_pages_are_used_or_wasted_once() -> None:
    cache = make(8)
    used, wasted = cached(cache, b"u", A, used_s=2), cached(cache, b"w", B, used_s=1)
    for block in (used, wasted):
        cache.hint(block, list(range(LAYERS)))
    cache.claim([used])
    cache.claim([used])
    assert cache.make_room(8, now=1)
    assert (cache.hints_used, cache.hints_wasted, cache.hits) == (4, 4, 8)


def test_what_is_urgent_comes_first_then_the_lowest_layers_of_all_sessions_then_the_soonest() -> None:
    offers = [Offer(A, [], 0, 0.0, 5.0, 9.0), Offer(B, [], -1, 0.0, 7.0, 9.0), Offer(C, [], 0, 0.0, 3.0, 9.0)]
    order = []
    for offer in in_order(offers, 3.5, lambda offer: offer.band < BANDS):
        order.append((offer.band, offer.session))
        offer.band += 1
    assert order == [(band, B) for band in range(BANDS)] + [
        (band, session) for band in range(BANDS) for session in (C, A)
    ]
    for layers in (1, 3, 4, 7, 32):
        assert [x for band in range(min(BANDS, layers)) for x in layers_of(band, layers)] == list(range(layers))
    assert list(layers_of(0, 7, 1)) == list(range(7))


SESSIONS = [SessionKey("t", name) for name in "uvwxyz"]
NOW_S = 50.0


def draw_standings(data: st.DataObject, cache: HbmCache) -> None:
    """Give each of SESSIONS a last use before NOW_S and any class and priority."""
    for session in SESSIONS:
        cache.standings.used(session, data.draw(st.integers(0, 40)))
        fate = data.draw(st.sampled_from(["plain", "advised", "expired", "withdrawn"]))
        if fate != "plain":
            cache.standings.advise(
                session, data.draw(st.integers(-2, 2)), 45 if fate == "expired" else 100, data.draw(st.integers(0, 40))
            )
        if fate == "withdrawn":
            cache.standings.withdraw(session)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), by_layer=st.booleans())
def test_the_vectorised_order_is_a_sort_by_victim_key(data: st.DataObject, by_layer: bool) -> None:
    """No tenant is within its share and everything is saved. Pages with equal keys may leave in any order.

    Positions are unique without layer priority, where whole chunks leave: of two chunks with equal keys but for the
    layer, one leaves first, while a plain sort would alternate between them.
    """
    cache = make(64)
    draw_standings(data, cache)
    blocks: list[Block] = []
    for position in data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=12, unique=not by_layer)):
        layers = data.draw(st.sets(st.integers(0, LAYERS - 1), min_size=1))
        block = cache.new_block(position, data.draw(st.sampled_from(SESSIONS)), layers)
        block.ready[list(layers)] = True
        cache.mark(block, SaveState.BELOW)
        cache.enter(block, bytes([len(blocks)]))
        if data.draw(st.booleans()):
            cache.want(block, data.draw(st.sampled_from(SESSIONS)))
        if data.draw(st.integers(0, 4)) == 0:
            cache.use(block)
        blocks.append(block)
    found = victims(blocks, cache.standings, NOW_S, by_layer=by_layer, hold_hinted=False, below=None)

    def key(block: Block, layer: int) -> VictimKey:
        standing = cache.standings.strongest(block.sessions, NOW_S)
        return victim_key(standing, unsaved=False, layer=layer, position=block.index, by_layer=by_layer)

    expected = sorted(key(block, layer) for block in blocks if not block.users for layer in here(block))
    assert found.total == found.pages == len(expected)
    before: set[tuple[int, int]] = set()
    for count in range(len(expected) + 2):
        chosen = found.first(count)
        pages = {(id(block), layer): (block, layer) for _, block, layers in chosen for layer in layers}
        assert sorted(key(*page) for page in pages.values()) == expected[:count]
        assert before <= pages.keys() and sum(len(layers) for _, _, layers in chosen) == len(pages)
        assert all(rank == cache.standings.strongest(block.sessions, NOW_S).rank for rank, block, _ in chosen)
        before = set(pages)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_mix_leaves_in_the_order_of_the_design(data: st.DataObject) -> None:
    cache, now = make(64), NOW_S
    draw_standings(data, cache)
    blocks: list[Block] = []
    for n in range(data.draw(st.integers(1, 16))):
        block = cache.new_block(data.draw(st.integers(0, 5)), data.draw(st.sampled_from(SESSIONS)), range(LAYERS))
        block.ready[:] = True
        cache.mark(
            block,
            data.draw(
                st.sampled_from(
                    [SaveState.BELOW, SaveState.BELOW, SaveState.BELOW, SaveState.WAITING, SaveState.REFUSED]
                )
            ),
        )
        cache.enter(block, bytes([n]))
        if data.draw(st.integers(0, 3)) == 0:
            cache.want(block, data.draw(st.sampled_from(SESSIONS)))
        if data.draw(st.integers(0, 4)) == 0:
            cache.use(block)
        if data.draw(st.integers(0, 6)) == 0:
            cache.pin(block)
        blocks.append(block)
    cache.layer_priority = data.draw(st.booleans())
    below = data.draw(st.none() | st.tuples(st.sampled_from(sorted(Rank)), st.integers(-2, 2), st.integers(-LAYERS, 1)))
    free_to_go = [b for b in blocks if not b.users and not b.moving and b.save is not SaveState.WAITING]
    unsaved = [b for b in free_to_go if b.save is SaveState.REFUSED]

    def standing(block: Block) -> tuple[int, int, float]:
        return cache.standings.strongest(block.sessions, now)

    def place(block: Block, layer: int) -> tuple[float, ...]:
        rank, urgency, used_s = standing(block)
        return (
            (rank, urgency, -layer, used_s, -block.index)
            if cache.layer_priority
            else (rank, urgency, used_s, -block.index)
        )

    saved = [
        (b, n)
        for b in free_to_go
        if b.save is SaveState.BELOW
        for n in range(LAYERS)
        if below is None or (*standing(b)[:2], -n) < below
    ]
    places = {(id(b), layer): place(b, layer) for b, layer in saved}
    short = data.draw(st.integers(1, 64))
    could = len(saved) + LAYERS * len(unsaved)
    assert below is None or cache.room(now, below) == cache.pool.free + could
    possible = short <= could
    assert cache.make_room(cache.pool.free + short, now, below) == possible
    gone = {(id(b), int(layer)) for b in blocks for layer in np.flatnonzero(b.pages < 0)}
    if not possible:
        assert not gone
        return
    whole = [b for b in unsaved if b.lost]
    assert len(whole) == min(len(unsaved), -(-short // LAYERS)), (
        "unsaved blocks go whole, and no more of them than needed"
    )
    assert all(b in free_to_go for b in blocks if (id(b), 3) in gone or (id(b), 0) in gone)
    assert gone <= places.keys() | {(id(b), layer) for b in whole for layer in range(LAYERS)}, (
        "nothing leaves that stands too high"
    )
    left = [places[v] for v in gone if v in places]
    stayed = [place for v, place in places.items() if v not in gone]
    assert not left or not stayed or max(left) <= min(stayed), "nothing stays that ranks under what left"
    assert all((id(b), n + 1) in gone or (id(b), n) not in gone for b, n in saved if n + 1 < LAYERS), (
        "a chunk loses its last layers first"
    )
    spare = 0 if below is not None else cache.pool.total // 64
    assert len(left) in (max(0, short - LAYERS * len(whole)), spare), (
        "no more leaves than was asked for, or a few in advance"
    )
    cache.validate(blocks)


# ---- several tenants -------------------------------------------------------------------------------------------
MINE, YOURS, FLOOD = SessionKey("mine", "a"), SessionKey("yours", "a"), SessionKey("flood", "a")


def test_what_a_tenant_keeps_in_its_part_outlives_the_hinted_and_newer_cache_of_one_beyond_its_own() -> None:
    cache = make(16)
    mine = cached(cache, b"m", MINE, used_s=1)
    flood = [cached(cache, bytes([n]), FLOOD, index=n, used_s=9) for n in range(3)]
    advise(cache, FLOOD, priority=-5, now=9)
    assert cache.make_room(10, now=10)
    assert len(here(mine)) == 4 and sum(len(here(block)) for block in flood) <= 2
    cache.validate()


def test_parts_are_by_weight_and_only_of_those_who_use_their_caches() -> None:
    for weight, now, stays in ((1.0, 10, 4), (0.25, 10, 0), (1.0, 10 + KEPT_S, 3)):
        cache = make(16)
        mine = cached(cache, b"m", MINE, used_s=1)
        for n in range(3):
            cached(cache, bytes([n]), FLOOD, index=n, used_s=now)
        cache.standings.weigh("mine", weight)
        assert cache.make_room(4, now=now) and len(here(mine)) == stays


def test_a_prefetch_of_a_tenant_beyond_its_part_takes_nothing_that_others_keep() -> None:
    cache = make(16)
    mine, flood = (
        cached(cache, b"m", MINE, used_s=1),
        [cached(cache, bytes([n]), FLOOD, index=n, used_s=9) for n in range(3)],
    )
    for block in flood:
        cache.use(block)
    below = (Rank.ADVISED, 0, 0)
    assert cache.room(10, below, "flood") == 0 and not cache.make_room(1, 10, below, "flood")
    assert cache.room(10, below, "yours") == 0, "it has no part here yet"
    assert cache.room(10, below, "mine") == 4 and cache.make_room(1, 10, below, "mine")
    assert len(here(mine)) == 3


def test_one_tenant_alone_has_everything_and_the_usual_order() -> None:
    cache = make(16)
    blocks = [cached(cache, bytes([n]), FLOOD if n else MINE, index=n, used_s=n * 1000.0) for n in range(4)]
    assert within_parts(blocks, cache.standings, 3000, 16, lambda tenant: 1.0) == frozenset(), (
        "the other has not been here for long"
    )
    assert cache.make_room(4, now=3000)
    assert [len(here(block)) for block in blocks] == [3, 3, 3, 3]
