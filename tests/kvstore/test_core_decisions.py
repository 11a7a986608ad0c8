"""The core's single decisions, as sentences: victims, order of reads, slots, states, write-back limits."""

from __future__ import annotations

import pytest

from contracts.errors import IllegalTransition
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind, SourceKind
from kvstore.core.eviction import evictable
from kvstore.core.prefetch import rank, reads
from kvstore.core.state import COPY_MOVES, LOAD_MOVES, PIECE_MOVES, CopyState, LoadState, PieceState, move
from kvstore.core.store import Store

SHAPE = KvShape.of_heads(b"f" * 32, 2, 1, 8, 16, "float32")  # 1 KiB pieces: one 4 KiB slot each
SLOT = 4096


# ---- states


@pytest.mark.parametrize(
    ("moves", "states"), [(PIECE_MOVES, PieceState), (COPY_MOVES, CopyState), (LOAD_MOVES, LoadState)]
)
def test_a_move_that_the_table_does_not_list_raises(moves, states):
    assert set(moves) == set(states)
    for old in states:
        for new in states:
            if new in moves[old]:
                assert move(moves, old, new) is new
            else:
                with pytest.raises(IllegalTransition, match=f"{old.name} -> {new.name}"):
                    move(moves, old, new)


# ---- order of reads


def test_demand_comes_before_peers_before_prefetch():
    common = {"layer": 5, "priority": 0, "arrival": 1.0, "order": 1, "position": 0}
    ranks = [rank(kind, **common) for kind in (LoadKind.DEMAND, LoadKind.PEER, LoadKind.PREFETCH)]
    assert ranks == sorted(ranks)
    assert rank(LoadKind.ADVISED, **common) == ranks[2]


def test_prefetch_takes_what_is_urgent_then_layer_0_of_every_session_before_layer_1_of_any_then_the_earliest():
    wants = [
        rank(LoadKind.ADVISED, layer=layer, priority=priority, arrival=arrival, order=order, position=0)
        for priority in (-5, 0, 100)
        for layer in (0, 1)
        for arrival, order in ((1.0, 3), (2.0, 2), (2.0, 7))
    ]
    wants.reverse()
    assert sorted(wants) == wants[::-1]


def test_demand_takes_the_more_urgent_request_first_and_then_the_lower_layer():
    def demand(priority: int, layer: int) -> tuple[float, ...]:
        return rank(LoadKind.DEMAND, layer=layer, priority=priority, arrival=0.0, order=1, position=0)

    assert demand(-1, 9) < demand(0, 0) < demand(0, 1)


def test_reads_join_neighbouring_layers_but_not_across_a_gap_nor_what_is_only_hinted_at_across_a_band():
    small = KvShape.of_heads(b"f" * 32, 8, 1, 8, 16, "float32")
    every = tuple(range(8))
    for source, kind in (
        (SourceKind.BLOB, LoadKind.DEMAND),
        (SourceKind.SSD, LoadKind.PREFETCH),
        (SourceKind.SSD, LoadKind.ADVISED),
    ):
        assert reads(small, every, source, kind) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert reads(small, (1, 2, 3, 6), SourceKind.SSD, LoadKind.PREFETCH) == ((1,), (2, 3), (6,))


def test_what_somebody_waits_for_is_read_from_the_ssd_in_a_short_read_and_the_rest():
    def lengths(piece_kib: int, kind: LoadKind, layers: int = 12) -> list[int]:
        shape = KvShape.of_heads(b"f" * 32, layers, 1, piece_kib, 64, "float32")
        assert shape.piece_bytes == 512 * piece_kib
        return [len(read) for read in reads(shape, tuple(range(layers)), SourceKind.SSD, kind)]

    for kind in (LoadKind.DEMAND, LoadKind.PEER):
        assert lengths(32, kind) == [2, 10]  # 16 KiB a piece
        assert lengths(128, kind) == [2, 10]
        assert lengths(256, kind) == [2, 8, 2]  # 1 MiB is the most that is read at once
        assert lengths(512, kind) == lengths(512, LoadKind.PREFETCH) == [3] * 4, "two bands are more than that"
        assert lengths(2048, kind) == lengths(2048, LoadKind.PREFETCH) == [1] * 12
        assert lengths(32, kind, layers=4) == [4]
    small = KvShape.of_heads(b"f" * 32, 8, 1, 8, 16, "float32")
    assert reads(small, (0, 1, 2, 3, 6), SourceKind.SSD, LoadKind.DEMAND) == ((0,), (1, 2, 3), (6,))


# ---- the whole, step by step

SESSION, OTHER = SessionKey("t", "s"), SessionKey("t", "o")
KEYS = [bytes([i]) * 32 for i in range(8)]


def make(slots: int = 16, limit: int = 1 << 20) -> Store:
    store = Store("node-0", slots * SLOT, write_back_limit_bytes=limit)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    return store


def copies(keys: list[bytes]) -> list[ev.FoundCopy]:
    return [ev.FoundCopy(key, SHAPE, (1, 2)) for key in keys]


def wanted(
    number: int,
    keys: list[bytes],
    kind: LoadKind = LoadKind.DEMAND,
    *,
    session: SessionKey = SESSION,
    now: float = 1.0,
    **other,
):
    given = {"sources": (), "priority": 0, **other}
    return ev.LoadWanted(
        ("w", str(number)), kind, session, SHAPE.fingerprint, [(k, ()) for k in keys], now=now, **given
    )


def of(kind: type, instructions: list) -> list:
    return [i for i in instructions if isinstance(i, kind)]


def save(store: Store, number: int, keys: list[bytes], session: SessionKey = SESSION) -> list:
    """Grant, write, sum; returns the write-back instructions."""
    grant = of(do.Grant, store.handle(ev.SaveWanted(("w", number), session, SHAPE.fingerprint, keys, 0.0)))[0]
    out = store.handle(ev.SaveEnded(("w", number), grant.indices, (), 0.0))
    return [i for s in of(do.Sum, out) for i in store.handle(ev.Summed(s.key, (1, 2), 0.0))]


def test_two_loads_of_one_piece_share_one_read_and_a_demand_lifts_a_prefetch():
    store = make()
    store.handle(ev.Recovered(copies(KEYS[:1])))
    first = store.handle(wanted(1, KEYS[:1], LoadKind.PREFETCH))
    second = store.handle(wanted(2, KEYS[:1]))
    assert len(of(do.Fetch, first)) == 2 and not of(do.Fetch, second)
    fetch = of(do.Fetch, first)[0]
    pieces = of(do.Pieces, store.handle(ev.FetchDone(fetch.fetch, {}, 1.0)))
    assert {p.load[1] for p in pieces} == {"1", "2"}
    store.validate()


def test_a_prefetch_never_displaces_an_advised_session_but_demand_may():
    store = make(slots=4)
    store.handle(ev.Recovered(copies(KEYS[:4])))
    store.handle(ev.ManifestsListed([Manifest(OTHER, "m", SHAPE.fingerprint, KEYS[:2], 32, 1.0)], 0.0))
    for fetch in of(do.Fetch, store.handle(ev.Advised(OTHER, 0, 1.0, 60.0, (), 0.0))):
        store.handle(ev.FetchDone(fetch.fetch, {}, 0.0))
    assert not store.ledger.granules.free
    prefetch = store.handle(wanted(1, KEYS[2:3], LoadKind.PREFETCH))
    assert [e.usable for e in of(do.End, prefetch)] == [0]
    assert not of(do.Fetch, prefetch)
    (fetch,) = of(do.Fetch, store.handle(wanted(2, KEYS[3:4])))
    assert [piece.layer for piece in fetch.pieces] == [0, 1]
    store.validate()


def test_saves_over_the_write_back_limit_are_refused_and_accepted_again_when_it_drains():
    store = make(limit=2 * SHAPE.chunk_bytes)
    writes = save(store, 1, KEYS[:2])
    assert len(of(do.WriteSsd, writes)) == 2
    refused = of(do.Grant, store.handle(ev.SaveWanted(("w", 2), SESSION, SHAPE.fingerprint, KEYS[2:3], 0.0)))[0]
    assert refused.refused == (0,)
    store.handle(ev.SsdWritten(KEYS[0], ev.Wrote.OK, 0.0))
    assert of(do.Grant, store.handle(ev.SaveWanted(("w", 3), SESSION, SHAPE.fingerprint, KEYS[2:3], 0.0)))[
        0
    ].indices == (0,)
    store.validate()


def test_a_saved_chunk_is_written_to_the_ssd_and_then_from_there_to_the_blob_tier():
    store = make()
    (write,) = of(do.WriteSsd, save(store, 1, KEYS[:1]))
    (blob,) = of(do.WriteBlob, store.handle(ev.SsdWritten(write.key, ev.Wrote.OK, 0.0)))
    assert blob.offsets == ()
    store.handle(ev.BlobWritten(write.key, ev.Wrote.OK, 0.0))
    assert store.saves.waiting_bytes == 0


def test_a_decoded_piece_has_the_arenas_checksum_and_its_copy_keeps_its_own():
    store = make()
    store.handle(ev.Recovered(copies(KEYS[:1])))
    (fetch,) = of(do.Fetch, store.handle(wanted(1, KEYS[:1])))
    (delivered,) = of(do.Pieces, store.handle(ev.FetchDone(fetch.fetch, {}, 1.0, {0: 77})))
    assert [checksum for _, _, _, checksum in delivered.pieces] == [77, 2]
    assert store.index.chunks[KEYS[0]].ssd_sums == (1, 2)
    store.validate()


def test_each_tier_is_later_asked_for_the_checksums_of_its_own_copy():
    store = make()
    (write,) = of(do.WriteSsd, save(store, 1, KEYS[:1]))
    (blob,) = of(do.WriteBlob, store.handle(ev.SsdWritten(write.key, ev.Wrote.OK, 0.0, (8, 9))))
    assert blob.checksums == (8, 9)
    store.handle(ev.BlobWritten(write.key, ev.Wrote.OK, 0.0, (6, 7)))
    chunk = store.index.chunks[write.key]
    assert (chunk.sums, chunk.ssd_sums, chunk.blob_sums) == ([1, 2], (8, 9), (6, 7))
    store.validate()


def test_a_full_disk_sends_the_chunk_to_the_blob_tier_from_the_arena():
    store = make()
    (write,) = of(do.WriteSsd, save(store, 1, KEYS[:1]))
    (blob,) = of(do.WriteBlob, store.handle(ev.SsdWritten(write.key, ev.Wrote.FAILED, 0.0)))
    assert blob.offsets == write.offsets


def test_what_is_written_to_blob_from_the_arena_stays_there_until_that_has_ended():
    store = make()
    (write,) = of(do.WriteSsd, save(store, 1, KEYS[:1]))
    store.handle(ev.SsdWritten(write.key, ev.Wrote.FAILED, 0.0))
    chunk = store.index.chunks[KEYS[0]]
    store.index.set_copy(chunk, "ssd", CopyState.PRESENT, (1, 2))  # written again meanwhile, as it was owed
    assert not evictable(chunk)
    store.handle(ev.BlobWritten(KEYS[0], ev.Wrote.OK, 1.0))
    assert evictable(chunk)


def test_an_ssd_copy_that_turns_out_bad_while_it_is_written_to_blob_leaves_nothing_stuck():
    store = make()
    (write,) = of(do.WriteSsd, save(store, 1, KEYS[:1]))
    (blob,) = of(do.WriteBlob, store.handle(ev.SsdWritten(write.key, ev.Wrote.OK, 0.0)))
    assert not blob.offsets, "from the SSD's file"
    chunk = store.index.chunks[KEYS[0]]
    store.room.drop(chunk, 1)
    fetch = of(do.Fetch, store.handle(wanted(1, KEYS[:1])))[0]
    store.handle(ev.FetchDone(fetch.fetch, {0: ev.Fault.CORRUPT}, 1.0))
    assert chunk.ssd is CopyState.ABSENT and evictable(chunk)
    store.validate()
    store.handle(ev.BlobWritten(KEYS[0], ev.Wrote.FAILED, 2.0))
    assert chunk.blob is CopyState.SKIPPED
    store.validate()


def test_a_bad_piece_voids_its_chunk_and_all_later_ones_and_the_copy_is_deleted():
    store = make()
    store.handle(ev.Recovered(copies(KEYS[:3])))
    out = store.handle(wanted(1, KEYS[:3]))
    ends, deletes = [], []
    for fetch in of(do.Fetch, out):
        bad = {0: ev.Fault.CORRUPT} if fetch.pieces[0].key == KEYS[1] else {}
        step = store.handle(ev.FetchDone(fetch.fetch, bad, 1.0))
        ends, deletes = ends + of(do.End, step), deletes + of(do.DeleteSsd, step)
        for probe in of(do.Probe, step):
            ends += of(do.End, store.handle(ev.Probed(probe.load, probe.keys, [], 1.0)))
        store.validate()
    assert [d.key for d in deletes] == [KEYS[1]]
    assert [e.usable for e in ends] == [1]


def test_a_copy_that_one_answer_lacked_is_forgotten_but_not_deleted_and_is_found_again():
    store = make()
    out = store.handle(wanted(1, KEYS[:1]))
    (probe,) = of(do.Probe, out)
    out = []
    for fetch in of(do.Fetch, store.handle(ev.Probed(probe.load, probe.keys, copies(KEYS[:1]), 1.0))):
        out += store.handle(ev.FetchDone(fetch.fetch, dict.fromkeys(range(len(fetch.pieces)), ev.Fault.MISSING), 1.0))
    assert of(do.DeleteBlob, out) == []
    assert [e.usable for e in of(do.End, out)] == [0]
    (probe,) = of(do.Probe, store.handle(wanted(2, KEYS[:1], now=2.0)))
    assert probe.keys == (KEYS[0],)
    store.validate()


def test_unknown_keys_are_probed_in_growing_batches_until_one_is_missing():
    store = make()
    sizes = []
    out = store.handle(wanted(1, KEYS))
    while probes := of(do.Probe, out):
        (probe,) = probes
        sizes.append(len(probe.keys))
        out = store.handle(ev.Probed(probe.load, probe.keys, copies([k for k in probe.keys if k in KEYS[:3]]), 1.0))
    assert sizes == [1, 4]
    assert of(do.Found, out)[0].chunks == 3


def test_keys_that_a_manifest_names_are_probed_at_once():
    store = make()
    store.handle(ev.ManifestsListed([Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:7], 112, 1.0)], 0.0))
    (probe,) = of(do.Probe, store.handle(wanted(1, KEYS)))
    assert probe.keys == tuple(KEYS[:7])


def test_a_hint_with_a_foreign_source_fetches_the_newer_manifest_first():
    store = make()
    store.handle(ev.ManifestsListed([Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:1], 16, 1.0)], 0.0))
    out = store.handle(ev.Advised(SESSION, 0, 1.0, 60.0, ("node-1",), 0.0))
    assert of(do.FetchManifest, out) and not of(do.AskPeer, out)
    out = store.handle(ev.ManifestFetched(SESSION, Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:3], 48, 2.0), 0.0))
    (ask,) = of(do.AskPeer, out)
    assert [key for key, _ in ask.wants] == KEYS[:3]
    older = store.handle(ev.ManifestFetched(SESSION, Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:1], 16, 0.5), 0.0))
    assert store.index.manifests[SESSION].keys == KEYS[:3]
    assert older is not None


def test_a_listing_that_was_under_way_does_not_bring_an_erased_session_back():
    store = make()
    manifest = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 1.0)
    store.handle(ev.ManifestsListed([manifest], 0.0))
    store.handle(ev.SessionErased(SESSION, 1.0))
    store.handle(ev.ManifestsListed([manifest], 2.0))
    assert SESSION not in store.index.manifests


def test_a_first_turn_that_ends_after_its_session_was_erased_does_not_bring_it_back():
    store = make()
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    (told,) = of(do.TellErase, store.handle(ev.SessionErased(SESSION, 1.0)))
    turn = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 2.0)
    out = store.handle(ev.TurnEnded(turn, 2.0, "w"))
    assert SESSION not in store.index.manifests and not of(do.PutManifest, out)
    store.handle(ev.EraseHeard("w", told.notice, 3.0))
    assert of(do.PutManifest, store.handle(ev.TurnEnded(turn, 70.0, "w")))


def test_the_offer_goes_out_when_layer_0_is_there_and_not_before():
    store = make()
    store.handle(ev.Recovered(copies(KEYS[:2])))
    known = Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 1.0, note=b"note")
    store.handle(ev.ManifestsListed([known], 0.0))
    fetches = of(do.Fetch, store.handle(ev.Advised(SESSION, -1, 2.0, 62.0, (), 0.0)))
    assert [(f.pieces[0].layer, f.pieces[0].key) for f in fetches] == [
        (0, KEYS[0]),
        (0, KEYS[1]),
        (1, KEYS[0]),
        (1, KEYS[1]),
    ]
    assert not of(do.Offer, store.handle(ev.FetchDone(fetches[0].fetch, {}, 0.5)))
    (offer,) = of(do.Offer, store.handle(ev.FetchDone(fetches[1].fetch, {}, 0.5)))
    assert offer.keys == tuple(KEYS[:2]) and offer.priority == -1
    assert offer.arrival_s == pytest.approx(1.5) and offer.expires_s == pytest.approx(61.5)
    assert offer.note == b"note"


def test_an_invalidation_stops_a_prefetch_that_is_still_queued():
    store = make(slots=64)
    keys = [bytes([i, 1]) * 16 for i in range(20)]
    store.handle(ev.Recovered(copies(keys)))
    store.handle(ev.ManifestsListed([Manifest(SESSION, "m", SHAPE.fingerprint, keys, 320, 1.0)], 0.0))
    running = of(do.Fetch, store.handle(ev.Advised(SESSION, 0, 1.0, 60.0, (), 0.0)))
    out = store.handle(ev.Invalidated(SESSION, 0.1))
    assert of(do.TellInvalid, out)
    for fetch in running:
        assert not of(do.Fetch, store.handle(ev.FetchDone(fetch.fetch, {}, 0.2)))
    store.validate()


def test_a_worker_that_leaves_gives_everything_back():
    store = make(slots=8)
    grant = of(do.Grant, store.handle(ev.SaveWanted(("w", 1), SESSION, SHAPE.fingerprint, KEYS[:2], 0.0)))[0]
    assert len(grant.offsets) == 4
    store.handle(ev.Recovered(copies(KEYS[4:6])))
    for fetch in of(do.Fetch, store.handle(wanted(2, KEYS[4:6]))):
        store.handle(ev.FetchDone(fetch.fetch, {}, 0.0))
    store.handle(ev.WorkerGone("w", 1.0))
    store.validate()
    assert not store.loads.count
    assert store.ledger.granules.free == 4, "only the loaded pieces stay, unpinned"
    assert (
        len(of(do.Grant, store.handle(ev.SaveWanted(("x", 1), OTHER, SHAPE.fingerprint, KEYS[:4], 2.0)))[0].indices)
        == 4
    )


def test_a_hint_repeated_while_its_load_runs_starts_nothing_new_and_renews_the_offer():
    store = make()
    store.handle(ev.Recovered(copies(KEYS[:2])))
    store.handle(ev.ManifestsListed([Manifest(SESSION, "m", SHAPE.fingerprint, KEYS[:2], 32, 1.0)], 0.0))
    fetches = of(do.Fetch, store.handle(ev.Advised(SESSION, 0, 2.0, 62.0, (), 0.0)))
    assert store.handle(ev.Advised(SESSION, 0, 1.0, 61.0, (), 0.5)) == []
    for fetch in fetches[:2]:
        store.handle(ev.FetchDone(fetch.fetch, {}, 0.6))
    (offer,) = store.handle(ev.Advised(SESSION, 0, 5.0, 65.0, (), 1.0))
    assert isinstance(offer, do.Offer) and offer.arrival_s == pytest.approx(5.0)
    store.validate()
