"""Erasures that outlive the node that was told of them, and chunks that nobody names, as sentences."""

from __future__ import annotations

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import erasure
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.index import MOST_FORMER
from kvstore.core.state import CopyState
from kvstore.core.store import Store
from kvstore.core.tombstone import OpenErasure, Tombstone

SHAPE = KvShape.of_heads(b"f" * 32, 2, 1, 8, 16, "float32")
SESSION, OTHER = SessionKey("t", "s"), SessionKey("t", "o")
KEYS = [bytes([i]) * 32 for i in range(8)]
DAY = 86_400.0


def make(sessions: dict[SessionKey, list[bytes]], on_ssd: list[bytes], used: float = DAY) -> Store:
    store = Store("node-0", 64 * 4096, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    store.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, (1, 2)) for k in on_ssd]))
    manifests = [Manifest(s, "m", SHAPE.fingerprint, keys, 16 * len(keys), used) for s, keys in sessions.items()]
    store.handle(ev.ManifestsListed(manifests, 1.0, True, used))
    return store


def of(kind: type, instructions: list) -> list:
    return [i for i in instructions if isinstance(i, kind)]


def tombstone(keys: list[bytes], number: int = 1) -> Tombstone:
    return Tombstone(SESSION, number, dict.fromkeys(keys, SHAPE.fingerprint))


def listed(*tombstones: Tombstone, complete: bool = False) -> ev.TombstonesListed:
    return ev.TombstonesListed(tombstones, 2.0, complete)


def test_an_erasure_leaves_a_tombstone_of_what_only_it_named_before_the_manifest_goes():
    store = make({SESSION: KEYS[:3], OTHER: KEYS[:1]}, KEYS[:3])
    out = store.handle(ev.SessionErased(SESSION, 2.0))
    assert [type(i) for i in out if isinstance(i, do.PutTombstone | do.DeleteManifest)] == [
        do.PutTombstone,
        do.DeleteManifest,
    ]
    assert of(do.PutTombstone, out)[0].tombstone == tombstone(KEYS[1:3])
    assert [d.key for d in of(do.DeleteSsd, out)] == KEYS[1:3]
    assert store.erasure.left(KEYS[:3]) == {"dram": 0, "ssd": 0, "blob": 0}
    store.validate()


def test_a_node_that_was_cut_off_forgets_the_session_when_it_reads_the_tombstone():
    store = make({SESSION: KEYS[:3], OTHER: KEYS[:1]}, KEYS[:3])
    out = store.handle(listed(tombstone(KEYS[1:3])))
    assert SESSION not in store.index.manifests and OTHER in store.index.manifests
    assert [d.key for d in of(do.DeleteSsd, out)] == KEYS[1:3]
    assert sorted(of(do.TellErase, out)[0].keys) == KEYS[1:3]
    assert of(do.DeleteManifest, out), "what it may have written since is deleted"
    assert not of(do.DeleteBlob, out), "the same content may have been saved anew by another node"
    store.validate()


def test_a_node_that_was_down_removes_the_erased_chunks_that_its_ssd_still_has():
    store = make({OTHER: KEYS[:1]}, KEYS[:3])
    out = store.handle(listed(tombstone(KEYS[:3])))
    assert [d.key for d in of(do.DeleteSsd, out)] == KEYS[1:3]
    assert store.index.chunks[KEYS[0]].ssd is CopyState.PRESENT


def test_a_session_that_was_used_after_its_erasure_lives():
    store = make({}, KEYS[:2])
    store.handle(listed(tombstone(KEYS[:2], 7)))
    again = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 1.0, life=7)
    store.handle(ev.ManifestsListed([again], 3.0, True, DAY))
    assert not of(do.DeleteSsd, store.handle(listed(tombstone(KEYS[:2], 7))))
    assert SESSION in store.index.manifests
    store.validate()


def test_a_manifest_from_before_the_erasure_is_refused_and_deleted_wherever_it_turns_up_whatever_its_date():
    store = make({}, [])
    store.handle(listed(tombstone(KEYS[:2])))
    for used in (DAY - 1, 1000 * DAY):
        old = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, used)
        assert of(do.DeleteManifest, store.handle(ev.ManifestsListed([old], 3.0, True, DAY + 10)))
        assert of(do.DeleteManifest, store.handle(ev.ManifestFetched(SESSION, old, 4.0)))
    assert SESSION not in store.index.manifests


def test_a_worker_that_attaches_later_is_told_what_was_erased():
    store = make({SESSION: KEYS[:2]}, [])
    store.handle(ev.SessionErased(SESSION, 2.0))
    (told,) = of(do.TellErase, store.handle(ev.ShapesDeclared("w2", [SHAPE], 3.0)))
    assert sorted(told.keys) == KEYS[:2]


def test_an_expired_session_leaves_no_tombstone():
    store = make({SESSION: KEYS[:2]}, KEYS[:2])
    out = store.handle(ev.SessionErased(SESSION, 2.0, expired=True))
    assert not of(do.PutTombstone, out) and len(of(do.DeleteSsd, out)) == 2


def test_what_nobody_names_leaves_the_ssd_when_it_was_seen_so_twice():
    store = make({SESSION: KEYS[:2]}, KEYS[:4])
    assert not of(do.DeleteSsd, store.handle(ev.OrphansSought(10.0)))
    store.handle(ev.TurnEnded(Manifest(OTHER, "m", SHAPE.fingerprint, KEYS[3:4], 16, DAY), 11.0))
    assert [d.key for d in of(do.DeleteSsd, store.handle(ev.OrphansSought(20.0)))] == KEYS[2:3]
    assert not of(do.DeleteSsd, store.handle(ev.OrphansSought(30.0)))
    store.validate()


def test_what_a_cut_history_left_in_the_arena_leaves_it_and_hbm_too():
    store = make({}, [])
    grant = of(do.Grant, store.handle(ev.SaveWanted(("w", 1), SESSION, SHAPE.fingerprint, KEYS[:2], 5.0)))[0]
    for s in of(do.Sum, store.handle(ev.SaveEnded(("w", 1), grant.indices, (), 5.0))):
        store.handle(ev.Summed(s.key, (1, 2), 5.0))
        store.handle(ev.SsdWritten(s.key, ev.Wrote.FULL, 5.0))
    store.handle(ev.TurnEnded(Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, DAY), 6.0))
    store.handle(ev.TurnEnded(Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:1], 16, DAY + 1), 7.0))
    for chunk_key in KEYS[:2]:
        store.handle(ev.BlobWritten(chunk_key, ev.Wrote.FAILED, 8.0))
    assert not of(do.TellErase, store.handle(ev.OrphansSought(10.0)))
    (told,) = of(do.TellErase, store.handle(ev.OrphansSought(20.0)))
    assert told.keys == (KEYS[1],)
    assert set(store.index.resident) == {KEYS[0]}
    assert not of(do.TellErase, store.handle(ev.OrphansSought(30.0)))
    store.validate()


def test_what_earlier_turns_said_and_the_last_one_does_not_is_erased_with_the_session_unless_another_one_says_it():
    store = make({SESSION: KEYS[:4], OTHER: KEYS[2:3]}, KEYS[:4])
    turn = store.handle(ev.TurnEnded(Manifest(SESSION, "m", SHAPE.fingerprint, [KEYS[0], KEYS[4]], 32, DAY + 1), 2.0))
    assert of(do.PutManifest, turn)[0].manifest.former == KEYS[1:4], (
        "other nodes and later lives know of it from the manifest"
    )
    assert not of(do.DeleteSsd, turn), "a history that was cut may come back, and until then its cache stays"
    out = store.handle(ev.SessionErased(SESSION, 3.0))
    assert sorted(d.key for d in of(do.DeleteSsd, out)) == [KEYS[0], KEYS[1], KEYS[3]]
    assert set(KEYS[:5]) - {KEYS[2]} == set(of(do.PutTombstone, out)[0].tombstone.chunks)
    assert store.index.chunks[KEYS[2]].ssd is CopyState.PRESENT
    store.validate()


def test_a_node_that_learns_a_manifest_knows_what_it_said_on_either_node():
    store = make({SESSION: KEYS[:3]}, KEYS[:4])
    learned = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:1], 16, DAY + 1, former=[KEYS[3]])
    store.handle(ev.ManifestsListed([learned], 2.0, True, DAY + 1))
    assert set(store.index.manifests[SESSION].former) == {KEYS[1], KEYS[2], KEYS[3]}
    store.handle(ev.TurnEnded(Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, DAY + 2), 3.0))
    assert set(store.index.manifests[SESSION].former) == {KEYS[2], KEYS[3]}, "what is said again is not former"
    out = store.handle(listed(tombstone([])))
    assert sorted(d.key for d in of(do.DeleteSsd, out)) == KEYS[:4]


def test_chunks_behind_one_that_was_refused_are_erased_too():
    store = make({}, [])
    store.handle(ev.SaveWanted(("w", 1), SESSION, SHAPE.fingerprint, KEYS[:3], 5.0))
    for s in of(do.Sum, store.handle(ev.SaveEnded(("w", 1), (0, 2), (1,), 5.0))):
        store.handle(ev.Summed(s.key, (1, 2), 5.0))
        store.handle(ev.SsdWritten(s.key, ev.Wrote.OK, 5.0))
        store.handle(ev.BlobWritten(s.key, ev.Wrote.OK, 5.0))
    store.handle(ev.TurnEnded(Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:1], 16, DAY), 6.0))
    out = store.handle(ev.SessionErased(SESSION, 7.0))
    assert sorted(d.key for d in of(do.DeleteSsd, out)) == [KEYS[0], KEYS[2]]
    assert not any(store.erasure.left(KEYS[:3]).values())
    store.validate()


def test_a_session_remembers_the_latest_of_what_it_named_before():
    store = make({}, [])
    keys = [n.to_bytes(32, "little") for n in range(MOST_FORMER + 8)]
    for n in range(len(keys)):
        store.handle(ev.TurnEnded(Manifest(SESSION, "m", SHAPE.fingerprint, keys[n : n + 1], 16, DAY + n), float(n)))
    assert store.index.manifests[SESSION].former == keys[-MOST_FORMER - 1 : -1]


def test_workers_are_told_whose_session_was_erased_and_those_that_attach_later_unless_it_lives_again():
    store = make({SESSION: KEYS[:1], OTHER: KEYS[1:2]}, [])
    for session in (SESSION, OTHER):
        (told,) = of(do.TellErase, store.handle(ev.SessionErased(session, 2.0)))
        assert told.sessions == (session,)
    store.handle(ev.TurnEnded(Manifest(OTHER, "m", SHAPE.fingerprint, KEYS[3:4], 16, DAY + 200), 100.0))
    (told,) = of(do.TellErase, store.handle(ev.ShapesDeclared("w2", [SHAPE], 101.0)))
    assert told.sessions == (SESSION,) and set(told.keys) == set(KEYS[:2])


def test_a_running_turns_chunks_are_not_orphans_until_it_has_been_silent_for_long():
    store = make({}, [])
    grant = of(do.Grant, store.handle(ev.SaveWanted(("w", 1), SESSION, SHAPE.fingerprint, KEYS[:1], 5.0)))[0]
    for s in of(do.Sum, store.handle(ev.SaveEnded(("w", 1), grant.indices, (), 5.0))):
        store.handle(ev.Summed(s.key, (1, 2), 5.0))
    store.handle(ev.SsdWritten(KEYS[0], True, 5.0))
    store.handle(ev.BlobWritten(KEYS[0], True, 5.0))
    for now in (10.0, 20.0, 3000.0):
        assert not of(do.DeleteSsd, store.handle(ev.OrphansSought(now)))
    store.handle(ev.OrphansSought(4000.0))
    assert [d.key for d in of(do.DeleteSsd, store.handle(ev.OrphansSought(5000.0)))] == KEYS[:1]
    store.validate()


def test_what_nobody_names_leaves_the_blob_tier_and_what_somebody_names_is_known_to_be_there():
    store = make({SESSION: KEYS[:1]}, KEYS[:2])
    # Old by a clock that may be wrong: only what was nobody's a sweep ago leaves.
    assert not of(do.DeleteBlob, store.handle(ev.OldChunksListed(SHAPE.fingerprint[:8], KEYS[:3], 10.0)))
    assert not of(do.DeleteBlob, store.handle(ev.OldChunksListed(SHAPE.fingerprint[:8], KEYS[:3], 11.0))), (
        "twice in one sweep is once"
    )
    store.handle(ev.OrphansSought(20.0))
    out = store.handle(ev.OldChunksListed(SHAPE.fingerprint[:8], KEYS[:3], 21.0))
    assert [d.key for d in of(do.DeleteBlob, out)] == KEYS[1:3]
    assert store.index.chunks[KEYS[0]].backed


def test_many_erased_chunks_in_use_are_not_all_looked_at_after_every_event_and_go_once_they_are_free(monkeypatch):
    keys, looks, may_go = [bytes([i]) * 32 for i in range(200)], [0], erasure.evictable
    store = Store("node-0", 1 << 22, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    store.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, (1, 2)) for k in keys]))
    store.handle(ev.ManifestsListed([Manifest(SESSION, "m", SHAPE.fingerprint, keys, 3200, DAY)], 1.0, True, DAY))
    wants = [(k, ()) for k in keys]
    running = store.handle(ev.LoadWanted(("w", "1"), ev.LoadKind.DEMAND, SESSION, SHAPE.fingerprint, wants, (), 0, 2.0))
    pieces = []
    while running:
        running += store.handle(ev.FetchDone(f.fetch, {}, 2.0)) if isinstance(f := running.pop(0), do.Fetch) else []
        pieces += [(i, layer) for i, layer, _, _ in f.pieces] if isinstance(f, do.Pieces) else []
    assert len(pieces) == 400
    store.handle(ev.SessionErased(SESSION, 3.0))
    assert len(store.index.resident) == 200

    def counted(chunk):
        looks[0] += 1
        return may_go(chunk)

    monkeypatch.setattr(erasure, "evictable", counted)
    for now in range(4, 14):
        store.handle(ev.Tick(float(now)))
    assert looks[0] <= 10 * 16 * SHAPE.layers
    store.handle(ev.PiecesTaken(("w", "1"), pieces[:100], 15.0))
    store.validate()
    store.handle(ev.PiecesTaken(("w", "1"), pieces[100:], 16.0))
    assert not store.index.resident, "at once"
    store.validate()


# ---- what goes on after a restart


def replayed(store: Store, keys: list[bytes], *, blind: bool = False) -> None:
    store.handle(ev.ErasuresReplayed([OpenErasure(tombstone(keys, 3), blind)], 3, 0.0))


def load(store: Store, keys: list[bytes], session: SessionKey = SESSION) -> int:
    """How many chunks the store says that it has."""
    out = store.handle(
        ev.LoadWanted(("w", "1"), ev.LoadKind.DEMAND, session, SHAPE.fingerprint, [(k, ()) for k in keys], (), 0, 9.0)
    )
    probes = of(do.Probe, out)
    for probe in probes:
        out += store.handle(
            ev.Probed(probe.load, probe.keys, [ev.FoundCopy(k, SHAPE, (1, 2)) for k in probe.keys], 9.0)
        )
    store.handle(ev.LoadCancelled(("w", "1"), 9.0))
    store.validate()
    return max((f.chunks for f in of(do.Found, out)), default=0)


def test_an_erasure_is_noted_before_anything_of_it_is_deleted():
    store = make({SESSION: KEYS[:2]}, KEYS[:2])
    out = store.handle(ev.SessionErased(SESSION, 2.0))
    kinds = [type(i) for i in out]
    assert of(do.NoteErasure, out) == [do.NoteErasure(OpenErasure(tombstone(KEYS[:2])))]
    assert kinds.index(do.NoteErasure) < min(kinds.index(k) for k in (do.PutTombstone, do.DeleteManifest, do.DeleteSsd))
    assert not of(do.NoteErasure, store.handle(ev.SessionErased(OTHER, 3.0, expired=True))), (
        "every node finds that out by itself"
    )


def test_what_the_journal_says_is_served_from_no_tier_though_the_ssd_and_the_blob_tier_have_it():
    store = Store("node-0", 64 * 4096, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    replayed(store, KEYS[:2])
    out = store.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, (1, 2)) for k in KEYS[:4]]))
    assert sorted(d.key for d in of(do.DeleteSsd, out)) == KEYS[:2]
    assert load(store, KEYS[:4]) == 0 and load(store, KEYS[2:4]) == 2
    out = store.handle(
        ev.ManifestFetched(SESSION, Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:3], 48, 9 * DAY), 1.0)
    )
    assert of(do.NoteErasure, out)[0].erasure.tombstone.chunks.keys() == set(KEYS[:3]), "more of it is known now"
    assert KEYS[2] in {d.key for d in of(do.DeleteBlob, out)}
    assert load(store, KEYS[2:4]) == 0


def test_what_another_session_names_too_is_served_while_it_is_erased():
    store = make({OTHER: KEYS[:1]}, KEYS[:3])
    replayed(store, KEYS[:3])
    assert load(store, KEYS[:3], OTHER) == 1


def test_while_nobody_knows_what_the_session_held_its_tenant_is_served_only_what_living_sessions_name():
    store = make({OTHER: KEYS[:1]}, KEYS[:4])
    store.handle(ev.SessionErased(SESSION, 2.0, blind=True))
    assert load(store, KEYS[:4]) == 1
    assert load(store, KEYS[:4], SessionKey("another tenant", "s")) == 4
    store.handle(ev.ErasureSeen(SESSION, 3.0))
    assert load(store, KEYS[:4]) == 4


def test_an_erasure_that_is_told_again_ends_no_life_that_has_begun_since():
    store = make({SESSION: KEYS[:2]}, KEYS[:2])
    number = of(do.NoteErasure, store.handle(ev.SessionErased(SESSION, 2.0)))[0].erasure.tombstone.number
    store.handle(ev.TurnEnded(Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[3:5], 32, 0.0), 3.0))
    store.handle(ev.SessionErased(SESSION, 4.0, number))
    assert store.index.manifests[SESSION].keys == KEYS[3:5]
    store.handle(ev.SessionErased(SESSION, 5.0))
    assert SESSION not in store.index.manifests, "what is erased now is all that there is now"
    store.validate()


def test_a_worker_that_has_not_heard_of_the_erasure_saves_nothing_of_the_session_however_long_it_takes():
    store = make({SESSION: KEYS[:1]}, [])
    (told,) = of(do.TellErase, store.handle(ev.SessionErased(SESSION, 2.0)))
    late = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 9 * DAY)
    assert of(do.Grant, store.handle(ev.SaveWanted(("w", 1), SESSION, SHAPE.fingerprint, KEYS[:2], 1e6)))[0].refused
    assert not of(do.PutManifest, store.handle(ev.TurnEnded(late, 1e6, "w")))
    store.handle(ev.EraseHeard("w", told.notice, 1e6))
    assert of(do.Grant, store.handle(ev.SaveWanted(("w", 2), SESSION, SHAPE.fingerprint, KEYS[3:5], 1e6)))[0].indices
    assert of(do.PutManifest, store.handle(ev.TurnEnded(late, 1e6, "w"))), "a second later it is a new conversation"
    assert not store.erasure.void(store.index.manifests[SESSION])
    store.validate()


def test_an_erasure_is_forgotten_when_complete_lists_do_not_show_it_and_its_number_still_counts():
    store = make({SESSION: KEYS[:2]}, [])
    (note,) = of(do.NoteErasure, store.handle(ev.SessionErased(SESSION, 2.0)))
    for _ in range(4):
        store.handle(listed(complete=True))
    assert store.erasure.is_erasing(SESSION), "an open one is not forgotten, whatever a list says"
    store.handle(ev.ErasureEnded(SESSION, 3.0))
    for _ in range(2):
        store.handle(listed(complete=True))
    assert store.erasure.graves.get(SESSION) is None
    old = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 9 * DAY)
    store.handle(ev.ManifestsListed([old], 3.0, True, DAY))
    assert SESSION not in store.index.manifests, "a late answer"
    fresh = of(do.PutManifest, store.handle(ev.TurnEnded(old, 4.0)))[0].manifest
    assert fresh.life >= note.erasure.tombstone.number
    store.validate()
