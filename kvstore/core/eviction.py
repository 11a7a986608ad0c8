"""Which pieces leave the arena first (DESIGN section 6; SYMPHONY 3.3, layer-priority eviction).

Order: chunks whose saving was skipped or failed; then class (dropped, unadvised, advised), least urgent priority, highest
layer, least recently used session, latest chunk. Without layer priority, whole chunks go: the layer is compared last.
Ranks only: nothing is freed here, and what may not be evicted at all is filtered by `evictable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from kvstore.core.index import Chunk
from kvstore.core.sessions import Rank, Standing
from kvstore.core.state import CopyState, PieceState


def unsaved(chunk: Chunk) -> bool:
    """Saved by a worker here, but no slower tier has it or will: dropped first, whole, and recomputed when wanted."""
    durable = (CopyState.PRESENT, CopyState.WAITING)
    return chunk.saved_here and chunk.ssd not in durable and chunk.blob not in durable


def evictable(chunk: Chunk) -> bool:
    """Whether its READY, unpinned pieces may go: not while a slower tier still waits for bytes from the arena."""
    if chunk.ssd is CopyState.WAITING:
        return False
    return not (chunk.blob is CopyState.WAITING and chunk.ssd is not CopyState.PRESENT)


def victims(
    chunks: Iterable[Chunk],
    standing: Callable[[Chunk], Standing],
    *,
    below: Rank | None = None,
    layer_priority: bool = True,
) -> Iterator[tuple[Chunk, int]]:
    """(chunk, layer) of READY pieces, first victim first. `below`: only chunks whose class is below this one.

    Pins are the caller's to check. Chunks must not change while this runs.
    """
    ranked: list[tuple[Rank, int, float, int, Chunk]] = []
    for chunk in chunks:
        if not chunk.ready or not evictable(chunk):
            continue
        if unsaved(chunk):
            for layer in reversed(range(chunk.shape.layers)):
                if chunk.state(layer) is PieceState.READY:
                    yield chunk, layer
            continue
        s = standing(chunk)
        if below is None or s.rank < below:
            ranked.append((s.rank, s.urgency, s.last_use, -chunk.position, chunk))
    ranked.sort(key=lambda r: r[:4])
    for _, group in groupby(ranked, key=lambda r: r[:2]):
        members = [r[4] for r in group]
        if not layer_priority:
            for chunk in members:
                for layer in reversed(range(chunk.shape.layers)):
                    if chunk.state(layer) is PieceState.READY:
                        yield chunk, layer
            continue
        for layer in reversed(range(max(c.shape.layers for c in members))):
            for chunk in members:
                if layer < chunk.shape.layers and chunk.state(layer) is PieceState.READY:
                    yield chunk, layer
