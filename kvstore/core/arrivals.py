"""When the chunks of a load will be in the arena, so that the worker can compare waiting with recomputing. Changes
nothing.

Each source first brings what ranks before this load, then the load's own pieces, at its measured rate (rates.py); hints
rank behind. A peer says when leased pieces will be in its arena; the transfer comes on top. A source without a recent
measurement has no time: the worker uses its own estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from kvstore.core.events import SourceKind
from kvstore.core.fetches import Fetches
from kvstore.core.leases import Leases
from kvstore.core.load import StoreLoad
from kvstore.core.meter import Meter
from kvstore.core.prefetch import OPTIONAL
from kvstore.core.rates import Source
from kvstore.core.sources import Sources
from kvstore.core.state import PieceState

#: Stands for an unknown number of seconds.
UNKNOWN = -1.0
_COMING = (PieceState.QUEUED, PieceState.LOADING)


class Arrivals:
    """See the module."""

    def __init__(self, sources: Sources, fetches: Fetches, leases: Leases, meter: Meter) -> None:
        self._sources, self._fetches, self._leases, self._meter = sources, fetches, leases, meter

    def due_s(self, load: StoreLoad, indices: Iterable[int]) -> tuple[float, ...]:
        """Seconds until each of these chunks, and all before it, is READY; `UNKNOWN` from the first unknown one on.
        Empty for a hint: no request waits."""
        if load.kind in OPTIONAL:
            return ()
        rates, now = self._meter.rates, self._meter.now
        asked, wanted = self._asked(load), Counter[Source]()
        latest_s, found = 0.0, []
        for i in indices:
            pieces, peer_due_s = self._pieces(load, i)
            for source, count in pieces.items():
                if not rates.is_known(source, now):
                    latest_s = math.inf
                wanted[source] += count * load.shape.piece_bytes
                before = max(rates.ahead(source, of_demand=True) - asked[source], 0)
                latest_s = max(latest_s, peer_due_s + rates.cost(source, now).of(before + wanted[source]))
            found.append(latest_s if math.isfinite(latest_s) else UNKNOWN)
        return tuple(found)

    def _asked(self, load: StoreLoad) -> Counter[Source]:
        """By source, bytes of this load in its queue already: they do not delay the load's other pieces."""
        asked: Counter[Source] = Counter()
        for key, layers in ((load.wants[i][0], layers) for i, layers in load.missing.items()):
            for layer in layers:
                if (source := self._fetches.source_of(key, layer)) is not None:
                    asked[source] += load.shape.piece_bytes
        return asked

    def _pieces(self, load: StoreLoad, i: int) -> tuple[Counter[Source], float]:
        """Pieces of the chunk by source, and the seconds until a peer has the leased ones in its arena."""
        key, layers = load.wants[i]
        chunk = self._sources.usable(load, key)
        found, peer_due_s, absent = Counter[Source](), 0.0, 0
        if chunk is None or chunk.complete:
            return found, peer_due_s
        for layer in layers:
            state = chunk.state(layer)
            if state in _COMING and (source := self._fetches.source_of(key, layer)) is not None:
                found[source] += 1
            elif state is PieceState.EXPECTED:
                peer, due_s = self._leases.expected_from(key, layer, self._meter.now)
                found[Source(SourceKind.PEER, peer)] += 1
                peer_due_s = max(peer_due_s, due_s)
            elif state is PieceState.ABSENT:
                absent += 1
        if absent and (kind := self._sources.tier(load, chunk, absent)) is not None:
            found[Source(kind)] += absent
        return found, peer_due_s
