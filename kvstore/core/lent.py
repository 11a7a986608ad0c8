"""How much of the arena other nodes may read at a time. A reader that is refused goes to its next source."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.kv import KvShape
from kvstore.core.events import LoadKind, LoadWanted
from kvstore.core.load import StoreLoad

#: Most loads for peers at a time; their chunks may pin 1 / PEER_SHARE of the arena.
PEER_LOADS, PEER_SHARE = 16, 2


def lent_out(event: LoadWanted, shape: KvShape, loads: Iterable[StoreLoad], arena_bytes: int) -> bool:
    """Whether this load for a peer exceeds the limits. A chunk read by several counts once; a sole reader is never
    refused."""
    lent = [load for load in loads if load.kind is LoadKind.PEER]
    keys = {key for load in lent for key in load.places} | {key for key, _ in event.wants}
    return bool(lent) and (len(lent) >= PEER_LOADS or len(keys) * shape.chunk_bytes > arena_bytes // PEER_SHARE)
