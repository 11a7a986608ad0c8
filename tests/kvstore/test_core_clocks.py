"""Nodes whose wall clocks differ by an hour: the newest manifest, what an erasure ends, and what has been idle are not
mistaken."""

from __future__ import annotations

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.store import Store
from kvstore.core.tombstone import Tombstone
from kvstore.upkeep import Unchanged

SHAPE = KvShape.of_heads(b"f" * 32, 2, 1, 8, 16, "float32")
SESSION = SessionKey("t", "s")
KEYS = [bytes([i]) * 32 for i in range(8)]
NOON, HOUR_S, DAY_S = 1.76e9, 3600.0, 86_400.0


def manifest(chunks: int, wall: float, first: int = 0) -> Manifest:
    return Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[first : first + chunks], 16 * chunks, wall)


def store(name: str = "node-0") -> Store:
    made = Store(name, 64 * 4096, write_back_limit_bytes=1 << 20)
    made.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    return made


def put(out: list) -> Manifest:
    (found,) = [i.manifest for i in out if isinstance(i, do.PutManifest)]
    return found


def told(out: list) -> Tombstone:
    (found,) = [i.tombstone for i in out if isinstance(i, do.PutTombstone)]
    return found


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_the_later_turn_is_the_newer_manifest_on_both_nodes_whichever_clock_is_wrong(ahead_s: float) -> None:
    first, second = store("node-0"), store("node-1")
    one = put(first.handle(ev.TurnEnded(manifest(1, NOON + ahead_s), 1.0)))
    second.handle(ev.ManifestFetched(SESSION, one, 2.0))
    two = put(second.handle(ev.TurnEnded(manifest(2, NOON + 60), 3.0)))
    assert two.last_use_s > one.last_use_s
    first.handle(ev.ManifestsListed([two], 4.0, True, NOON + ahead_s + 90))
    assert len(first.index.manifests[SESSION].keys) == 2
    second.handle(ev.ManifestsListed([one], 5.0, True, NOON + 90))
    assert len(second.index.manifests[SESSION].keys) == 2
    three = put(first.handle(ev.TurnEnded(manifest(3, NOON + ahead_s + 120), 6.0)))
    assert three.last_use_s > two.last_use_s


def test_a_turn_of_a_session_that_others_have_served_reads_its_manifest_first() -> None:
    s = store()
    s.handle(ev.ManifestsListed([manifest(1, NOON)], 0.0, True, NOON))

    def wanted(*sources: str) -> list:
        load = ev.LoadWanted(
            ("w", "1"), ev.LoadKind.DEMAND, SESSION, SHAPE.fingerprint, [(KEYS[0], ())], sources, 0, 1.0
        )
        out = [i for i in s.handle(load) if isinstance(i, do.FetchManifest)]
        s.handle(ev.LoadCancelled(("w", "1"), 1.0))
        return out

    assert not wanted() and not wanted("node-0"), "nobody else has it"
    assert wanted("node-1") == [do.FetchManifest(SESSION)]
    assert not wanted("node-1"), "it is under way"
    s.handle(ev.ManifestFetched(SESSION, manifest(2, NOON + HOUR_S), 2.0))
    assert len(s.index.manifests[SESSION].keys) == 2


def test_a_session_whose_node_was_an_hour_ahead_stays_erased_on_a_node_that_was_away() -> None:
    ahead = manifest(2, NOON + HOUR_S)
    eraser, away = store("node-0"), store("node-1")
    for s in (eraser, away):
        s.handle(ev.ManifestsListed([ahead], 0.0, True, NOON))
    tombstone = told(eraser.handle(ev.SessionErased(SESSION, 10.0)))
    away.handle(ev.TombstonesListed([tombstone], 20.0))
    assert SESSION not in away.index.manifests
    late = store("node-2")
    late.handle(ev.TombstonesListed([tombstone], 20.0))
    late.handle(ev.ManifestsListed([ahead], 21.0, True, NOON + 21))
    assert SESSION not in late.index.manifests, "and is not learned again from what the blob tier still lists"


@pytest.mark.parametrize("jump_s", [-30 * DAY_S, -HOUR_S, 0.0, HOUR_S, 30 * DAY_S])
def test_a_session_that_is_used_again_after_its_erasure_lives_and_the_erased_one_does_not_wherever_a_clock_jumps(
    jump_s: float,
) -> None:
    s, other = store("node-0"), store("node-1")
    s.handle(ev.ManifestsListed([manifest(2, NOON)], 0.0, True, NOON))
    tombstone = told(s.handle(ev.SessionErased(SESSION, 10.0)))
    again = put(s.handle(ev.TurnEnded(manifest(2, NOON + jump_s, first=4), 11.0)))
    for each in (s, other):
        each.handle(ev.TombstonesListed([tombstone], 30.0))
        each.handle(ev.ManifestsListed([again, manifest(3, NOON + 2 * abs(jump_s) + 1)], 31.0, True, NOON + jump_s))
        assert each.index.manifests[SESSION].keys == KEYS[4:6]
        each.validate()


def test_idle_is_what_has_not_changed_for_as_long_as_seen_from_here() -> None:
    watch = Unchanged(most=1)

    def listed(now: float, *manifests: Manifest) -> None:
        watch.begin()
        for m in manifests:
            watch.note(m, now)

    listed(100.0, manifest(1, NOON))
    listed(150.0, manifest(1, NOON), Manifest(SessionKey("t", "other"), "m", b"f" * 32))
    assert watch.seconds(SESSION, 160.0) == 60.0
    assert watch.longer_than(50.0, 160.0) == [SESSION], "no more are watched at a time"
    listed(200.0, manifest(2, NOON - HOUR_S))
    assert watch.seconds(SESSION, 210.0) == 10.0, "another time is a use, even one that seems earlier"
    listed(300.0)
    listed(400.0, manifest(2, NOON - HOUR_S))
    assert watch.seconds(SESSION, 400.0) == 0.0
