"""What hints were good for, and where requests found their bytes: each sum as a sentence."""

from __future__ import annotations

from collections import Counter

from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind
from kvstore.core.store import Store
from tests.kvstore.test_core_decisions import KEYS, OTHER, SESSION, SHAPE, copies, make, of, wanted

PIECE = SHAPE.piece_bytes


class Sums:
    """A store on whose SSD four chunks of two sessions lie, with its labelled sums."""

    def __init__(self, slots: int = 16) -> None:
        self.store: Store = make(slots)
        self.sums: Counter[tuple[str, ...]] = Counter()
        self.handle(ev.Recovered(copies(KEYS[:4])))
        for session, keys in ((SESSION, KEYS[:2]), (OTHER, KEYS[2:4])):
            self.handle(ev.ManifestsListed([Manifest(session, "m", SHAPE.fingerprint, keys, 32, 1.0)], 0.0))

    def handle(self, event: ev.Event) -> list[do.Instruction]:
        out = self.store.handle(event)
        for counted in of(do.Counted, out):
            self.sums[counted.what, *counted.labels] += counted.amount
        self.store.validate()
        return out

    def finish(self, out: list[do.Instruction]) -> None:
        for fetch in of(do.Fetch, out):
            self.finish(self.handle(ev.FetchDone(fetch.fetch, {}, 1.0)))


def hint(session=SESSION) -> ev.Advised:
    return ev.Advised(session, 0, 1.0, 60.0, (), 0.0)


def test_bytes_that_a_hint_brought_are_used_when_a_request_takes_them_and_only_once():
    s = Sums()
    s.finish(s.handle(hint()))
    assert not s.sums["hint_bytes", "used"]
    s.handle(wanted(1, KEYS[:2]))
    s.handle(wanted(2, KEYS[:2]))
    assert s.sums["hint_bytes", "used"] == 4 * PIECE
    assert s.sums["hit_bytes", "dram"] == 8 * PIECE


def test_bytes_that_the_worker_takes_into_hbm_are_used_and_no_hit_of_a_request():
    s = Sums()
    s.finish(s.handle(hint()))
    s.handle(wanted(1, KEYS[:2], LoadKind.PREFETCH))
    assert s.sums["hint_bytes", "used"] == 4 * PIECE
    assert not s.sums["hit_bytes", "dram"]


def test_bytes_are_late_when_the_request_comes_while_they_are_read_and_count_as_its_hit():
    s = Sums()
    running = s.handle(hint())
    s.handle(wanted(1, KEYS[:2]))
    s.finish(running)
    assert s.sums["hint_bytes", "late"] == s.sums["hit_bytes", "ssd"] == 4 * PIECE
    assert not s.sums["hint_bytes", "used"]


def test_bytes_are_wasted_when_they_make_room_before_anybody_took_them():
    s = Sums(slots=4)
    s.finish(s.handle(hint()))
    s.handle(ev.Invalidated(SESSION, 2.0))
    s.finish(s.handle(wanted(1, KEYS[2:4], session=OTHER, now=3.0)))
    assert s.sums["hint_bytes", "wasted"] == s.sums["evicted_bytes", "dram", "dropped"] == 4 * PIECE
    assert s.sums["hit_bytes", "ssd"] == 4 * PIECE


def test_hints_waste_while_what_they_bring_is_mostly_evicted_unused_and_for_a_while_after():
    s = Sums(slots=4)
    s.finish(s.handle(hint()))
    assert not s.store.usefulness.wasteful(1.0)
    s.handle(ev.Invalidated(SESSION, 2.0))
    s.finish(s.handle(wanted(1, KEYS[2:4], session=OTHER, now=3.0)))
    assert s.store.usefulness.wasteful(4.0)
    assert not any(s.store.usefulness.wasteful(now) for now in (120.0, 140.0))


def test_a_request_that_finds_less_than_it_wants_counts_what_it_missed():
    s = Sums()
    out = s.handle(wanted(1, [KEYS[0], KEYS[7]]))
    (probe,) = of(do.Probe, out)
    s.finish([*out, *s.handle(ev.Probed(probe.load, probe.keys, (), 1.0))])
    assert s.sums["chunks_missed",] == 1
    assert s.sums["hit_bytes", "ssd"] == 2 * PIECE
