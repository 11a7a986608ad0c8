"""When and in which order advised sessions' pieces are taken into HBM: a band of lowest layers of all, then the next band, ...

A hint that says when its request is expected waits for half of that time, with its cache in DRAM: in HBM it would take room that
others need, who overwrite it before the request comes. Half, as such times are means, and requests scatter around them. More urgent
sessions first (SYMPHONY, section 3.6); those of one priority within a band by expected arrival (DESIGN section 6; 3.4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from contracts.ids import SessionKey

#: Layers are asked for in this many bands: one request a band, so that a load is worth its message.
BANDS = 4


@dataclass(slots=True)
class Offer:
    """An advised session's chunks that the store can bring. Times are monotonic: when it was offered, when its request is expected (not
    after that: nobody knows), when the hint ends. `band` is the next one to ask for; no_room: it was tried in vain."""

    session: SessionKey
    keys: list[bytes]
    priority: int
    offered_s: float
    arrival_s: float
    expires_s: float
    band: int = 0
    no_room: bool = False

    @property
    def from_s(self) -> float:
        """When HBM may be filled."""
        return (self.offered_s + self.arrival_s) / 2


def next_offer(offers: Iterable[Offer], now: float) -> Offer | None:
    """The offer whose next band goes first; None: there is none whose time has come."""
    return min((o for o in offers if o.from_s <= now), key=lambda o: (o.priority, o.band, o.arrival_s), default=None)


def band_layers(band: int, layers: int, bands: int = BANDS) -> range:
    """The layers of a band, of `bands` or as many as there are layers."""
    count = min(bands, layers)
    return range(band * layers // count, (band + 1) * layers // count)
