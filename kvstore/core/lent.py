"""How much of the arena other nodes may read from at a time: who asks for more goes to its next source."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.kv import KvShape
from kvstore.core.events import LoadKind, LoadWanted
from kvstore.core.load import Load

#: So many prompts at a time, and so much of the arena is pinned for them.
PEER_LOADS, PEER_SHARE = 16, 2


def lent_out(event: LoadWanted, shape: KvShape, loads: Iterable[Load], arena_bytes: int) -> bool:
    """Whether other nodes read as much from here as they may. The same prompt read by many counts its bytes once."""
    lent = [load for load in loads if load.kind is LoadKind.PEER]
    keys = {key for load in lent for key in load.places} | {key for key, _ in event.wants}
    return bool(lent) and (len(lent) >= PEER_LOADS or len(keys) * shape.chunk_bytes > arena_bytes // PEER_SHARE)
