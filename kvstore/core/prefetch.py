"""In which order pieces are brought, and how many neighbouring layers one read takes.

Demand first, then reads for peers, then prefetch; within each by priority, then lowest layer across all loads. So among
prefetches of one priority layer 0 of all advised sessions comes first, then layer 1, and so on; ties by expected
arrival (SYMPHONY 3.5, 3.6). When a request comes early, its first layers are there. Priority precedes arrival,
otherwise urgency would decide only between hints of the same instant; hints of a distrusted caller have a lower
priority.

A hint whose cache cannot arrive in time ranks behind all that can (`is_late`): its request will recompute most of it,
and waiting for it would make others late too. See docs/design/0020-late-hints.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from contracts.kv import KvShape
from contracts.memory.layer_bands import band_of, layers_of
from kvstore.core.events import LoadKind, SourceKind

#: Kinds of load for which no request waits yet.
OPTIONAL = (LoadKind.PREFETCH, LoadKind.ADVISED)

#: Rank of a fetch; the smaller goes first.
FetchRank = tuple[int, float, bool, float, float, int, int]

#: Target size of an SSD read that takes several layers.
_SSD_READ_BYTES = 1 << 20
#: Where a request waits and pieces are small, the first 1 / _FIRST_PART of the layers is read alone, the others in as
#: few reads as possible.
_FIRST_PART = 6


def is_late(takes_s: float, lead_s: float) -> bool:
    """Whether a hinted cache arrives after its request. takes_s: time to bring it, behind hints that are in time.
    lead_s: time until the request."""
    return takes_s > lead_s


def rank(
    kind: LoadKind, *, layer: int, priority: int, arrival: float, order: int, position: int, late: bool = False
) -> FetchRank:
    """The rank of a fetch of `layer`.

    arrival: monotonic seconds when the advised request is expected (infinity: unknown). order: number of the load,
    oldest first. position: index of the chunk in its load. late: see `is_late`; ignored unless the kind is OPTIONAL.
    """
    if kind in OPTIONAL:
        return (LoadKind.PREFETCH, priority, late, layer, arrival, order, position)
    return (kind, priority, False, layer, 0.0, order, position)


@functools.lru_cache(maxsize=4096)  # nearly all chunks of a load want the same layers
def reads(shape: KvShape, layers: tuple[int, ...], source: SourceKind, kind: LoadKind) -> tuple[tuple[int, ...], ...]:
    """`layers` (ascending) cut into reads without gaps: within one band, and shorter from the SSD.

    DEMAND and PEER loads of small pieces take two reads from the SSD, a short one and the rest: computing can begin
    after the first, and more reads would cost more than they gain (docs/design/0001-kvstore.md).
    """
    band, long = len(layers_of(0, shape.layers)), max(1, _SSD_READ_BYTES // shape.piece_bytes)
    if source is SourceKind.SSD and kind in (LoadKind.DEMAND, LoadKind.PEER) and long >= 2 * band:
        first = shape.layers // _FIRST_PART
        return _cut(layers, lambda layer: 0 if layer < first else 1 + (layer - first) // long)
    most = band if source is SourceKind.BLOB else min(band, max(1, -(-_SSD_READ_BYTES // shape.piece_bytes)))

    def part(layer: int) -> tuple[int, int]:
        number = band_of(layer, shape.layers)
        return number, (layer - layers_of(number, shape.layers).start) // most

    return _cut(layers, part)


def _cut(layers: Iterable[int], part: Callable[[int], object]) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbouring layers of the same part."""
    cut: list[list[int]] = []
    for layer in layers:
        if cut and layer == cut[-1][-1] + 1 and part(layer) == part(cut[-1][0]):
            cut[-1].append(layer)
        else:
            cut.append([layer])
    return tuple(map(tuple, cut))
