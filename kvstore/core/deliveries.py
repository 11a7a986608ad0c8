"""What a load's owner is told, and which pieces are pinned for it. Which pieces come is decided in loads.py.

An owner hears once how many chunks come (Found), then of pieces as they become readable (Pieces), then how many chunks
came (End). A delivered piece stays pinned until the owner has copied it (`taken`) or is gone (`release`). ADVISED loads
have no owner: nothing is pinned for them, and the session is offered to its device's worker instead (Offer).

Invariant (`validate`): a leased piece is READY, at the offset that was delivered, and pinned once for each load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvstore.core.arrivals import Arrivals
from kvstore.core.events import LoadKind
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import End, Found, Instruction, Offer, Pieces
from kvstore.core.ledger import Ledger
from kvstore.core.load import StoreLoad
from kvstore.core.sessions import Sessions
from kvstore.core.sources import Sources
from kvstore.core.state import PieceState
from kvstore.core.usefulness import Usefulness


class Deliveries:
    """See the module. Of a load it changes `leased`, `fresh` and `offered`."""

    def __init__(
        self, ledger: Ledger, index: Index, sessions: Sessions, usefulness: Usefulness, out: list[Instruction]
    ) -> None:
        self._ledger = ledger
        self._index = index
        self._sessions = sessions
        self._usefulness = usefulness
        self._out = out

    def found(self, load: StoreLoad, indices: tuple[int, ...], sources: Sources, arrivals: Arrivals) -> None:
        """Tell the owner which chunks come, from where and when."""
        ready = tuple(i for i in indices if sources.ready(load, i))
        expected, due_s = sources.expected(load, indices), arrivals.due_s(load, indices)
        near = () != ready == indices
        self._out.append(Found(load.ident, len(indices), near, indices, ready, expected, due_s, load.session))

    def lease(self, load: StoreLoad, i: int, layer: int, chunk: Chunk) -> None:
        """Pin a READY piece for the load; the next `deliver` tells the owner."""
        if load.kind is LoadKind.ADVISED:
            return
        self._usefulness.taken(chunk, layer, load.kind)
        offset = chunk.offsets[layer]
        self._ledger.pin(offset)
        load.leased[i, layer] = offset
        load.fresh.append((layer, i, offset, chunk.sums[layer]))

    def deliver(self, load: StoreLoad) -> None:
        """Tell the owner of pieces leased since the last time. An advised session is offered once layer 0 of every
        chunk is in the arena."""
        if load.fresh:
            load.fresh.sort()
            pieces = tuple((i, layer, offset, checksum) for layer, i, offset, checksum in load.fresh)
            self._out.append(Pieces(load.ident, pieces))
            load.fresh = []
        advised = load.kind is LoadKind.ADVISED and not load.offered
        planned = load.acquired >= load.found
        if advised and planned and load.found and all(0 not in layers for layers in load.missing.values()):
            load.offered = True
            self.offer(load, load.progress)

    def offer(self, load: StoreLoad, now: float) -> None:
        """Offer an advised session to its device's worker; nothing when its hint has ended."""
        advice = self._sessions.live(load.session, now) if load.session else None
        if advice is not None and load.session is not None:
            keys = tuple(key for key, _ in load.wants[: load.found])
            arrival = 0.0 if advice.arrival == math.inf else max(0.0, advice.arrival - now)
            left_s = advice.expires - now
            fingerprint, manifest = load.shape.fingerprint, self._index.manifests.get(load.session)
            note = manifest.note if manifest is not None and manifest.fingerprint == fingerprint else b""
            self._out.append(
                Offer(load.session, fingerprint, keys, advice.priority, arrival, left_s, advice.device, note)
            )

    def end(self, load: StoreLoad) -> None:
        """Tell the owner that nothing more comes."""
        self._out.append(End(load.ident, load.found - len(load.void)))

    def taken(self, load: StoreLoad, pieces: Iterable[tuple[int, int]]) -> None:
        """Unpin pieces, (chunk, layer), that the owner has copied. Unknown ones are ignored."""
        for piece in pieces:
            offset = load.leased.pop(piece, None)
            if offset is not None:
                self._unpin(load, piece[0], offset)

    def release(self, load: StoreLoad) -> None:
        """Unpin everything: the owner is gone or has cancelled the load."""
        for (i, _), offset in load.leased.items():
            self._unpin(load, i, offset)

    def _unpin(self, load: StoreLoad, i: int, offset: int) -> None:
        if self._ledger.unpin(offset):
            self._index.loosen(self._index.chunks[load.wants[i][0]])

    def validate(self, loads: Iterable[StoreLoad], index: Index) -> None:
        """Raise AssertionError when the invariant does not hold."""
        pins: dict[int, int] = {}
        for load in loads:
            for (i, layer), offset in load.leased.items():
                pins[offset] = pins.get(offset, 0) + 1
                chunk = index.chunks[load.wants[i][0]]
                assert chunk.state(layer) is PieceState.READY and chunk.offsets[layer] == offset
        for offset, count in pins.items():
            for _ in range(count):
                assert self._ledger.pinned(offset)
