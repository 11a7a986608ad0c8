"""What a hint brings into the arena of a model some of whose layers have a sliding window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind
from kvstore.core.store import Store

LAYERS, CHUNKS = 4, 40
PLAIN = KvShape.of_heads(b"f" * 32, LAYERS, 1, 16, 64, "float32")
SHAPE = replace(PLAIN, windows=(128, 128, 0, 128))
ALL_WINDOWED = replace(PLAIN, windows=(128,) * LAYERS)
KEYS = [bytes([i]) * 32 for i in range(CHUNKS)]
SESSION = SessionKey("t", "s")
#: The last two chunks, all layers; of the others one layer: the one without a window, or one to say that it is there.
READ = 2 * LAYERS + CHUNKS - 2


def store_of(shape: KvShape) -> Store:
    """A store whose SSD has the session."""
    made = Store("node-0", 64 << 20, write_back_limit_bytes=1 << 20)
    made.handle(ev.Recovered([ev.FoundCopy(key, PLAIN, (1, 2, 3, 4)) for key in KEYS]))
    made.handle(ev.ShapesDeclared("w", [shape], 0.0))
    made.handle(ev.ManifestsListed([Manifest(SESSION, "m", shape.fingerprint, KEYS, 64 * CHUNKS, 1.0)], 0.0))
    return made


def bring(store: Store, event: ev.Event) -> tuple[list[tuple[bytes, int]], list[do.Instruction]]:
    """The pieces that are read for it, until nothing more is, and all instructions."""
    seen, pieces = store.handle(event), []
    waiting = [each for each in seen if isinstance(each, do.Fetch)]
    while waiting:
        fetch = waiting.pop()
        pieces += [(piece.key, piece.layer) for piece in fetch.pieces]
        seen += (out := store.handle(ev.FetchDone(fetch.fetch, {}, 1.0)))
        waiting += [each for each in out if isinstance(each, do.Fetch)]
        store.validate()
    return pieces, seen


@pytest.mark.parametrize(("shape", "count"), [(PLAIN, CHUNKS * LAYERS), (SHAPE, READ), (ALL_WINDOWED, READ)])
def test_a_hint_reads_what_the_next_turn_reads_and_offers_all_of_the_session(shape: KvShape, count: int) -> None:
    store = store_of(shape)
    pieces, seen = bring(store, ev.Advised(SESSION, 0, 1.0, 60.0, (), 0.0))
    assert len(pieces) == len(set(pieces)) == count
    assert {key for key, layer in pieces if layer == 3} == set(KEYS if shape is PLAIN else KEYS[-2:])
    (offer,) = [each for each in seen if isinstance(each, do.Offer)]
    assert list(offer.keys) == KEYS
    tokens = 64 * CHUNKS
    assert store.index.held(SESSION) == (tokens, tokens, CHUNKS * shape.chunk_bytes)


def test_a_request_that_reads_more_is_brought_the_rest() -> None:
    store = store_of(SHAPE)
    bring(store, ev.Advised(SESSION, 0, 1.0, 60.0, (), 0.0))
    wants = list(zip(KEYS[:20], SHAPE.read_after(20), strict=True))
    load = ev.LoadWanted(("w", "1"), LoadKind.DEMAND, SESSION, SHAPE.fingerprint, wants, (), 0, 1.0)
    pieces, seen = bring(store, load)
    assert sorted(pieces) == [(key, layer) for key in KEYS[18:20] for layer in (0, 1, 3)]
    assert [each.chunks for each in seen if isinstance(each, do.Found)] == [20]
