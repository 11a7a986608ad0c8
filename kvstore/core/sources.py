"""From where a load can have a chunk, given what this node knows at the moment. Reads only.

Order: arena, own SSD, a peer that promised it, the blob tier. A source that failed a load is not tried again for it.
"""

from __future__ import annotations

from kvstore.core.events import SourceKind
from kvstore.core.index import Chunk, Index
from kvstore.core.load import Load
from kvstore.core.state import CopyState, PieceState

#: What a peer may count on: never another peer's promise, or two nodes would wait for each other.
_OWN = (PieceState.QUEUED, PieceState.LOADING, PieceState.SAVING, PieceState.READY)
COMING = (*_OWN, PieceState.EXPECTED)


def usable(index: Index, load: Load, key: bytes) -> Chunk | None:
    """The chunk's record, unless it is of another shape or erased."""
    chunk = index.chunks.get(key)
    return chunk if chunk is not None and chunk.shape == load.shape and not chunk.doomed else None


def near(index: Index, load: Load, i: int) -> bool:
    """Whether the wanted pieces are in the arena, on their way, or on the SSD."""
    key, layers = load.wants[i]
    chunk = usable(index, load, key)
    if chunk is None:
        return False
    if chunk.ssd is CopyState.PRESENT and (key, SourceKind.SSD) not in load.tried:
        return True
    coming = COMING if load.leading_only else _OWN
    return all(chunk.state(layer) in coming for layer in layers)


def obtainable(index: Index, load: Load, i: int) -> bool:
    """Whether the chunk can be brought, as far as is known."""
    if near(index, load, i):
        return True
    chunk = usable(index, load, load.wants[i][0])
    return chunk is not None and slower_source(load, chunk) is not None


def ready(index: Index, load: Load, i: int) -> bool:
    """Whether every wanted piece can be read in the arena."""
    chunk = usable(index, load, load.wants[i][0])
    return chunk is not None and all(chunk.state(layer) is PieceState.READY for layer in load.wants[i][1])


def absent(index: Index, load: Load, i: int) -> tuple[int, ...]:
    """The wanted layers that are neither here nor on their way."""
    key, layers = load.wants[i]
    chunk = usable(index, load, key)
    return tuple(layer for layer in layers if chunk is None or chunk.state(layer) is PieceState.ABSENT)


def slower_source(load: Load, chunk: Chunk) -> SourceKind | None:
    """The tier to read ABSENT pieces from; None: no known one. Peers are never served from the blob tier: they have it too."""
    if chunk.ssd is CopyState.PRESENT and (chunk.key, SourceKind.SSD) not in load.tried:
        return SourceKind.SSD
    if chunk.blob is CopyState.PRESENT and (chunk.key, SourceKind.BLOB) not in load.tried and load.leading_only:
        return SourceKind.BLOB
    return None
