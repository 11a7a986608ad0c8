"""When a tier is left alone, and how it comes back: the state machine, what the meter tells it, and what the core does
then."""

from __future__ import annotations

import pytest

from contracts.errors import IllegalTransition
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import Fault, TierChannel, Wrote
from kvstore.core.health import Health
from kvstore.core.meter import Meter
from kvstore.core.rates import SSD
from kvstore.core.state import TIER_MOVES, TierState, move
from tests.kvstore.test_core_decisions import KEYS, SESSION, SHAPE, copies, make, of, save, wanted

MIB = 1 << 20


# ---- the state machine


def health() -> tuple[Health, list[do.Instruction]]:
    out: list[do.Instruction] = []
    return Health(out), out


def changes(out: list[do.Instruction]) -> list[tuple[TierChannel, bool]]:
    return [(i.tier, i.up) for i in out if isinstance(i, do.TierChanged)]


def test_a_tier_comes_back_only_through_a_trial():
    assert set(TIER_MOVES) == set(TierState)
    for old, new in ((TierState.DEGRADED, TierState.HEALTHY), (TierState.HEALTHY, TierState.TRIAL)):
        with pytest.raises(IllegalTransition):
            move(TIER_MOVES, old, new)


def test_a_few_failures_in_a_row_degrade_and_a_success_between_them_does_not():
    h, out = health()
    for now in (0.0, 0.1):
        h.bad(TierChannel.BLOB_READ, "r", now, now)
    h.good(TierChannel.BLOB_READ, 0.2, 0.2)
    for now in (0.3, 0.4):
        h.bad(TierChannel.BLOB_READ, "r", now, now)
    assert h.usable(TierChannel.BLOB_READ) and not changes(out)
    h.bad(TierChannel.BLOB_READ, "r", 0.5, 0.5)
    assert not h.usable(TierChannel.BLOB_READ) and changes(out) == [(TierChannel.BLOB_READ, False)]
    assert h.usable(TierChannel.BLOB_WRITE), "reading and writing are judged apart"
    h.validate()


def test_a_failure_that_says_that_more_will_follow_degrades_at_once():
    h, _ = health()
    h.bad(TierChannel.SSD_WRITE, "full", 0.0, 0.0, at_once=True)
    assert h.state(TierChannel.SSD_WRITE) is TierState.DEGRADED


def test_after_a_pause_there_is_one_trial_and_it_decides():
    h, out = health()
    h.bad(TierChannel.SSD_WRITE, "full", 0.0, 0.0, at_once=True)
    assert h.due(0.5) == []
    assert h.due(1.0) == [TierChannel.SSD_WRITE] and h.due(1.1) == []
    assert not h.usable(TierChannel.SSD_WRITE), "nothing but the trial uses it"
    h.good(TierChannel.SSD_WRITE, 1.0, 1.2)
    assert h.usable(TierChannel.SSD_WRITE)
    assert changes(out) == [(TierChannel.SSD_WRITE, False), (TierChannel.SSD_WRITE, True)]


def test_what_was_begun_before_the_trial_decides_nothing():
    h, _ = health()
    h.bad(TierChannel.SSD_READ, "r", 0.0, 0.0, at_once=True)
    h.good(TierChannel.SSD_READ, 0.0, 0.5)
    assert h.state(TierChannel.SSD_READ) is TierState.DEGRADED
    h.due(1.0)
    h.good(TierChannel.SSD_READ, 0.9, 1.1)
    h.bad(TierChannel.SSD_READ, "r", 0.9, 1.1)
    assert h.state(TierChannel.SSD_READ) is TierState.TRIAL


def test_every_failed_trial_doubles_the_pause_up_to_a_minute_and_says_nothing_more():
    h, out = health()
    h.bad(TierChannel.BLOB_WRITE, "r", 0.0, 0.0, at_once=True)
    now, pauses = 0.0, []
    for _ in range(9):
        began = now
        while not h.due(now):
            now += 0.25
        pauses.append(now - began)
        h.bad(TierChannel.BLOB_WRITE, "r", now, now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(changes(out)) == 1
    h.validate()


def test_a_tier_that_fails_again_soon_is_left_alone_for_longer_and_after_long_health_for_as_long_as_at_first():
    h, _ = health()
    h.bad(TierChannel.SSD_READ, "r", 0.0, 0.0, at_once=True)
    h.due(1.0)
    h.good(TierChannel.SSD_READ, 1.0, 1.0)
    h.bad(TierChannel.SSD_READ, "r", 2.0, 2.0, at_once=True)
    assert h.due(3.5) == [] and h.due(4.0) == [TierChannel.SSD_READ]
    h.good(TierChannel.SSD_READ, 4.0, 4.0)
    h.bad(TierChannel.SSD_READ, "r", 500.0, 500.0, at_once=True)
    assert h.due(501.0) == [TierChannel.SSD_READ]


def test_a_trial_that_never_ends_is_given_up():
    h, _ = health()
    h.bad(TierChannel.BLOB_READ, "r", 0.0, 0.0, at_once=True)
    h.due(1.0)
    h.due(60.0)
    assert h.state(TierChannel.BLOB_READ) is TierState.DEGRADED


def test_slow_for_a_while_degrades_but_not_many_slow_ones_that_end_together():
    h, _ = health()
    for _ in range(10):
        h.slow(TierChannel.SSD_READ, "slow", 0.0, 1.0)
    assert h.usable(TierChannel.SSD_READ), "that was one hiccup of the machine"
    h.slow(TierChannel.SSD_READ, "slow", 1.0, 2.0)
    assert not h.usable(TierChannel.SSD_READ)


# ---- what counts


def meter() -> Meter:
    return Meter([])


def read(m: Meter, took_s: float, faults: tuple[Fault, ...] = ()) -> None:
    began, before = m.now, m.rates.moved(SSD)
    m.now += took_s
    m.fetched(SSD, MIB, began, before, faults)


def test_a_disk_a_hundred_times_slower_than_usual_is_left_alone_and_one_that_is_always_that_slow_is_not():
    m = meter()
    for _ in range(50):
        read(m, 0.01)
    for _ in range(4):
        read(m, 1.0)
    assert not m.admits(TierChannel.SSD_READ)
    steady = meter()
    for _ in range(50):
        read(steady, 0.03)
    assert steady.admits(TierChannel.SSD_READ)


def test_corrupt_and_missing_pieces_are_answers_of_a_disk_that_works():
    m = meter()
    for _ in range(10):
        read(m, 0.01, (Fault.CORRUPT,))
        read(m, 0.01, (Fault.MISSING,))
    assert m.admits(TierChannel.SSD_READ)
    for _ in range(3):
        read(m, 0.01, (Fault.MEDIUM,))
    assert not m.admits(TierChannel.SSD_READ)


@pytest.mark.parametrize("outcome", [Wrote.FULL, Wrote.READ_ONLY, Wrote.BROKEN])
def test_a_full_read_only_or_broken_disk_is_not_written_any_more_after_the_first_error(outcome):
    m = meter()
    m.write_began(TierChannel.SSD_WRITE, b"k")
    m.written(TierChannel.SSD_WRITE, b"k", MIB, outcome)
    assert not m.admits(TierChannel.SSD_WRITE) and m.admits(TierChannel.SSD_READ)


def test_what_was_not_tried_says_nothing():
    m = meter()
    for _ in range(9):
        m.write_began(TierChannel.BLOB_WRITE, b"k")
        m.written(TierChannel.BLOB_WRITE, b"k", MIB, Wrote.NOT_TRIED)
    assert m.admits(TierChannel.BLOB_WRITE)


def test_a_disk_that_takes_writes_and_never_ends_them_is_left_alone():
    m = meter()
    m.write_began(TierChannel.SSD_WRITE, b"k")
    m.now = 5.0
    m.tick()
    assert m.admits(TierChannel.SSD_WRITE)
    m.now = 9.0
    m.tick()
    assert not m.admits(TierChannel.SSD_WRITE)


# ---- what follows


def full_disk(store):
    """One save that finds the disk full; what the core said then."""
    (write,) = of(do.WriteSsd, save(store, 1, KEYS[:1]))
    return store.handle(ev.SsdWritten(write.key, Wrote.FULL, 0.0))


def test_while_the_disk_is_full_saves_go_from_the_arena_to_the_blob_tier():
    store = make()
    out = full_disk(store)
    assert [(c.tier, c.up) for c in of(do.TierChanged, out)] == [(TierChannel.SSD_WRITE, False)]
    assert of(do.WriteBlob, out)[0].offsets
    later = save(store, 2, KEYS[1:3])
    assert not of(do.WriteSsd, later) and [b.key for b in of(do.WriteBlob, later)] == KEYS[1:3]
    assert all(b.offsets for b in of(do.WriteBlob, later))
    store.validate()


def test_when_the_disk_has_room_again_it_gets_what_it_is_owed_little_by_little():
    store = make()
    full_disk(store)
    save(store, 2, KEYS[1:3])
    (trial,) = of(do.TryTier, store.handle(ev.Tick(1.5)))
    assert trial == do.TryTier(TierChannel.SSD_WRITE, SHAPE.chunk_bytes)
    assert store.busy, "time must go on passing while a tier is away"
    out = store.handle(ev.TierTried(TierChannel.SSD_WRITE, Wrote.OK, SHAPE.chunk_bytes, 1.6))
    assert [(c.tier, c.up) for c in of(do.TierChanged, out)] == [(TierChannel.SSD_WRITE, True)]
    paid = []
    while writes := of(do.WriteSsd, out):
        (write,) = writes
        paid.append(write.key)
        out = store.handle(ev.SsdWritten(write.key, Wrote.OK, 1.7))
    assert paid == KEYS[:3]
    store.validate()


def test_what_no_tier_takes_is_the_first_to_make_room_and_blocks_nothing():
    store = make(slots=4)
    full_disk(store)
    store.handle(ev.BlobWritten(KEYS[0], Wrote.FULL, 0.1))
    assert not of(do.WriteBlob, save(store, 2, KEYS[1:2]))
    assert store.saves.waiting_bytes == 0
    assert of(do.Grant, store.handle(ev.SaveWanted(("w", 3), SESSION, SHAPE.fingerprint, KEYS[2:4], 0.2)))[
        0
    ].indices == (0, 1)
    store.validate()


def test_after_an_outage_of_the_blob_tier_it_gets_what_only_the_ssd_has_without_a_restart():
    store = make()
    for number, key in enumerate(KEYS[:3]):
        (write,) = of(do.WriteSsd, save(store, number, [key]))
        for blob in of(do.WriteBlob, store.handle(ev.SsdWritten(write.key, Wrote.OK, 0.0))):
            store.handle(ev.BlobWritten(blob.key, Wrote.BROKEN, 0.1))
    assert not store.meter.admits(TierChannel.BLOB_WRITE)
    assert [t.tier for t in of(do.TryTier, store.handle(ev.Tick(2.0)))] == [TierChannel.BLOB_WRITE]
    out = store.handle(ev.TierTried(TierChannel.BLOB_WRITE, Wrote.OK, 0, 2.1))
    paid = []
    while writes := of(do.WriteBlob, out):
        paid.append(writes[0].key)
        out = store.handle(ev.BlobWritten(writes[0].key, Wrote.OK, 2.2))
    assert sorted(paid) == sorted(KEYS[:3])
    store.validate()


def failing_ssd():
    """A store whose SSD has the first four chunks and has just been given up, and what a load of them was told
    meanwhile."""
    store = make(slots=32)
    store.handle(ev.Recovered(copies(KEYS[:4])))
    out = store.handle(wanted(1, KEYS[:4]))
    told = list(out)
    for fetch in of(do.Fetch, out)[:3]:
        told += store.handle(ev.FetchDone(fetch.fetch, dict.fromkeys(range(len(fetch.pieces)), Fault.MEDIUM), 1.1))
        store.validate()
    return store, told


def test_when_the_disk_fails_a_load_turns_to_the_blob_tier_and_the_disk_is_not_read():
    store, told = failing_ssd()
    assert not store.meter.admits(TierChannel.SSD_READ)
    probed = {key for probe in of(do.Probe, told) for key in probe.keys}
    assert probed, "the blob tier is asked for what the disk did not give"
    again = store.handle(wanted(2, KEYS[:4], now=1.2))
    assert not [f for f in of(do.Fetch, again) if f.kind is ev.SourceKind.SSD]
    store.validate()


def test_a_broken_disk_costs_no_copies_beyond_the_first_failures():
    store, told = failing_ssd()
    assert len(of(do.DeleteSsd, told)) <= 2
    assert sum(c.ssd.name == "PRESENT" for c in store.index.chunks.values()) >= 2


def test_a_disk_is_tried_by_a_read_that_nobody_waits_for_and_comes_back_with_it():
    store, _ = failing_ssd()
    store.handle(ev.WorkerGone("w", 1.2))
    for fetch in [*store.fetches._running]:
        store.handle(ev.FetchDone(fetch, {0: Fault.UNAVAILABLE}, 1.3))
    (trial,) = of(do.Fetch, store.handle(ev.Tick(3.0)))
    assert trial.kind is ev.SourceKind.SSD and len(trial.pieces) == 1
    out = store.handle(ev.FetchDone(trial.fetch, {}, 3.1))
    assert [(c.tier, c.up) for c in of(do.TierChanged, out)] == [(TierChannel.SSD_READ, True)]
    store.validate()


def test_with_the_blob_tier_away_unknown_prompts_are_misses_at_once():
    store = make()
    (probe,) = of(do.Probe, store.handle(wanted(1, KEYS[:1])))
    store.handle(ev.Probed(probe.load, probe.keys, [], 2.0, failed=1))
    for number in (2, 3):
        (probe,) = of(do.Probe, store.handle(wanted(number, KEYS[:1], now=3.0)))
        store.handle(ev.Probed(probe.load, probe.keys, [], 4.0, failed=1))
    out = store.handle(wanted(4, KEYS, now=5.0))
    assert not of(do.Probe, out) and [e.usable for e in of(do.End, out)] == [0]


def test_what_lies_on_an_unreadable_disk_may_be_saved_again_so_that_the_arena_has_it():
    store, _ = failing_ssd()
    store.handle(ev.WorkerGone("w", 1.2))
    for fetch in [*store.fetches._running]:
        store.handle(ev.FetchDone(fetch, {0: Fault.UNAVAILABLE}, 1.3))
    store.handle(ev.ShapesDeclared("w", [SHAPE], 1.4))
    key = next(k for k, c in store.index.chunks.items() if c.ssd.name == "PRESENT")
    assert not of(do.WriteSsd, save(store, 9, [key]))
    assert store.index.chunks[key].complete
    store.validate()


def test_an_ssd_that_could_not_be_recovered_is_recovered_by_its_trial():
    store = make()
    store.handle(ev.TierFailed(TierChannel.SSD_READ, "no directory", 0.0))
    assert of(do.TryTier, store.handle(ev.Tick(1.5)))[0].tier is TierChannel.SSD_READ
    store.handle(ev.Recovered(copies(KEYS[:2])))
    store.handle(ev.TierTried(TierChannel.SSD_READ, Wrote.OK, 0, 1.6))
    store.handle(ev.ManifestsListed([Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 1.0)], 1.7))
    assert of(do.Fetch, store.handle(wanted(1, KEYS[:2], now=2.0)))
