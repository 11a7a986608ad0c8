"""In which order advised sessions' pieces are taken into HBM: a band of lowest layers of all, then the next band, ...

More urgent sessions first (SYMPHONY, section 3.6); those of one priority within a band by expected arrival (DESIGN section 6; 3.4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from contracts.ids import SessionKey

#: Layers are asked for in this many bands: one request a band, so that a load is worth its message.
BANDS = 4


@dataclass(slots=True)
class Offer:
    """An advised session's chunks that the store can bring. `band` is the next one to ask for; no_room: it was tried in vain."""

    session: SessionKey
    keys: list[bytes]
    priority: int
    arrival_s: float
    expires_s: float
    band: int = 0
    no_room: bool = False


def next_offer(offers: Iterable[Offer]) -> Offer | None:
    """The offer whose next band goes first."""
    return min(offers, key=lambda o: (o.priority, o.band, o.arrival_s), default=None)


def band_layers(band: int, layers: int, bands: int = BANDS) -> range:
    """The layers of a band, of `bands` or as many as there are layers."""
    count = min(bands, layers)
    return range(band * layers // count, (band + 1) * layers // count)
