"""Reads that are shared, lifted and taken back: prefetches give way to requests and saves, and no piece is read
twice."""

from __future__ import annotations

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import Fault, LoadKind
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.core.store import Store

SHAPE = KvShape.of_heads(b"f" * 32, 4, 1, 8, 64, "float32")  # four bands of one layer, a page each
SLOT = 4096
KEYS = [bytes([i]) * 32 for i in range(16)]
SUMS = (1, 2, 3, 4)


def make(slots: int, *, blob: int = 0, ssd: int = 0) -> Store:
    """A store whose SSD has the first chunks, or whose blob tier has been seen to have them."""
    store = Store("node-0", slots * SLOT, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    store.handle(ev.Recovered([ev.FoundCopy(key, SHAPE, SUMS) for key in KEYS[:ssd]]))
    store.handle(ev.Probed(("", ""), (), [ev.FoundCopy(key, SHAPE, SUMS) for key in KEYS[:blob]], 0.0))
    return store


def want(
    store: Store,
    number: int,
    keys: list[bytes],
    kind: LoadKind,
    sources: tuple[str, ...] = (),
    layers: tuple[int, ...] = (),
):
    session = SessionKey("t", f"s{number}")
    event = ev.LoadWanted(
        ("w", str(number)), kind, session, SHAPE.fingerprint, [(key, layers) for key in keys], sources, 0, 1.0
    )
    return step(store, event)


def step(store: Store, event: ev.Event) -> list[do.Instruction]:
    out = store.handle(event)
    store.validate()
    return out


def of(kind: type, instructions: list) -> list:
    return [i for i in instructions if isinstance(i, kind)]


def cancelled(fetch: do.Fetch) -> ev.FetchDone:
    return ev.FetchDone(fetch.fetch, dict.fromkeys(range(len(fetch.pieces)), Fault.CANCELLED), 1.0)


def test_a_request_takes_the_room_of_running_prefetches_back_lowest_rank_first():
    store = make(4, ssd=2)
    running = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.PREFETCH))
    assert [f.pieces[0].layer for f in running] == [0, 1, 2, 3]
    out = want(store, 2, KEYS[1:2], LoadKind.DEMAND, layers=(0,))
    assert of(do.CancelFetch, out) == [do.CancelFetch(running[3].fetch)], (
        "one slot is wanted, and the last layer ranks lowest"
    )
    assert not of(do.Fetch, out), "its slot stays reserved until it has ended"
    out = step(store, cancelled(running[3]))
    assert [(f.pieces[0].key, f.pieces[0].offset) for f in of(do.Fetch, out)] == [
        (KEYS[1], running[3].pieces[0].offset)
    ]


def test_no_more_is_taken_back_while_what_was_taken_back_suffices():
    store = make(4, ssd=2)
    running = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.PREFETCH))
    want(store, 2, KEYS[1:2], LoadKind.DEMAND, layers=(0,))
    assert not of(do.CancelFetch, step(store, ev.Tick(1.5)))
    out = step(store, ev.FetchDone(running[3].fetch, {}, 1.6))
    assert of(do.CancelFetch, out) == [do.CancelFetch(running[2].fetch)], (
        "it came all the same, and the worker copies from its slot"
    )
    out = step(store, ev.PiecesTaken(("w", "1"), [(0, 3)], 1.7))
    assert [f.pieces[0].offset for f in of(do.Fetch, out)] == [running[3].pieces[0].offset]


def test_a_save_that_finds_no_room_is_refused_and_takes_prefetches_back_for_the_next():
    store = make(4, ssd=1)
    running = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.PREFETCH))
    save = ev.SaveWanted(("w", 1), SessionKey("t", "x"), SHAPE.fingerprint, KEYS[5:6], 1.0)
    out = step(store, save)
    assert of(do.Grant, out)[0].refused == (0,)
    assert {c.fetch for c in of(do.CancelFetch, out)} == {f.fetch for f in running}
    for fetch in running:
        step(store, cancelled(fetch))
    assert of(do.Grant, step(store, ev.SaveWanted(("w", 2), *(save.session, save.fingerprint, save.keys, 2.0))))[
        0
    ].indices == (0,)


def test_reads_of_requests_and_peers_are_never_taken_back():
    store = make(4, ssd=4)
    want(store, 1, KEYS[:1], LoadKind.DEMAND, layers=(0, 1))
    want(store, 2, KEYS[1:2], LoadKind.PEER, layers=(0, 1))
    assert not of(do.CancelFetch, want(store, 3, KEYS[2:3], LoadKind.DEMAND))


def test_the_prefetch_that_was_taken_back_ends_short():
    store = make(4, ssd=2)
    running = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.PREFETCH))
    want(store, 2, KEYS[1:2], LoadKind.DEMAND, layers=(0,))
    (end,) = of(do.End, step(store, cancelled(running[3])))
    assert end == do.End(("w", "1"), 0)


def test_a_piece_that_a_request_wants_meanwhile_is_read_again_when_its_read_was_taken_back():
    store = make(4, ssd=2)
    running = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.PREFETCH))
    want(store, 2, KEYS[1:2], LoadKind.DEMAND, layers=(0,))
    assert not of(do.Fetch, want(store, 3, KEYS[:1], LoadKind.DEMAND, layers=(3,)))
    out = step(store, cancelled(running[3]))
    again = of(do.Fetch, out)
    for fetch in running[:3]:
        again += of(do.Fetch, step(store, ev.FetchDone(fetch.fetch, {}, 1.0)))
    again += of(do.Fetch, step(store, ev.LoadCancelled(("w", "1"), 1.5)))
    assert sorted((f.pieces[0].key, f.pieces[0].layer) for f in again) == [(KEYS[0], 3), (KEYS[1], 0)]
    ends = [e for f in again for e in of(do.End, step(store, ev.FetchDone(f.fetch, {}, 2.0)))]
    assert do.End(("w", "3"), 1) in ends


def test_a_piece_that_is_wanted_no_more_is_not_read_again():
    store = make(4, ssd=2)
    running = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.PREFETCH))
    want(store, 2, KEYS[1:2], LoadKind.DEMAND, layers=(0,))
    want(store, 3, KEYS[:1], LoadKind.DEMAND, layers=(3,))
    step(store, ev.LoadCancelled(("w", "3"), 1.0))
    assert {f.pieces[0].key for f in of(do.Fetch, step(store, cancelled(running[3])))} == {KEYS[1]}


def test_a_peers_piece_is_read_again_under_the_same_lease():
    store = make(4)
    (ask,) = of(do.AskPeer, want(store, 1, KEYS[:1], LoadKind.PREFETCH, ("node-1",)))
    step(store, ev.PeerHolds(ask.lease, [0], 1.0))
    (fetch,) = of(
        do.Fetch, step(store, ev.PeerReady(ask.lease, [(0, layer, layer * SLOT, 7) for layer in range(4)], 1.0))
    )
    step(store, ev.PeerEnded(ask.lease, True, 1.0))
    step(store, ev.SaveWanted(("w", 1), SessionKey("t", "x"), SHAPE.fingerprint, KEYS[5:6], 1.0))
    want(store, 2, KEYS[:1], LoadKind.DEMAND)
    out = step(store, cancelled(fetch))
    (again,) = of(do.Fetch, out)
    assert again.lease == ask.lease and [p.remote_offset for p in again.pieces] == [layer * SLOT for layer in range(4)]
    assert not of(do.ReleasePeer, out)
    out = step(store, ev.FetchDone(again.fetch, {}, 1.0))
    assert of(do.ReleasePeer, out) and do.End(("w", "2"), 1) in out


def test_queued_prefetches_that_no_room_is_left_for_are_dropped_and_counted():
    store = make(4, ssd=4)
    for fetch in of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.DEMAND)):
        step(store, ev.FetchDone(fetch.fetch, {}, 1.0))
    out = want(store, 2, KEYS[1:2], LoadKind.PREFETCH)
    assert not of(do.Fetch, out) and do.Counted("fetches_without_room") in out
    assert of(do.End, out) == [do.End(("w", "2"), 0)]


def test_a_hint_that_found_no_room_is_brought_once_there_is_some_while_it_counts():
    store = make(4, ssd=2)
    manifest = Manifest(SessionKey("t", "hinted"), "m", SHAPE.fingerprint, KEYS[1:2], 64, 1.0)
    step(store, ev.ManifestsListed([manifest], 0.0))
    for fetch in of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.DEMAND)):
        step(store, ev.FetchDone(fetch.fetch, {}, 1.0))
    out = step(store, ev.Advised(manifest.session, 0, 5.0, 60.0, (), 1.0))
    assert not of(do.Fetch, out) and do.Counted("fetches_without_room") in out
    assert store.busy, "it is looked at again"
    assert not of(do.Fetch, step(store, ev.Tick(1.1)) + step(store, ev.Tick(2.0))), "the request still has its pieces"
    step(store, ev.PiecesTaken(("w", "1"), [(0, layer) for layer in range(4)], 2.0))
    fetched = [f for now in (3.0, 4.0, 5.0) for f in of(do.Fetch, step(store, ev.Tick(now)))]
    assert {f.pieces[0].key for f in fetched} == {KEYS[1]} and len(fetched) == 4
    for fetch in fetched:
        out = step(store, ev.FetchDone(fetch.fetch, {}, 5.0))
    assert not store.busy


def test_a_hint_that_found_no_room_is_left_when_it_no_longer_counts():
    store = make(4, ssd=2)
    manifest = Manifest(SessionKey("t", "hinted"), "m", SHAPE.fingerprint, KEYS[1:2], 64, 1.0)
    step(store, ev.ManifestsListed([manifest], 0.0))
    want(store, 1, KEYS[:1], LoadKind.DEMAND)
    step(store, ev.Advised(manifest.session, 0, 5.0, 60.0, (), 1.0))
    step(store, ev.Invalidated(manifest.session, 1.5))
    step(store, ev.LoadCancelled(("w", "1"), 2.0))
    assert not [f for now in (3.0, 5.0, 9.0) for f in of(do.Fetch, step(store, ev.Tick(now)))]
    assert not store.busy


# ---- one read a piece


def test_a_request_joins_a_running_prefetch_without_a_second_read():
    store = make(16, blob=1)
    (first, *_) = running = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.PREFETCH))
    assert not of(do.Fetch, want(store, 2, KEYS[:1], LoadKind.DEMAND))
    out = [i for f in running for i in step(store, ev.FetchDone(f.fetch, {}, 1.0))]
    assert {p.load[1] for p in of(do.Pieces, out)} == {"1", "2"} and not of(do.Fetch, out)
    assert first.kind is ev.SourceKind.BLOB


def test_a_request_lifts_a_queued_prefetch_over_all_others_without_a_second_read():
    limit = RUNNING_LIMIT[ev.SourceKind.SSD]
    store = make(64, ssd=8)
    running = of(do.Fetch, want(store, 1, KEYS[:8], LoadKind.PREFETCH))
    assert len(running) == limit
    want(store, 2, KEYS[7:8], LoadKind.DEMAND, layers=(3,))
    (next_one,) = of(do.Fetch, step(store, ev.FetchDone(running[0].fetch, {}, 1.0)))
    assert (next_one.pieces[0].key, next_one.pieces[0].layer) == (KEYS[7], 3)
    read = [(p.key, p.layer) for f in [*running, next_one] for p in f.pieces]
    todo = [*running[1:], next_one]
    while todo:
        todo += (more := of(do.Fetch, step(store, ev.FetchDone(todo.pop(0).fetch, {}, 1.0))))
        read += [(p.key, p.layer) for f in more for p in f.pieces]
    assert len(read) == len(set(read)) == 32


def test_a_request_joins_pieces_that_a_peer_has_leased_and_lifts_their_read():
    store = make(16)
    (ask,) = of(do.AskPeer, want(store, 1, KEYS[:1], LoadKind.PREFETCH, ("node-1",)))
    step(store, ev.PeerHolds(ask.lease, [0], 1.0))
    out = want(store, 2, KEYS[:1], LoadKind.DEMAND, ("node-2",))
    assert not of(do.AskPeer, out) and not of(do.Probe, out)
    (fetch,) = of(
        do.Fetch, step(store, ev.PeerReady(ask.lease, [(0, layer, layer * SLOT, 7) for layer in range(4)], 1.0))
    )
    out = step(store, ev.FetchDone(fetch.fetch, {}, 1.0))
    assert {p.load[1] for p in of(do.Pieces, out)} == {"1", "2"}
    assert not of(
        do.CancelFetch, step(store, ev.SaveWanted(("w", 1), SessionKey("t", "x"), SHAPE.fingerprint, KEYS[5:9], 1.0))
    )


def test_many_requests_for_one_piece_share_one_read_whenever_they_come():
    store = make(16, ssd=1)
    fetches = of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.DEMAND, layers=(0, 2)))
    assert [[p.layer for p in f.pieces] for f in fetches] == [[0], [2]]
    fetches += of(do.Fetch, want(store, 2, KEYS[:1], LoadKind.DEMAND))
    out = step(store, ev.FetchDone(fetches[0].fetch, {}, 1.0))
    fetches += of(do.Fetch, want(store, 3, KEYS[:1], LoadKind.DEMAND))
    for fetch in fetches[1:]:
        out += step(store, ev.FetchDone(fetch.fetch, {}, 1.0))
    assert len(fetches) == 4 and {e.load[1] for e in of(do.End, out)} == {"1", "2", "3"}


def test_a_prefetch_never_displaces_what_an_advisory_protects():
    store = make(4, ssd=2)
    session = SessionKey("t", "other")
    step(store, ev.ManifestsListed([Manifest(session, "m", SHAPE.fingerprint, KEYS[:1], 64, 1.0)], 0.0))
    for fetch in of(do.Fetch, step(store, ev.Advised(session, 0, 1.0, 60.0, (), 0.0))):
        step(store, ev.FetchDone(fetch.fetch, {}, 0.0))
    assert not of(do.Fetch, want(store, 1, KEYS[1:2], LoadKind.PREFETCH))
    reads = of(do.Fetch, want(store, 2, KEYS[1:2], LoadKind.DEMAND))
    assert [[piece.layer for piece in fetch.pieces] for fetch in reads] == [[0, 1, 2, 3]]


def test_what_a_peer_has_gets_no_copy_on_the_ssd_while_the_arena_has_room():
    for slots, copied in ((16, []), (5, [KEYS[0]])):
        store = make(slots)
        (ask,) = of(do.AskPeer, want(store, 1, KEYS[:1], LoadKind.DEMAND, ("node-1",)))
        step(store, ev.PeerHolds(ask.lease, [0], 1.0))
        (fetch,) = of(
            do.Fetch, step(store, ev.PeerReady(ask.lease, [(0, layer, layer * SLOT, 7) for layer in range(4)], 1.0))
        )
        out = step(store, ev.FetchDone(fetch.fetch, {}, 1.0))
        assert [w.key for w in of(do.WriteSsd, out)] == copied
    store, out = make(16, blob=1), list[do.Instruction]()
    for fetch in of(do.Fetch, want(store, 1, KEYS[:1], LoadKind.DEMAND)):
        out += step(store, ev.FetchDone(fetch.fetch, {}, 1.0))
    assert [w.key for w in of(do.WriteSsd, out)] == KEYS[:1], "the blob tier is far"
