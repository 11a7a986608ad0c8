"""When the chunks of a load will be here: by the queue of each source, what hints want behind, and what a peer says of
its own."""

from __future__ import annotations

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.arrivals import UNKNOWN
from kvstore.core.events import LoadKind, SourceKind
from kvstore.core.rates import PRIORS, SSD, Rates, Source
from kvstore.core.store import Store

SHAPE = KvShape.of_heads(b"f" * 32, 4, 2, 128, 64, "float32")  # pieces of 128 KiB
KEYS = [bytes([i]) * 32 for i in range(64)]
CHUNK = SHAPE.chunk_bytes


def store_with(ssd: int) -> Store:
    store = Store("node-0", 64 << 20, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    store.handle(ev.Recovered([ev.FoundCopy(key, SHAPE, (1, 2, 3, 4)) for key in KEYS[:ssd]]))
    measured(store, SSD)
    return store


def measured(store: Store, source: Source) -> None:
    """A read took what was believed."""
    rates = store.meter.rates
    rates.observe(source, CHUNK, rates.moved(source), rates.cost(source, 1.0).of(CHUNK), 1.0)


def want(store: Store, number: int, keys: list[bytes], kind: LoadKind = LoadKind.DEMAND, sources: tuple[str, ...] = ()):
    session = SessionKey("t", f"s{number}")
    event = ev.LoadWanted(
        ("w", str(number)), kind, session, SHAPE.fingerprint, [(key, ()) for key in keys], sources, 0, 1.0
    )
    return store.handle(event)


def found(out: list[do.Instruction]) -> do.Found:
    [one] = [i for i in out if isinstance(i, do.Found)]
    return one


def ssd_s(chunks: float) -> float:
    return PRIORS[SourceKind.SSD].of(chunks * CHUNK)


def test_a_chunk_is_due_after_those_before_it():
    due_s = found(want(store_with(8), 1, KEYS[:3])).due_s
    assert due_s == pytest.approx([ssd_s(1), ssd_s(2), ssd_s(3)])


def test_what_others_wait_for_comes_before_and_what_hints_want_behind():
    store = store_with(32)
    want(store, 1, KEYS[8:12], LoadKind.PREFETCH)
    assert store.meter.rates.ahead(SSD) == 4 * CHUNK
    assert found(want(store, 2, KEYS[:1])).due_s == pytest.approx([ssd_s(1)])
    assert found(want(store, 3, KEYS[4:5])).due_s == pytest.approx([ssd_s(2)])


def test_what_a_hint_has_begun_counts_as_its_own():
    store = store_with(8)
    want(store, 1, KEYS[:2], LoadKind.PREFETCH)
    assert found(want(store, 2, KEYS[:2])).due_s == pytest.approx([ssd_s(1), ssd_s(2)])


def test_what_is_here_is_due_at_once_and_a_hint_is_told_nothing():
    store = store_with(8)
    for fetch in [i for i in want(store, 1, KEYS[:1]) if isinstance(i, do.Fetch)]:
        store.handle(ev.FetchDone(fetch.fetch, {}, 1.0))
    assert found(want(store, 2, KEYS[:1])).due_s == (0.0,)
    assert found(want(store, 3, KEYS[:1], LoadKind.PREFETCH)).due_s == ()


def test_of_a_source_that_was_never_measured_nothing_is_said():
    store = Store("node-0", 64 << 20, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    store.handle(ev.Recovered([ev.FoundCopy(key, SHAPE, (1, 2, 3, 4)) for key in KEYS[:2]]))
    for fetch in [i for i in want(store, 1, KEYS[:1]) if isinstance(i, do.Fetch)]:
        store.handle(ev.FetchDone(fetch.fetch, {}, 1.0))
    store.meter.rates = Rates()
    assert found(want(store, 2, KEYS[:2])).due_s == (0.0, UNKNOWN), "the first is here"


@pytest.mark.parametrize(
    ("said", "in_dram", "believed"),
    [
        ((0.5, 2.0), (), (0.5, 2.0)),
        ((), (0, 1), (0.0, 0.0)),
        ((float("nan"), 1.0), (0,), (0.0, 1.0)),
        ((1e9, 1.0), (), None),
        ((), (), None),
    ],
)
def test_a_peer_says_when_it_has_it_and_the_way_here_comes_on_top(said, in_dram, believed):
    store = store_with(0)
    measured(store, Source(SourceKind.PEER, "node-1"))
    [ask] = [i for i in want(store, 1, KEYS[:2], sources=("node-1",)) if isinstance(i, do.AskPeer)]
    out = store.handle(ev.PeerHolds(ask.lease, [0, 1], 1.0, in_dram, said))
    if believed is None:
        assert found(out).due_s == (UNKNOWN, UNKNOWN)
        return
    way = store.meter.rates.cost(Source(SourceKind.PEER, "node-1"), 1.0)
    assert found(out).due_s == pytest.approx([believed[0] + way.of(CHUNK), believed[1] + way.of(2 * CHUNK)])


def test_a_peer_is_told_too():
    due_s = found(want(store_with(2), 1, KEYS[:2], LoadKind.PEER)).due_s
    assert due_s == pytest.approx([ssd_s(1), ssd_s(2)])
