"""Prefetch keeps the pace it is given, and demand overtakes it."""

from __future__ import annotations

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind
from kvstore.core.pacing import ReadPacer
from kvstore.core.store import Store

SHAPE = KvShape.of_heads(b"f" * 32, 4, 2, 16, 64, "float32")  # pieces of 16 KiB, each of a band and a read of its own
KEYS = [bytes([i]) * 32 for i in range(16)]
SESSION = SessionKey("t", "s")
RATE = 1_000_000.0


def test_without_a_rate_nothing_waits():
    pace = ReadPacer()
    pace.started(1 << 40, 0.0)
    assert pace.wait_s(0.0) == 0.0


def test_the_rate_is_kept_over_time_and_a_pause_is_not_caught_up():
    pace, now = ReadPacer(RATE), 100.0
    for _ in range(200):
        now += pace.wait_s(now)
        pace.started(10_000, now)
    assert now - 100.0 == pytest.approx(200 * 0.01, abs=0.04)
    now += 1000.0
    begun = now
    for _ in range(100):
        now += pace.wait_s(now)
        pace.started(10_000, now)
    assert now - begun == pytest.approx(1.0, abs=0.04)


@pytest.fixture
def store():
    made = Store("node-0", 16 << 20, write_back_limit_bytes=1 << 20, prefetch_bytes_per_s=RATE)
    made.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    made.handle(ev.Recovered([ev.FoundCopy(key, SHAPE, (1, 2, 3, 4)) for key in KEYS]))
    made.handle(ev.ManifestsListed([Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:12], 768, 1.0)], 0.0))
    yield made
    made.validate()


def fetches(out):
    return [i for i in out if isinstance(i, do.Fetch)]


def test_an_advised_session_comes_at_the_rate_and_whole(store):
    now, brought = 1.0, 0
    running = fetches(store.handle(ev.Advised(SESSION, 0, 1.0, 600.0, (), now)))
    while running or store.fetches.resume_at is not None:
        for fetch in running:
            brought += len(fetch.pieces)
        running = [f for fetch in running for f in fetches(store.handle(ev.FetchDone(fetch.fetch, {}, now)))]
        if not running and store.fetches.resume_at is not None:
            now = store.fetches.resume_at
            running = fetches(store.handle(ev.Tick(now)))
    assert brought == 48
    assert now - 1.0 == pytest.approx(48 * SHAPE.piece_bytes / RATE, abs=0.05)


def test_a_request_does_not_wait_for_the_pace_of_a_prefetch(store):
    prefetch = fetches(store.handle(ev.Advised(SESSION, 0, 1.0, 600.0, (), 1.0)))
    assert 0 < len(prefetch) < 16 and store.fetches.resume_at is not None
    wants = [(key, ()) for key in KEYS[10:14]]  # two of them are the prefetch's, which waits
    demand = fetches(
        store.handle(ev.LoadWanted(("w", "1"), LoadKind.DEMAND, None, SHAPE.fingerprint, wants, (), 0, 1.0))
    )
    while True:
        more = [f for fetch in demand for f in fetches(store.handle(ev.FetchDone(fetch.fetch, {}, 1.0)))]
        if not more:
            break
        demand = more
    held = [layer for key in KEYS[10:14] for layer in range(4) if store.index.chunks[key].state(layer).name == "READY"]
    assert len(held) == 16
