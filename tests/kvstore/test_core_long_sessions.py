"""A hint of a long session is planned in parts, between which others have their turn."""

from __future__ import annotations

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind, SourceKind
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.core.loads import PIECES_AT_ONCE
from kvstore.core.prefetch import rank
from kvstore.core.rates import SSD
from kvstore.core.store import Store
from kvstore.core.unplanned import Unplanned

SHAPE = KvShape.of_heads(b"f" * 32, 32, 1, 8, 16, "float32")  # pieces of 1 KiB, eight of which are one read
CHUNKS = {"long": 20 * PIECES_AT_ONCE // 32, "short": 2}
KEYS = {name: [i.to_bytes(4, "big") + name.encode().ljust(28) for i in range(count)] for name, count in CHUNKS.items()}


def key(name: str) -> SessionKey:
    return SessionKey("t", name)


@pytest.fixture
def store():
    made = Store("node-0", 8 * CHUNKS["long"] * SHAPE.chunk_bytes, write_back_limit_bytes=1 << 20)
    made.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    made.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, tuple(range(32))) for keys in KEYS.values() for k in keys]))
    manifests = [Manifest(key(name), "m", SHAPE.fingerprint, keys, 16 * len(keys), 1.0) for name, keys in KEYS.items()]
    made.handle(ev.ManifestsListed(manifests, 0.0))
    yield made
    made.validate()


def hint(store: Store, name: str) -> list[do.Instruction]:
    return store.handle(ev.Advised(key(name), 0, 1.0, 60.0, (), 1.0))


def want(store: Store, name: str, kind: LoadKind = LoadKind.DEMAND) -> list[do.Instruction]:
    wants = [(k, ()) for k in KEYS[name]]
    return store.handle(ev.LoadWanted(("w", name), kind, key(name), SHAPE.fingerprint, wants, (), 0, 1.0))


def keys_of(out: list[do.Instruction]) -> set[bytes]:
    return {piece.key for i in out if isinstance(i, do.Fetch) for piece in i.pieces}


def finish(store: Store, out: list[do.Instruction]) -> list[do.Instruction]:
    """All reads end well, and what is left is planned, until nothing is read any more. Returns all instructions."""
    running, done = [i for i in out if isinstance(i, do.Fetch)], list(out)
    while running or store.unplanned:
        event = ev.PlanMore(1.0) if store.unplanned else ev.FetchDone(running.pop(0).fetch, {}, 1.0)
        more = store.handle(event)
        running += [i for i in more if isinstance(i, do.Fetch)]
        done += more
    return done


def planned(store: Store) -> int:
    """Pieces that are queued or being read."""
    return store.meter.rates.ahead(SSD) // SHAPE.piece_bytes


def test_an_event_plans_only_a_part_and_a_request_that_comes_then_is_read_first(store: Store) -> None:
    hint(store, "long")
    before = planned(store)
    assert PIECES_AT_ONCE <= before <= 2 * PIECES_AT_ONCE and store.unplanned
    assert keys_of(want(store, "short")) <= set(KEYS["short"]), "a place is free, or becomes free, for it"
    store.handle(ev.PlanMore(1.0))
    assert planned(store) == before + PIECES_AT_ONCE + 32 * CHUNKS["short"]


def test_a_request_takes_over_all_of_what_its_hint_is_being_brought(store: Store) -> None:
    done = finish(store, hint(store, "long") + want(store, "long"))
    assert [i.usable for i in done if isinstance(i, do.End)] == [CHUNKS["long"]]


def leased() -> tuple[Store, str]:
    """A store whose hint of the long session is brought by a peer, and the lease's name."""
    store = Store("node-0", 8 * CHUNKS["long"] * SHAPE.chunk_bytes, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    manifest = Manifest(key("long"), "m", SHAPE.fingerprint, KEYS["long"], 16 * CHUNKS["long"], 1.0)
    store.handle(ev.Advised(key("long"), 0, 1.0, 60.0, ("node-1",), 1.0))
    [asked] = [i for i in store.handle(ev.ManifestFetched(key("long"), manifest, 1.0)) if isinstance(i, do.AskPeer)]
    store.handle(ev.PeerHolds(asked.lease, range(CHUNKS["long"]), 1.0, range(CHUNKS["long"])))
    assert len(store.leases.expected(asked.lease)) == 32 * CHUNKS["long"]
    return store, asked.lease


def test_a_request_takes_over_what_a_peer_owes_to_its_hint() -> None:
    store, lease = leased()
    wants = [(k, ()) for k in KEYS["long"]]
    out = store.handle(
        ev.LoadWanted(("w", "1"), LoadKind.DEMAND, key("long"), SHAPE.fingerprint, wants, ("node-1",), 0, 1.0)
    )
    assert [i.chunks for i in out if isinstance(i, do.Found)] == [CHUNKS["long"]]
    assert len(store.leases.expected(lease)) == 32 * CHUNKS["long"], "although its hint has ended"
    store.validate()


def test_what_a_peer_owes_to_a_hint_that_is_withdrawn_is_given_back() -> None:
    store, _ = leased()
    store.handle(ev.Invalidated(key("long"), 1.0))
    assert not store.leases.count
    store.validate()


@pytest.mark.parametrize("kind", [LoadKind.DEMAND, LoadKind.PREFETCH, LoadKind.PEER])
def test_every_piece_comes_whoever_wants_it(store: Store, kind: LoadKind) -> None:
    done = finish(store, want(store, "long", kind))
    delivered = {(chunk, layer) for i in done if isinstance(i, do.Pieces) for chunk, layer, _, _ in i.pieces}
    assert len(delivered) == 32 * CHUNKS["long"]
    assert [i.usable for i in done if isinstance(i, do.End)] == [CHUNKS["long"]]


def test_a_hint_is_offered_when_all_of_it_is_planned_and_its_first_layers_are_here(store: Store) -> None:
    out = hint(store, "long")
    running = [i for i in out if isinstance(i, do.Fetch)]
    while running:
        running += [i for i in store.handle(ev.FetchDone(running.pop(0).fetch, {}, 1.0)) if isinstance(i, do.Fetch)]
    done = store.handle(ev.PlanMore(1.0))
    assert not [i for i in out + done if isinstance(i, do.Offer)], "all that was planned is here, and that is not all"
    done = finish(store, done)
    assert [i.keys for i in done if isinstance(i, do.Offer)] == [tuple(KEYS["long"])]
    assert store.index.held(key("long"))[1] == 16 * CHUNKS["long"]


def test_the_more_urgent_load_is_planned_first() -> None:
    unplanned = Unplanned()
    for number, priority in enumerate([3, 1, 2, 0, 5]):
        at = rank(LoadKind.ADVISED, layer=0, priority=priority, arrival=1.0, order=number, position=0)
        unplanned.add(("w", str(number)), at)
    unplanned.drop(("w", "3"))
    order = []
    while (first := unplanned.first()) is not None:
        order.append(first[1])
        unplanned.drop(first)
    assert order == ["1", "2", "0", "4"]


def test_of_a_hint_that_is_withdrawn_nothing_more_is_planned(store: Store) -> None:
    hint(store, "long")
    out = store.handle(ev.Invalidated(key("long"), 1.0))
    assert not keys_of(out) and not store.unplanned
    assert planned(store) == 8 * RUNNING_LIMIT[SourceKind.SSD], "reads that have started end by themselves"
    hint(store, "short")
    assert not store.unplanned and store.loads.count == 1


def test_queues_do_not_grow_with_hints_that_are_withdrawn(store: Store) -> None:
    for _ in range(5):
        hint(store, "long")
        while store.unplanned:
            store.handle(ev.PlanMore(1.0))
        store.handle(ev.Invalidated(key("long"), 1.0))
    assert store.queued("ssd") < 4 * CHUNKS["long"], "not 20 for each chunk"


def test_a_read_that_is_taken_back_and_wanted_again_is_counted_once(store: Store) -> None:
    [first, *_] = [i for i in hint(store, "short") if isinstance(i, do.Fetch)]
    store.fetches.make_way(1)
    want(store, "short")
    store.handle(ev.FetchDone(first.fetch, dict.fromkeys(range(len(first.pieces)), ev.Fault.CANCELLED), 1.0))
    assert planned(store) == 32 * CHUNKS["short"]
