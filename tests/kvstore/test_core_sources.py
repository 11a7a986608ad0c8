"""Which source a load's pieces come from: whichever is estimated soonest, without flapping, without waiting for one
another."""

from __future__ import annotations

import pytest

from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind, SourceKind
from kvstore.core.rates import BLOB, SSD, Rates, Source
from kvstore.core.store import Store
from tests.kvstore.test_core_decisions import KEYS, SHAPE, copies, make, of, wanted

MIB = 1 << 20
PEER, PEER_DISK = Source(SourceKind.PEER, "node-1"), Source(SourceKind.PEER, "node-1", on_disk=True)


# ---- estimates


def measure(rates: Rates, source: Source, took_s: float, times: int = 20, now: float = 1.0, size: int = MIB) -> None:
    for _ in range(times):
        rates.observe(source, size, rates.moved(source), took_s, now)


def test_before_anything_is_measured_the_order_is_ssd_peers_arena_peers_ssd_blob():
    rates = Rates()
    estimates = [rates.estimate_s(s, MIB, 0.0) for s in (SSD, PEER, PEER_DISK, BLOB)]
    assert estimates == sorted(estimates)
    assert rates.soonest([SSD, PEER, BLOB], MIB, 0.0) == SSD


def test_estimates_follow_what_is_measured_whatever_the_sizes():
    rates = Rates()
    for i in range(200):
        size = MIB << i % 4
        rates.observe(SSD, size, rates.moved(SSD), 0.004 + size * 5e-9, 1.0)
    for size in (MIB, 16 * MIB):
        assert rates.estimate_s(SSD, size, 1.0) == pytest.approx(0.004 + size * 5e-9, rel=0.35)


def test_transfers_that_share_a_source_are_measured_together():
    alone, together = Rates(), Rates()
    measure(alone, SSD, 0.01, 50)
    for _ in range(50):  # five at a time, each of which takes five times as long
        before = together.moved(SSD)
        for _ in range(4):
            together.observe(SSD, MIB, together.moved(SSD) - MIB, 0.02, 1.0)
        together.observe(SSD, MIB, before, 0.05, 1.0)
    assert together.estimate_s(SSD, MIB, 1.0) == pytest.approx(alone.estimate_s(SSD, MIB, 1.0), rel=0.5)


def test_bytes_that_are_queued_ahead_count():
    rates = Rates()
    rates.queue(SSD, 400 * MIB)
    assert rates.soonest([SSD, PEER], MIB, 0.0) == PEER
    rates.queue(SSD, -400 * MIB)
    assert rates.soonest([SSD, PEER], MIB, 0.0) == SSD
    rates.validate()


def test_nearly_equal_sources_do_not_take_turns_and_ties_keep_the_order():
    rates = Rates()
    chosen = set()
    for i in range(50):
        measure(rates, SSD, 0.010 + 0.003 * (i % 2), 1)
        measure(rates, PEER, 0.0115, 1)
        chosen.add(rates.soonest([SSD, PEER], MIB, 1.0))
    assert chosen == {SSD}
    measure(rates, SSD, 0.05)
    assert rates.soonest([SSD, PEER], MIB, 1.0) == PEER
    chosen = set()
    for i in range(20):
        measure(rates, SSD, 0.014 + 0.004 * (i % 2), 8)
        chosen.add(rates.soonest([SSD, PEER], MIB, 1.0))
    assert chosen == {PEER}, "a lead once clear is kept until it is lost"
    measure(rates, SSD, 0.005)
    assert rates.soonest([SSD, PEER], MIB, 1.0) == SSD


def test_a_source_that_was_left_because_it_was_slow_is_tried_again_some_day():
    rates = Rates()
    measure(rates, SSD, 1.0)
    assert rates.soonest([SSD, BLOB], MIB, 1.0) == BLOB
    assert rates.soonest([SSD, BLOB], MIB, 600.0) == SSD


def test_a_failed_transfer_makes_its_source_slower_than_before():
    rates = Rates()
    before = rates.estimate_s(PEER, MIB, 1.0)
    rates.failed(PEER, MIB, 0.0001, 1.0)
    assert rates.estimate_s(PEER, MIB, 1.0) > before


# ---- what loads do with them


def slow(store: Store, source: Source, took_s: float = 1.0) -> None:
    measure(store.meter.rates, source, took_s, now=store.meter.now, size=SHAPE.chunk_bytes)


def ready(lease: str, indices: range | list[int], now: float) -> ev.PeerReady:
    return ev.PeerReady(lease, [(i, layer, 4096 * i, 7) for i in indices for layer in range(SHAPE.layers)], now)


def kinds(instructions: list) -> list[SourceKind]:
    return [f.kind for f in of(do.Fetch, instructions)]


def in_both_tiers(count: int = 2) -> Store:
    """A store whose SSD and whose blob tier have the first chunks, as far as it knows."""
    store = make(slots=64)
    store.handle(ev.Probed(("", ""), KEYS[:count], copies(KEYS[:count]), 0.5))
    store.handle(ev.Recovered(copies(KEYS[:count])))
    return store


def test_the_own_ssd_is_read_first_and_the_blob_tier_when_it_is_clearly_sooner():
    assert set(kinds(in_both_tiers().handle(wanted(1, KEYS[:2])))) == {SourceKind.SSD}
    store = in_both_tiers()
    slow(store, SSD)
    assert set(kinds(store.handle(wanted(1, KEYS[:2])))) == {SourceKind.BLOB}


def test_a_peer_is_asked_for_what_the_own_ssd_has_only_when_that_is_slow():
    store = in_both_tiers()
    assert not of(do.AskPeer, store.handle(wanted(1, KEYS[:2], sources=("node-1",))))
    store = in_both_tiers()
    slow(store, SSD)
    slow(store, BLOB)
    out = store.handle(wanted(1, KEYS[:2], sources=("node-1",)))
    (ask,) = of(do.AskPeer, out)
    assert not kinds(out) and [key for key, _ in ask.wants] == KEYS[:2]
    store.handle(ev.PeerHolds(ask.lease, (0, 1), 1.1, in_dram=(0, 1)))
    assert set(kinds(store.handle(ready(ask.lease, range(2), 1.2)))) == {SourceKind.PEER}
    store.validate()


def test_what_the_peer_must_read_from_its_slow_ssd_is_read_here():
    store = in_both_tiers()
    slow(store, SSD, 0.03)
    slow(store, BLOB)
    slow(store, PEER_DISK, 0.2)
    (ask,) = of(do.AskPeer, store.handle(wanted(1, KEYS[:2], sources=("node-1",))))
    out = store.handle(ev.PeerHolds(ask.lease, (0, 1), 1.1, in_dram=(1,)))
    assert [(f.kind, f.pieces[0].key) for f in of(do.Fetch, out)] == [(SourceKind.SSD, KEYS[0])]
    store.validate()


def test_a_very_slow_peer_is_asked_only_for_what_the_blob_tier_lacks():
    store = make(slots=64)
    slow(store, PEER, 5.0)
    out = store.handle(wanted(1, KEYS[:2], sources=("node-1",)))
    assert not of(do.AskPeer, out)
    while probes := of(do.Probe, out):
        (probe,) = probes
        found = copies([key for key in probe.keys if key == KEYS[0]])
        out = store.handle(ev.Probed(probe.load, probe.keys, found, 1.1))
    (ask,) = of(do.AskPeer, out)
    assert [key for key, _ in ask.wants] == KEYS[1:2]
    store.validate()


def test_of_several_peers_the_soonest_is_asked_first():
    store = make(slots=64)
    slow(store, PEER, 0.1)
    (ask,) = of(do.AskPeer, store.handle(wanted(1, KEYS[:2], sources=("node-1", "node-2"))))
    assert ask.peer == "node-2"


def test_a_peer_that_turns_out_slow_is_left_for_the_blob_tier():
    store = make(slots=64)
    (ask,) = of(do.AskPeer, store.handle(wanted(1, KEYS[:2], sources=("node-1",))))
    store.handle(ev.PeerHolds(ask.lease, (0, 1), 1.1))
    assert not of(do.Probe, store.handle(ev.Tick(1.3)))
    (probe,) = of(do.Probe, store.handle(ev.Tick(1.9)))
    assert set(probe.keys) == set(KEYS[:2])
    store.handle(ev.Probed(probe.load, probe.keys, copies(KEYS[:2]), 2.0))
    assert set(kinds(store.handle(ev.Tick(2.2)))) == {SourceKind.BLOB}
    store.validate()


def test_a_slow_peer_is_kept_when_nobody_else_has_it():
    store = make(slots=64)
    (ask,) = of(do.AskPeer, store.handle(wanted(1, KEYS[:2], sources=("node-1",))))
    store.handle(ev.PeerHolds(ask.lease, (0, 1), 1.1))
    (probe,) = of(do.Probe, store.handle(ev.Tick(1.9)))
    store.handle(ev.Probed(probe.load, probe.keys, [], 2.0))
    store.handle(ev.Tick(2.5))
    assert set(kinds(store.handle(ready(ask.lease, range(2), 2.6)))) == {SourceKind.PEER}
    store.validate()


def test_when_the_directory_was_wrong_the_next_source_is_asked():
    store = make(slots=64)
    (ask,) = of(do.AskPeer, store.handle(wanted(1, KEYS[:2], sources=("node-1", "node-2"))))
    (second,) = of(do.AskPeer, store.handle(ev.PeerHolds(ask.lease, (), 1.1)))
    assert second.peer == "node-2"
    assert of(do.Probe, store.handle(ev.PeerEnded(second.lease, False, 1.2)))
    store.validate()


def test_two_loads_that_want_a_piece_from_a_peer_share_one_read():
    store = make(slots=64)
    (ask,) = of(do.AskPeer, store.handle(wanted(1, KEYS[:1], sources=("node-1",))))
    store.handle(ev.PeerHolds(ask.lease, (0,), 1.1, in_dram=(0,)))
    assert not of(do.AskPeer, store.handle(wanted(2, KEYS[:1], sources=("node-1",), now=1.2)))
    (fetch,) = of(do.Fetch, store.handle(ready(ask.lease, [0], 1.3)))
    told = of(do.Pieces, store.handle(ev.FetchDone(fetch.fetch, {}, 1.4)))
    assert {p.load[1] for p in told} == {"1", "2"}
    store.validate()


def test_a_peer_never_waits_for_another_peers_lease():
    """Both nodes have it on slow disks and ask each other: each reads its own disk for the other, and for itself."""
    store = in_both_tiers(1)
    slow(store, SSD)
    slow(store, BLOB, 5.0)
    (ask,) = of(do.AskPeer, store.handle(wanted(1, KEYS[:1], sources=("node-1",))))
    store.handle(ev.PeerHolds(ask.lease, (0,), 1.1, in_dram=(0,)))
    assert store.index.chunks[KEYS[0]].state(0).name == "EXPECTED"
    fetches = of(do.Fetch, store.handle(wanted(2, KEYS[:1], LoadKind.PEER, session=None, now=1.2)))
    assert {f.kind for f in fetches} == {SourceKind.SSD}
    told = [p for f in fetches for p in of(do.Pieces, store.handle(ev.FetchDone(f.fetch, {}, 1.3)))]
    assert {p.load[1] for p in told} == {"1", "2"}
    store.validate()


def test_the_reader_is_told_which_chunks_are_in_the_owners_arena():
    store = make(slots=64)
    store.handle(ev.Recovered(copies(KEYS[:2])))
    for fetch in of(do.Fetch, store.handle(wanted(1, KEYS[1:2]))):
        store.handle(ev.FetchDone(fetch.fetch, {}, 1.1))
    (found,) = of(do.Found, store.handle(wanted(2, KEYS[:3], LoadKind.PEER, session=None, now=1.2)))
    assert (found.indices, found.in_arena) == ((0, 1), (1,))


# ---- many readers of one node


def reader(number: int, keys: list[bytes]) -> ev.LoadWanted:
    return ev.LoadWanted(
        (f"peer-{number}", "0"), LoadKind.PEER, None, SHAPE.fingerprint, [(k, ()) for k in keys], (), 0, 1.0
    )


def test_one_hot_prompt_may_be_read_by_many_up_to_a_number_and_the_next_is_refused_at_once():
    store = make(slots=64)
    store.handle(ev.Recovered(copies(KEYS[:2])))
    found = [of(do.Found, store.handle(reader(n, KEYS[:2])))[0].chunks for n in range(18)]
    assert found == [2] * 16 + [0] * 2
    store.handle(ev.WorkerGone("peer-0", 1.1))
    assert of(do.Found, store.handle(reader(99, KEYS[:2])))[0].chunks == 2
    store.validate()


def test_readers_of_different_prompts_pin_half_of_the_arena_at_most_and_the_first_is_always_served():
    store = make(slots=8)
    store.handle(ev.Recovered(copies(KEYS)))
    assert of(do.Found, store.handle(reader(0, KEYS[:2])))[0].chunks == 2
    keys = [bytes([i]) * 32 for i in range(32)]
    assert len(keys) * SHAPE.chunk_bytes > store.ledger.arena_bytes // 2
    store.handle(ev.Recovered(copies(keys)))
    assert of(do.Found, store.handle(reader(1, keys)))[0].chunks == 0
    alone = make(slots=8)
    alone.handle(ev.Recovered(copies(keys)))
    assert of(do.Found, alone.handle(reader(0, keys)))[0].chunks == len(keys)
