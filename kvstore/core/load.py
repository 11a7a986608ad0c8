"""One load: what is wanted, what has come, what is still awaited. Holds; decides nothing (loads.py does)."""

from __future__ import annotations

from contracts.kv import KvShape
from kvstore.core.events import LoadKind, LoadWanted, SourceKind, Want
from kvstore.core.state import LoadState

#: A load whose pieces stop coming is ended after this time.
SILENCE_S = {LoadKind.DEMAND: 6.0, LoadKind.PEER: 30.0, LoadKind.PREFETCH: 30.0, LoadKind.ADVISED: 60.0}


def sound_wants(event: LoadWanted, shape: KvShape) -> list[Want]:
    """The wants up to the first that makes no sense (a layer that does not exist, a key twice), with their layers spelled out."""
    wants: list[Want] = []
    seen: set[bytes] = set()
    every = tuple(range(shape.layers))
    for key, layers in event.wants:
        if key in seen or any(not 0 <= layer < shape.layers for layer in layers):
            break
        seen.add(key)
        wants.append((key, tuple(sorted(set(layers))) if layers else every))
    return wants


class Load:
    """One load. `found`: chunks before this index may still come; `acquired`: those before it have been asked for. `late`: of a hint
    (`prefetch.is_late`). `cut`: some of it did not come for want of room."""

    __slots__ = (
        "acquired", "arrival", "asked", "asking", "cut", "deferred", "found", "fresh", "ident", "kind", "late", "leased", "missing",
        "offered", "order", "places", "priority", "probe_size", "probed", "probing", "progress", "session", "shape", "sources", "state",
        "tried", "void", "wants",
    )  # fmt: skip

    def __init__(self, event: LoadWanted, shape: KvShape, wants: list[Want], order: int, arrival: float) -> None:
        self.ident = event.load
        self.kind = event.kind
        self.session = event.session
        self.shape = shape
        self.wants = wants
        self.places = {key: i for i, (key, _) in enumerate(wants)}
        self.sources = list(dict.fromkeys(event.sources))
        self.priority = event.priority
        self.arrival = arrival
        self.late = self.cut = False
        self.order = order
        self.state = LoadState.LOCATING
        self.found = len(wants)
        self.acquired = 0
        self.missing: dict[int, set[int]] = {}
        self.leased: dict[tuple[int, int], int] = {}
        self.fresh: list[tuple[int, int, int, int]] = []
        self.void: set[int] = set()
        self.tried: set[tuple[bytes, SourceKind]] = set()
        self.asking = ""
        self.asked: list[int] = []  #: indices of the chunks that the peer of `asking` was asked for
        self.deferred: list[str] = []  #: peers to be asked only for what the blob tier lacks
        self.probing: frozenset[bytes] = frozenset()
        self.probed: set[bytes] = set()
        self.probe_size = 1
        self.progress = event.now
        self.offered = False

    @property
    def leading_only(self) -> bool:
        """A prompt's prefix, of which a gap voids the rest; a peer takes what there is."""
        return self.kind is not LoadKind.PEER

    def is_stuck(self, now: float) -> bool:
        """Something is awaited, and nothing has come for too long."""
        awaits = bool(self.missing) or self.state is LoadState.LOCATING
        return awaits and now - self.progress > SILENCE_S[self.kind]
