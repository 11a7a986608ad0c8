"""In which order pieces are brought, and how many neighbouring layers one read takes.

Demand first, then reads for peers, prefetch last: each by priority, then lowest layers across all that wait. Of prefetches of one
priority so layer 0 of all advised sessions, then layer 1, ...; then expected arrival (DESIGN section 6; SYMPHONY 3.5). When a request
comes early, what is there is what its first layers need; and what is urgent (3.6), or more likely to come (a doubtful caller's hints
have a lower priority), is there first. By arrival before priority, urgency would decide only between hints of the same instant.
"""

from __future__ import annotations

from contracts.kv import KvShape
from kvstore.core.events import LoadKind, SourceKind

#: Order of fetches: the smaller goes first.
FetchRank = tuple[int, float, float, float, int, int]

#: Reads of the SSD should be about this long where layers may be taken together.
_SSD_READ_BYTES = 1 << 20
#: So many bands at most, which is half of a chunk: the first layers are computed while the others come.
_BANDS = 2


def rank(kind: LoadKind, *, layer: int, priority: int, arrival: float, order: int, position: int) -> FetchRank:
    """Where a fetch of `layer` stands in the queue.

    arrival: monotonic seconds when the advised request is expected (infinity: unknown). order: number of the load, oldest
    first. position: of the chunk in its load.
    """
    if kind in (LoadKind.PREFETCH, LoadKind.ADVISED):
        return (LoadKind.PREFETCH, priority, layer, arrival, order, position)
    return (kind, priority, layer, 0.0, order, position)


def quarter(shape: KvShape) -> int:
    """Layers of a band: slabs hold pieces of one band."""
    return max(1, -(-shape.layers // 4))


def band_of(shape: KvShape, layer: int) -> int:
    """The number of the layer's band, 0 to 3."""
    return layer // quarter(shape)


def reads(shape: KvShape, layers: list[int], source: SourceKind, kind: LoadKind) -> list[list[int]]:
    """`layers` (ascending) cut into reads, each without gaps: within one band, and shorter from the SSD.

    Where pieces are small, what somebody waits for is read from the SSD two bands at a time: each read costs the store more than the
    time by which its first layer would have come sooner.
    """
    size = quarter(shape)
    if source is SourceKind.SSD and kind in (LoadKind.DEMAND, LoadKind.PEER):
        size *= max(1, min(_BANDS, _SSD_READ_BYTES // (size * shape.piece_bytes)))
    most = size if source is SourceKind.BLOB else min(size, max(1, -(-_SSD_READ_BYTES // shape.piece_bytes)))
    cut: list[list[int]] = []
    for layer in layers:
        joins = cut and layer == cut[-1][-1] + 1 and layer // size == cut[-1][0] // size
        if joins and layer % size // most == cut[-1][0] % size // most:
            cut[-1].append(layer)
        else:
            cut.append([layer])
    return cut
