"""The record of one load: what is wanted, has come and is still awaited. Decides nothing; loads.py does."""

from __future__ import annotations

from contracts.kv import KvShape
from kvstore.core.events import LoadKind, LoadWanted, SourceKind, Want
from kvstore.core.state import LoadState

#: A load is ended when no piece has come for this long.
SILENCE_S = {LoadKind.DEMAND: 6.0, LoadKind.PEER: 30.0, LoadKind.PREFETCH: 30.0, LoadKind.ADVISED: 60.0}


def sound_wants(event: LoadWanted, shape: KvShape) -> list[Want]:
    """The leading valid wants, with their layers listed. Cut at the first with a layer that does not exist or a key
    that came before."""
    wants: list[Want] = []
    seen: set[bytes] = set()
    every = tuple(range(shape.layers))
    for key, layers in event.wants:
        if key in seen or any(not 0 <= layer < shape.layers for layer in layers):
            break
        seen.add(key)
        wants.append((key, tuple(sorted(set(layers))) if layers else every))
    return wants


class StoreLoad:
    """One load. Chunks with an index below `found` may still come; those below `acquired` have been asked for.

    late: see `prefetch.is_late`. cut: some chunks did not come for lack of room. missing: by chunk, the layers awaited.
    leased: by (chunk, layer), the offset of each pinned piece. fresh: leased pieces that the owner has not been told
    of. void: chunks that will not come. tried: sources that failed, by chunk. asking: the lease that awaits an answer.
    in_parts: its chunks are planned in parts. Not where peers may bring some: what they owe must be awaited at once, or
    it is dropped when another load ends.
    """

    __slots__ = (
        "acquired", "arrival", "asked", "asking", "cut", "deferred", "found", "fresh", "ident", "in_parts", "kind",
        "late",
        "leased", "missing",
        "offered", "order", "places", "priority", "probe_size", "probed", "probing", "progress", "session", "shape",
        "sources", "state",
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
        self.in_parts = event.kind is LoadKind.ADVISED and not event.sources
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
        self.asked: list[int] = []  #: indices of the chunks asked for under `asking`
        self.deferred: list[str] = []  #: slow peers, asked only for what the blob tier lacks
        self.probing: frozenset[bytes] = frozenset()
        self.probed: set[bytes] = set()
        self.probe_size = 1
        self.progress = event.now
        self.offered = False

    @property
    def leading_only(self) -> bool:
        """Whether a gap makes later chunks useless, as in a prompt. A peer takes any chunk."""
        return self.kind is not LoadKind.PEER

    def is_stuck(self, now: float) -> bool:
        """Whether something is awaited and nothing has come for SILENCE_S."""
        awaits = bool(self.missing) or self.state is LoadState.LOCATING
        return awaits and now - self.progress > SILENCE_S[self.kind]
