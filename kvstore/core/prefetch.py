"""In which order pieces are brought, and how many neighbouring layers one read takes.

Demand first, then reads for peers, prefetch last: each by priority, then lowest layers across all that wait. Of prefetches of one
priority so layer 0 of all advised sessions, then layer 1, ...; then expected arrival (DESIGN section 6; SYMPHONY 3.5). When a request
comes early, what is there is what its first layers need; and what is urgent (3.6), or more likely to come (a doubtful caller's hints
have a lower priority), is there first. By arrival before priority, urgency would decide only between hints of the same instant.

What cannot be here in time goes behind all that can (`is_late`): its request will compute most of it again, and when hints ask for more
than a source brings, each that waits for a late one would become late too. See docs/design/0020-late-hints.md.
"""

from __future__ import annotations

from collections.abc import Callable

from contracts.kv import KvShape
from kvstore.core.events import LoadKind, SourceKind

#: Reads that nobody waits for yet.
OPTIONAL = (LoadKind.PREFETCH, LoadKind.ADVISED)

#: Order of fetches: the smaller goes first.
FetchRank = tuple[int, float, bool, float, float, int, int]

#: Reads of the SSD should be about this long where layers may be taken together.
_SSD_READ_BYTES = 1 << 20
#: Where somebody waits and pieces are small, this part of the layers is read first, and the others in as few reads as may be.
_FIRST_PART = 6


def is_late(takes_s: float, lead_s: float) -> bool:
    """Whether a hinted cache that takes so long, behind those that come in time, is here only after its request (`lead_s` from now)."""
    return takes_s > lead_s


def rank(kind: LoadKind, *, layer: int, priority: int, arrival: float, order: int, position: int, late: bool = False) -> FetchRank:
    """Where a fetch of `layer` stands in the queue.

    arrival: monotonic seconds when the advised request is expected (infinity: unknown). order: number of the load, oldest
    first. position: of the chunk in its load. late: of a hint's (`is_late`).
    """
    if kind in OPTIONAL:
        return (LoadKind.PREFETCH, priority, late, layer, arrival, order, position)
    return (kind, priority, False, layer, 0.0, order, position)


def quarter(shape: KvShape) -> int:
    """Layers of a band: slabs hold pieces of one band."""
    return max(1, -(-shape.layers // 4))


def band_of(shape: KvShape, layer: int) -> int:
    """The number of the layer's band, 0 to 3."""
    return layer // quarter(shape)


def reads(shape: KvShape, layers: list[int], source: SourceKind, kind: LoadKind) -> list[list[int]]:
    """`layers` (ascending) cut into reads, each without gaps: within one band, and shorter from the SSD.

    Where pieces are small, what somebody waits for is read from the SSD in two reads, a short one and the rest: computing begins when the
    first layers are there, and each further read would cost the store more than the time by which its first layer came sooner. Models
    of a few layers are read in one.
    """
    band, long = quarter(shape), max(1, _SSD_READ_BYTES // shape.piece_bytes)
    if source is SourceKind.SSD and kind in (LoadKind.DEMAND, LoadKind.PEER) and long >= 2 * band:
        first = shape.layers // _FIRST_PART
        return _cut(layers, lambda layer: 0 if layer < first else 1 + (layer - first) // long)
    most = band if source is SourceKind.BLOB else min(band, max(1, -(-_SSD_READ_BYTES // shape.piece_bytes)))
    return _cut(layers, lambda layer: (layer // band, layer % band // most))


def _cut(layers: list[int], part: Callable[[int], object]) -> list[list[int]]:
    """Neighbours of one part together."""
    cut: list[list[int]] = []
    for layer in layers:
        if cut and layer == cut[-1][-1] + 1 and part(layer) == part(cut[-1][0]):
            cut[-1].append(layer)
        else:
            cut.append([layer])
    return cut
