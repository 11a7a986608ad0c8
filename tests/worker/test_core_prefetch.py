"""Hinted sessions' bands: what gets pages, in which order, and what is left where there is no room."""

from __future__ import annotations

import pytest

from contracts.ids import SessionKey
from tests.worker.test_core_hbm import LAYERS, A, B, cached, make
from worker.core import prefetch
from worker.core.hbm import HbmCache
from worker.core.prefetch import MOST_OFFERS, Band, Offer, Offers

NOW = 10.0


def offered(offers: Offers, name: str, chunks: int = 1, priority: int = 0, arrival_s: float = NOW + 5) -> SessionKey:
    session = SessionKey("t", name)
    keys = [f"{name} {i}".encode() for i in range(chunks)]
    offers._cache.standings.advise(session, priority, NOW + 60, NOW)
    offers.put(Offer(session, keys, priority, NOW - 10, arrival_s, NOW + 60))
    return session


def taken(offers: Offers) -> list[tuple[str, int, int]]:
    """(session, band, chunks) of all that can be taken; nobody reads them."""
    found = []
    while (band := offers.take(NOW)) is not None:
        assert all(block.hinted[layers].all() for block, layers in zip(band.blocks, band.layers, strict=True))
        for block in band.blocks:
            offers._cache.pin(block)
        found.append((band.offer.session.session_id, band.number, len(band.keys)))
    return found


def test_the_lowest_layers_of_all_are_taken_before_the_next_ones_of_any() -> None:
    offers = Offers(make(32))
    offered(offers, "later", 2, arrival_s=NOW + 8)
    offered(offers, "sooner", 1)
    assert taken(offers)[:4] == [("sooner", 0, 1), ("later", 0, 2), ("sooner", 1, 1), ("later", 1, 2)]
    assert not offers.waiting and not offers.stalled


def test_a_session_takes_as_many_of_its_first_chunks_as_there_is_room_for_and_waits_with_the_rest() -> None:
    cache = make(8)
    used = cached(cache, b"used", A)
    cache.use(used)
    offers = Offers(cache)
    session = offered(offers, "long", 9)
    assert taken(offers) == [("long", 0, 4)], "a page of each of four chunks"
    assert list(offers.stalled) == [session] and offers.stalled[session].no_room
    cache.release(used)
    assert taken(offers) == [], "until somebody says that there may be room"
    offers.try_again()
    assert taken(offers) == [("long", 0, 4)], "the pages that nobody uses any more give way"
    cache.validate()


def test_a_full_memory_is_searched_once_and_not_once_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(8)
    for name in (b"1", b"2"):
        cache.use(cached(cache, name, B))
    offers = Offers(cache)
    for n in range(20):
        offered(offers, f"s{n}", 3)
    searches, search = [0], HbmCache.make_room

    def counted(self: HbmCache, *args: object, **more: object) -> bool:
        searches[0] += 1
        return search(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(HbmCache, "make_room", counted)
    assert taken(offers) == [] and searches == [1] and len(offers.stalled) == 20


def test_a_session_that_is_here_already_does_not_wait_for_room() -> None:
    cache = make(8)
    for name in (b"here 0", b"other"):
        cache.use(cached(cache, name, B))
    offers = Offers(cache)
    lacking = offered(offers, "lacking", arrival_s=NOW + 1)
    offered(offers, "here", arrival_s=NOW + 2)
    assert taken(offers) == [] and list(offers.stalled) == [lacking] and not offers.waiting


def test_a_more_urgent_session_is_tried_although_others_found_no_room() -> None:
    cache = make(8)
    offers = Offers(cache)
    offered(offers, "plain", 8)
    first = offers.take(NOW)
    assert isinstance(first, Band) and len(first.keys) == 8
    for block in first.blocks:
        block.ready[first.layers[0]] = True
    assert taken(offers) == [] and offers.stalled, "memory is full of its first layers"
    offers.try_again()
    offered(offers, "urgent", 2, priority=-1)
    assert ("urgent", 0, 2) in taken(offers)


def test_pages_that_were_not_asked_for_are_counted() -> None:
    offers = Offers(make(32))
    offered(offers, "a", 3)
    offer = next(iter(offers.waiting.values()))
    assert offers.unasked(offer) == 3 * LAYERS
    offers.take(NOW)
    assert offers.unasked(offer) == 3 * (LAYERS - 1)
    assert offers.get(offer.session) is offer
    offers.forget(offer.session)
    assert offers.get(offer.session) is None


def test_of_a_tenant_with_too_many_offers_those_that_may_begin_last_are_dropped() -> None:
    offers = Offers(make(8))
    soon = offered(offers, "soon")
    for n in range(3 * MOST_OFFERS):
        offered(offers, f"far {n}", arrival_s=NOW + 1000 + n)
    other = SessionKey("other", "s")
    offers.put(Offer(other, [b"k"], 0, NOW, NOW + 9000, NOW + 9000))
    assert len(offers.waiting) == MOST_OFFERS + 1 and soon in offers.waiting and other in offers.waiting
    assert max(o.arrival_s for o in offers.waiting.values() if o.session != other) == NOW + 1000 + MOST_OFFERS - 2


def test_offers_that_are_not_due_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    offers, looks = Offers(make(8)), [0]
    for n in range(200):
        offered(offers, f"far {n}", arrival_s=NOW + 1000 + n)
    from_s = Offer.from_s.fget

    def counted(self: Offer) -> float:
        looks[0] += 1
        return from_s(self)  # type: ignore[misc]

    monkeypatch.setattr(Offer, "from_s", property(counted))
    for _ in range(10):
        assert offers.due_s() == NOW + 495 and offers.take(NOW) is None
    assert looks[0] <= 20
    offers.forget(SessionKey("t", "far 0"))
    assert offers.due_s() == NOW + 495.5


def test_many_offers_without_room_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(8)
    for name in (b"1", b"2"):
        cache.use(cached(cache, name, B))
    offers, looks, gaps = Offers(cache), [0], prefetch._gaps
    for n in range(300):
        offered(offers, f"s{n}", 100)

    def counted(*args: object) -> list[int]:
        looks[0] += 1
        return gaps(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(prefetch, "_gaps", counted)
    while offers.waiting:
        looks[0] = 0
        assert offers.due_s() <= NOW and offers.take(NOW) is None
        assert 0 < looks[0] < 10_000, "of 30,000"
    assert len(offers.stalled) == 300
