"""What leaves the SSD when it is over its size, as sentences."""

from __future__ import annotations

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.chunk import stored_bytes
from kvstore.core.state import CopyState
from kvstore.core.store import Store

SHAPE = KvShape.of_heads(b"f" * 32, 2, 1, 8, 16, "float32")
FILE = stored_bytes(SHAPE)
SLOT = 4096


def keys(session: str, count: int) -> list[bytes]:
    return [bytes([ord(session[0]), i]) * 16 for i in range(count)]


def key(name: str) -> SessionKey:
    return SessionKey("t", name)


def make(files: int, sessions: dict[str, tuple[int, float]], *, backed: bool = True) -> Store:
    """A store whose SSD has room for `files` chunks and holds those of `sessions`: name -> (chunks, last use)."""
    store = Store("node-0", 64 * SLOT, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    every = [k for name, (count, _) in sessions.items() for k in keys(name, count)]
    store.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, (1, 2)) for k in every]))
    store.handle(ev.TierSized("ssd", files * FILE, 0.0))
    manifests = [
        Manifest(key(n), "m", SHAPE.fingerprint, keys(n, count), 16 * count, used)
        for n, (count, used) in sessions.items()
    ]
    store.handle(ev.ManifestsListed(manifests, 100.0, True, 100.0))
    if backed:
        store.handle(ev.BlobListed(SHAPE.fingerprint, set(every), 100.0))
    return store


def save(store: Store, session: str, chunk_keys: list[bytes], now: float = 200.0) -> list[do.Instruction]:
    """All that follows until the SSD is asked for the chunks."""
    out = store.handle(ev.SaveWanted(("w", int(now)), key(session), SHAPE.fingerprint, chunk_keys, now))
    grant = next(i for i in out if isinstance(i, do.Grant))
    out = store.handle(ev.SaveEnded(("w", int(now)), grant.indices, (), now))
    return [i for s in out if isinstance(s, do.Sum) for i in store.handle(ev.Summed(s.key, (3, 4), now))]


def gone(out: list[do.Instruction]) -> list[bytes]:
    return [i.key for i in out if isinstance(i, do.DeleteSsd)]


def evicted(out: list[do.Instruction]) -> dict[str, int]:
    return {
        i.labels[1]: i.amount
        for i in out
        if isinstance(i, do.Counted) and i.what == "evicted_bytes" and i.labels[0] == "ssd"
    }


def test_the_latest_chunk_of_the_least_recently_used_session_goes_first():
    store = make(4, {"a": (2, 50.0), "b": (2, 40.0)})
    assert gone(save(store, "c", keys("c", 3))) == [keys("b", 2)[1], keys("b", 2)[0], keys("a", 2)[1]]
    store.validate()


def test_a_deletion_is_asked_for_before_the_write_that_needs_it():
    store = make(2, {"a": (2, 50.0)})
    out = [i for i in save(store, "c", keys("c", 1)) if isinstance(i, do.DeleteSsd | do.WriteSsd)]
    assert [type(i) for i in out] == [do.DeleteSsd, do.WriteSsd]
    assert store.index.ssd_stored_bytes == 2 * FILE


def test_a_session_used_since_it_was_ranked_is_spared():
    store = make(4, {"a": (2, 50.0), "b": (2, 40.0)})
    assert gone(save(store, "c", keys("c", 1), 200.0)) == [keys("b", 2)[1]]
    store.handle(ev.LoadWanted(("w", "1"), ev.LoadKind.PREFETCH, key("b"), SHAPE.fingerprint, [], (), 0, 201.0))
    store.handle(ev.LoadWanted(("w", "2"), ev.LoadKind.DEMAND, key("b"), SHAPE.fingerprint, [], (), 0, 201.0))
    assert gone(save(store, "d", keys("d", 1), 202.0)) == [keys("a", 2)[1]]


def test_invalidated_sessions_go_before_unadvised_ones_before_advised_ones():
    store = make(6, {"a": (2, 10.0), "u": (2, 50.0), "d": (2, 90.0)})
    store.handle(ev.Advised(key("a"), 0, 1.0, 1000.0, (), 100.0))
    store.handle(ev.Invalidated(key("d"), 100.0))
    for i in [i for i in store.handle(ev.Tick(100.0)) if isinstance(i, do.Fetch)]:
        store.handle(ev.FetchDone(i.fetch, {}, 100.0))
    first = gone(save(store, "n", keys("n", 4)))
    assert first == [keys("d", 2)[1], keys("d", 2)[0], keys("u", 2)[1], keys("u", 2)[0]]


def test_a_chunk_that_two_sessions_name_goes_with_the_one_that_protects_it_most():
    store = make(3, {"a": (2, 10.0), "b": (1, 90.0)})
    shared = keys("a", 2)[:1]
    both = Manifest(key("b"), "m", SHAPE.fingerprint, [*shared, *keys("b", 1)], 32, 95.0)
    store.handle(ev.ManifestsListed([both], 100.0, True, 100.0))
    assert gone(save(store, "c", keys("c", 3))) == [keys("a", 2)[1], keys("b", 1)[0], shared[0]]


def test_what_only_this_ssd_has_goes_last_and_is_counted():
    store = make(4, {"a": (2, 10.0), "b": (2, 90.0)}, backed=False)
    store.handle(ev.BlobListed(SHAPE.fingerprint, set(keys("b", 2)), 100.0))
    for chunk_key in keys("a", 2):
        store.handle(ev.BlobWritten(chunk_key, ev.Wrote.FAILED, 100.0))
    out = save(store, "c", keys("c", 3))
    assert gone(out) == [keys("b", 2)[1], keys("b", 2)[0], keys("a", 2)[1]]
    assert (
        sum(i.amount for i in out if isinstance(i, do.Counted) and i.labels == ("ssd", "only copy"))
        == SHAPE.chunk_bytes
    )
    store.validate()


def test_what_is_being_copied_to_the_blob_tier_stays_and_the_new_chunk_goes_there_from_the_arena():
    store = make(2, {}, backed=False)
    for write in [i for i in save(store, "a", keys("a", 2)) if isinstance(i, do.WriteSsd)]:
        store.handle(ev.SsdWritten(write.key, ev.Wrote.OK, 200.0))
    assert all(store.index.chunks[k].blob is CopyState.WAITING for k in keys("a", 2))
    out = save(store, "b", keys("b", 1), 201.0)
    assert not gone(out) and not [i for i in out if isinstance(i, do.WriteSsd)]
    (blob,) = [i for i in out if isinstance(i, do.WriteBlob)]
    assert blob.offsets
    store.validate()


def test_files_that_a_codec_made_smaller_take_no_more_room_than_they_have():
    store = make(3, {})
    for write in [i for i in save(store, "a", keys("a", 3)) if isinstance(i, do.WriteSsd)]:
        store.handle(ev.SsdWritten(write.key, ev.Wrote.OK, 200.0, (5, 6), FILE // 4))
    assert store.index.ssd_stored_bytes == FILE // 4 * 3
    out = save(store, "b", keys("b", 2), 201.0)
    assert len([i for i in out if isinstance(i, do.WriteSsd)]) == 2 and not gone(out)
    store.handle(ev.SsdWritten(keys("b", 2)[0], ev.Wrote.OK, 202.0))
    assert store.index.ssd_stored_bytes == FILE // 4 * 3 + 2 * FILE, (
        "what is written counts as raw until its length is known"
    )
    store.validate()
    again = make(3, {})
    again.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, (1, 2), FILE // 4) for k in keys("a", 8)]))
    assert again.index.ssd_stored_bytes == FILE // 4 * 8
    again.validate()


def test_what_is_being_read_stays():
    store = make(2, {"a": (2, 10.0)})
    reading = store.handle(
        ev.LoadWanted(
            ("w", "1"), ev.LoadKind.DEMAND, key("a"), SHAPE.fingerprint, [(keys("a", 2)[1], ())], (), 0, 150.0
        )
    )
    assert [i for i in reading if isinstance(i, do.Fetch)]
    assert gone(save(store, "c", keys("c", 1))) == [keys("a", 2)[0]]


def test_what_nobody_names_goes_first_once_all_sessions_are_known():
    store = make(3, {"a": (2, 10.0)})
    store.handle(ev.Recovered([ev.FoundCopy(keys("o", 1)[0], SHAPE, (1, 2))]))
    out = save(store, "c", keys("c", 1))
    assert gone(out) == keys("o", 1) and evicted(out) == {"unnamed": SHAPE.chunk_bytes}


def test_a_hints_chunks_never_displace_an_only_copy():
    store = make(1, {"a": (1, 10.0)}, backed=False)
    chunk = store.index.chunk(keys("b", 1)[0], SHAPE)
    assert chunk is not None
    assert not store.capacity.admit(SHAPE, 200.0, backed_only=True)
    assert store.capacity.admit(SHAPE, 200.0)


def test_a_smaller_size_after_a_restart_is_kept_as_soon_as_the_sessions_are_known():
    store = make(3, {"a": (4, 50.0), "b": (4, 40.0)})
    assert store.index.ssd_stored_bytes == 3 * FILE
    assert {k for k, c in store.index.chunks.items() if c.ssd is CopyState.PRESENT} == set(keys("a", 3))


def test_a_size_too_small_for_one_chunk_turns_the_tier_off_and_nothing_else():
    store = make(0, {})
    out = save(store, "a", keys("a", 1))
    assert not [i for i in out if isinstance(i, do.WriteSsd)] and [i for i in out if isinstance(i, do.WriteBlob)]


def test_an_eviction_is_reported_to_the_directory():
    store = make(2, {"a": (2, 10.0)})
    store.index.dirty.clear()
    save(store, "c", keys("c", 1))
    assert key("a") in store.index.dirty and store.index.held(key("a"))[0] == 16


def test_going_below_the_size_at_once_spares_the_next_writes_the_work():
    store = make(128, {"a": (128, 10.0)})
    assert len(gone(save(store, "c", keys("c", 1)))) == 3  # one for the chunk, two (1/64) ahead
    assert not gone(save(store, "d", keys("d", 2), 201.0))


def test_a_session_that_is_being_saved_does_not_displace_itself():
    store = make(3, {"a": (3, 50.0)})
    assert gone(save(store, "c", keys("c", 2))) == [keys("a", 3)[2], keys("a", 3)[1]]
    for chunk_key in keys("c", 2):
        store.handle(ev.SsdWritten(chunk_key, ev.Wrote.OK, 200.0))
        store.handle(ev.BlobWritten(chunk_key, ev.Wrote.OK, 200.0))
    assert gone(save(store, "c", [bytes([7]) * 32], 201.0)) == keys("a", 1)


def test_what_an_ssd_without_room_is_owed_waits_for_room():
    """Also where the SSD is smaller than a chunk: looking for a debt that can be paid comes to an end, and only what
    was tried counts."""
    store = make(0, {})
    (write,) = (i for i in save(store, "b", keys("b", 1)) if isinstance(i, do.WriteBlob))
    assert not store.handle(ev.BlobWritten(write.key, ev.Wrote.OK, 201.0))
    store.handle(ev.TierSized("ssd", FILE, 202.0))
    (other,) = (i for i in save(store, "c", keys("c", 1), 203.0) if isinstance(i, do.WriteSsd))
    store.handle(ev.SsdWritten(other.key, ev.Wrote.OK, 204.0))
    (paid,) = (i for i in store.handle(ev.BlobWritten(other.key, ev.Wrote.OK, 205.0)) if isinstance(i, do.WriteSsd))
    assert paid.key == write.key, "there is room now: the other one has a second copy"
    store.validate()


@pytest.mark.parametrize("outcome", [ev.Wrote.LOST, ev.Wrote.UNREADABLE])
def test_a_file_that_cannot_be_read_is_not_tried_for_blob_again_and_again(outcome: ev.Wrote) -> None:
    store = make(4, {"a": (3, 10.0)}, backed=False)
    out, tried = store.handle(ev.BlobListed(SHAPE.fingerprint, (), 100.0)), []
    while writes := [i for i in out if isinstance(i, do.WriteBlob)]:
        tried += [i.key for i in writes]
        bad = writes[0].key == keys("a", 3)[0]
        out = store.handle(ev.BlobWritten(writes[0].key, outcome if bad else ev.Wrote.OK, 101.0))
        assert bad is bool([i for i in out if isinstance(i, do.Counted) and i.what == "blob_writes_unreadable"])
        deleted = [i.key for i in out if isinstance(i, do.DeleteSsd)]
        assert deleted == ([keys("a", 3)[0]] if bad and outcome is ev.Wrote.LOST else [])
    assert sorted(tried) == sorted(keys("a", 3)) and not store.saves.waiting_bytes
    store.validate()
    again = store.handle(ev.BlobListed(SHAPE.fingerprint, set(keys("a", 3)[1:]), 102.0))
    assert bool([i for i in again if isinstance(i, do.WriteBlob)]) is (outcome is ev.Wrote.UNREADABLE)
