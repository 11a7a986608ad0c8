"""When the chunks of a load will be in the arena: for whoever weighs waiting for them against computing them again. Reads only.

Each source brings what ranks before this load, then the load's own pieces, at its measured pace (rates.py). What hints want ranks behind.
A peer says itself when what it has promised will be in its own arena; the way from there to here comes on top. What comes from a source
that was not measured lately has no time: whoever asks has guesses of its own, and should try it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from kvstore.core.events import SourceKind
from kvstore.core.fetches import Fetches
from kvstore.core.leases import Leases
from kvstore.core.load import Load
from kvstore.core.meter import Meter
from kvstore.core.prefetch import OPTIONAL
from kvstore.core.rates import Source
from kvstore.core.sources import Sources
from kvstore.core.state import PieceState

#: In the place of seconds.
UNKNOWN = -1.0
_COMING = (PieceState.QUEUED, PieceState.LOADING)


class Arrivals:
    """See the module."""

    def __init__(self, sources: Sources, fetches: Fetches, leases: Leases, meter: Meter) -> None:
        self._sources, self._fetches, self._leases, self._meter = sources, fetches, leases, meter

    def due_s(self, load: Load, indices: Iterable[int]) -> tuple[float, ...]:
        """Seconds until each of these chunks, and all before it, can be read here; `UNKNOWN` from the first on that nobody can tell.
        Nothing for a hint: nobody waits."""
        if load.kind in OPTIONAL:
            return ()
        rates, now = self._meter.rates, self._meter.now
        asked, wanted = self._asked(load), Counter[Source]()
        latest_s, found = 0.0, []
        for i in indices:
            pieces, promised_s = self._pieces(load, i)
            for source, count in pieces.items():
                if not rates.is_known(source, now):
                    latest_s = math.inf
                wanted[source] += count * load.shape.piece_bytes
                before = max(rates.ahead(source, of_demand=True) - asked[source], 0)
                latest_s = max(latest_s, promised_s + rates.cost(source, now).of(before + wanted[source]))
            found.append(latest_s if math.isfinite(latest_s) else UNKNOWN)
        return tuple(found)

    def _asked(self, load: Load) -> Counter[Source]:
        """Bytes of the load that its sources have been asked for: they are ahead of nothing else of it."""
        asked: Counter[Source] = Counter()
        for key, layers in ((load.wants[i][0], layers) for i, layers in load.missing.items()):
            for layer in layers:
                if (source := self._fetches.source_of(key, layer)) is not None:
                    asked[source] += load.shape.piece_bytes
        return asked

    def _pieces(self, load: Load, i: int) -> tuple[Counter[Source], float]:
        """How many pieces of the chunk come from each source; and in how many seconds a peer has those that it has promised."""
        key, layers = load.wants[i]
        chunk = self._sources.usable(load, key)
        found, promised_s, absent = Counter[Source](), 0.0, 0
        if chunk is None or chunk.complete:
            return found, promised_s
        for layer in layers:
            state = chunk.state(layer)
            if state in _COMING and (source := self._fetches.source_of(key, layer)) is not None:
                found[source] += 1
            elif state is PieceState.EXPECTED:
                peer, due_s = self._leases.promised(key, layer, self._meter.now)
                found[Source(SourceKind.PEER, peer)] += 1
                promised_s = max(promised_s, due_s)
            elif state is PieceState.ABSENT:
                absent += 1
        if absent and (kind := self._sources.tier(load, chunk, absent)) is not None:
            found[Source(kind)] += absent
        return found, promised_s
