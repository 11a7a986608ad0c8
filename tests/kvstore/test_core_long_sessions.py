"""A long session is planned in parts, between which others have their turn; hints plan only so far ahead."""

from __future__ import annotations

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind, SourceKind
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.core.loads import MOST_AHEAD, PIECES_AT_ONCE
from kvstore.core.prefetch import rank
from kvstore.core.store import Store
from kvstore.core.unplanned import Unplanned

SHAPE = KvShape.of_heads(b"f" * 32, 32, 1, 8, 16, "float32")  # pieces of 1 KiB, eight of which are one read
CHUNKS = {"long": 2 * MOST_AHEAD // 32, "short": 2}
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


def test_an_event_plans_only_a_part_and_a_request_that_comes_then_is_read_first(store: Store) -> None:
    hint(store, "long")
    planned = store.fetches.pieces
    assert PIECES_AT_ONCE <= planned <= 2 * PIECES_AT_ONCE and store.unplanned
    assert keys_of(want(store, "short")) <= set(KEYS["short"]), "a place is free, or becomes free, for it"
    store.handle(ev.PlanMore(1.0))
    assert store.fetches.pieces == planned + PIECES_AT_ONCE + 32 * CHUNKS["short"]


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


def test_hints_plan_only_so_far_ahead_and_requests_are_not_held_up_by_that(store: Store) -> None:
    hint(store, "long")
    while store.unplanned:
        store.handle(ev.PlanMore(1.0))
    assert store.fetches.pieces == MOST_AHEAD
    hint(store, "short")
    assert store.fetches.pieces == MOST_AHEAD, "it waits, too"
    want(store, "short")
    assert store.fetches.pieces == MOST_AHEAD + 32 * CHUNKS["short"]


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
    assert store.fetches.pieces == 8 * RUNNING_LIMIT[SourceKind.SSD], "reads that have started end by themselves"
    hint(store, "short")
    assert not store.unplanned and store.loads.count == 1


def test_a_load_that_waits_for_its_turn_to_be_planned_ends_in_time(store: Store) -> None:
    hint(store, "long")
    while store.unplanned:
        store.handle(ev.PlanMore(1.0))
    want(store, "short", LoadKind.PREFETCH)
    out = store.handle(ev.Tick(100.0))
    assert [i.usable for i in out if isinstance(i, do.End) and i.load == ("w", "short")] == [0]
