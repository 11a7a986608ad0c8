"""Hits by tier and the use of hints, in bytes: metrics, summed while an event is handled, and whether hints pay.

A piece brought for a hint is *used* when a request or the worker's HBM takes it, *late* when a request wants it while
it is still being read, and *wasted* when it is evicted before it was taken.

Invariant (`validate`): only READY pieces are untouched.
"""

from __future__ import annotations

import math
from collections import Counter

from kvstore.core.events import LoadKind, SourceKind
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import Counted
from kvstore.core.prefetch import OPTIONAL
from kvstore.core.state import PieceState

_TAKERS = (LoadKind.DEMAND, LoadKind.PREFETCH)
#: Seconds in which the past loses half of its weight.
_HALVED_S = 10.0


class Usefulness:
    """See the module. Other parts report what happens to a piece; `drain` returns the sums."""

    def __init__(self, arena_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        #: Of hints' latest pieces, about as many bytes as the arena has, by outcome.
        self._lately: Counter[str] = Counter()
        self._halved_s = -math.inf
        #: chunk key -> bit mask of layers that came for a hint and have not been taken
        self._untouched: dict[bytes, int] = {}
        self._sums: Counter[tuple[str, str]] = Counter()

    def read(self, chunk: Chunk, layer: int, source: SourceKind, kind: LoadKind) -> None:
        """A fetch brought the piece for a load of this kind."""
        if kind is LoadKind.DEMAND:
            self._add("hit_bytes", source.name.lower(), chunk)
        elif kind in OPTIONAL:
            self._untouched[chunk.key] = self._untouched.get(chunk.key, 0) | 1 << layer

    def overtaken(self, chunk: Chunk) -> None:
        """A request wants a piece whose fetch for a hint has not ended."""
        self._add("hint_bytes", "late", chunk)

    def found(self, chunk: Chunk, kind: LoadKind) -> None:
        """A load found the piece in the arena."""
        if kind is LoadKind.DEMAND:
            self._add("hit_bytes", "dram", chunk)

    def taken(self, chunk: Chunk, layer: int, kind: LoadKind) -> None:
        """The piece is leased to a load."""
        if kind in _TAKERS and self._forget(chunk.key, layer):
            self._add("hint_bytes", "used", chunk)

    def dropped(self, chunk: Chunk, layer: int) -> None:
        """The piece leaves the arena."""
        if self._forget(chunk.key, layer):
            self._add("hint_bytes", "wasted", chunk)

    def wasteful(self, now: float) -> bool:
        """Whether most of what hints brought lately was evicted before it was taken: there is no room for more. What
        was long ago counts less."""
        if now - self._halved_s >= _HALVED_S:
            self._halved_s = now
            self._halve()
        return 2 * self._lately["wasted"] > max(self._lately.total(), self._arena_bytes // 4)

    def _halve(self) -> None:
        self._lately = Counter({label: size // 2 for label, size in self._lately.items()})

    def drain(self) -> list[Counted]:
        """The sums since the last call."""
        sums = [Counted(what, amount, (label,)) for (what, label), amount in self._sums.items()]
        self._sums.clear()
        return sums

    def _add(self, what: str, label: str, chunk: Chunk) -> None:
        self._sums[what, label] += chunk.shape.piece_bytes
        if what == "hint_bytes":
            self._lately[label] += chunk.shape.piece_bytes
            if self._lately.total() > self._arena_bytes:
                self._halve()

    def _forget(self, key: bytes, layer: int) -> bool:
        layers = self._untouched.get(key, 0)
        if not layers >> layer & 1:
            return False
        layers ^= 1 << layer
        if layers:
            self._untouched[key] = layers
        else:
            del self._untouched[key]
        return True

    def validate(self, index: Index) -> None:
        """Raise AssertionError when the invariant does not hold."""
        for key, layers in self._untouched.items():
            chunk = index.resident[key]
            assert all(chunk.state(i) is PieceState.READY for i in range(chunk.shape.layers) if layers >> i & 1)
