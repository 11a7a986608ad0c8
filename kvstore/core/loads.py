"""A load's life: which of its chunks can be brought, and the source of each piece.

A load is LOCATING while peers and the blob tier are asked, then FLOWING, then ENDED. A piece that fails from one source
is tried from the next. When no source is left, its chunk is void; for a prompt all later chunks are void too. What the
owner is told is in deliveries.py, whom a load asks in locating.py, which source is best in sources.py.

Prior art: vLLM's offloading manager pins between prepare and complete; here the pin is per piece and per load.

Invariant (`validate`): a load's `missing` pieces are exactly those that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contracts.ids import SessionKey
from contracts.kv import leading
from kvstore.core.acquiring import Acquiring, rank_of
from kvstore.core.arrivals import Arrivals
from kvstore.core.deliveries import Deliveries
from kvstore.core.events import Fault, FoundCopy, LoadId, LoadKind, LoadWanted, PeerHolds, SourceKind
from kvstore.core.fetches import Fetches, PieceRef
from kvstore.core.index import Index
from kvstore.core.instructions import Counted, DeleteBlob, DeleteSsd, End, Found, Instruction
from kvstore.core.leases import Leases
from kvstore.core.ledger import Ledger
from kvstore.core.lent import lent_out
from kvstore.core.load import StoreLoad, sound_wants
from kvstore.core.locating import Locating
from kvstore.core.meter import Meter
from kvstore.core.sessions import Sessions
from kvstore.core.sources import COMING, Sources
from kvstore.core.state import LOAD_MOVES, CopyState, LoadState, move
from kvstore.core.unplanned import Unplanned
from kvstore.core.usefulness import Usefulness
from kvstore.core.waiting import Waiting

#: Pieces of a hint that one event plans; then others come first. A long session has 100,000, which take a second.
PIECES_AT_ONCE = 1024


class Loads:
    """See the module."""

    def __init__(
        self,
        index: Index,
        ledger: Ledger,
        sessions: Sessions,
        usefulness: Usefulness,
        meter: Meter,
        out: list[Instruction],
    ) -> None:
        self._index = index
        self._arena_bytes = ledger.arena_bytes
        self._sessions = sessions
        self._usefulness = usefulness
        self._meter = meter
        self._sources = Sources(index, meter)
        self._out = out
        self._deliveries = Deliveries(ledger, index, sessions, usefulness, out)
        self._loads: dict[LoadId, StoreLoad] = {}
        self.pieces_at_once = PIECES_AT_ONCE
        self._unplanned = Unplanned()
        #: Advised sessions whose load ended incomplete for lack of room. hints.py reads and clears it.
        self.short: dict[SessionKey, None] = {}
        self._orders = 0
        self._fetches: Fetches
        self._leases: Leases
        self._waiting: Waiting
        self._arrivals: Arrivals
        self._locating: Locating
        self._acquiring: Acquiring

    def connect(self, fetches: Fetches, leases: Leases) -> None:
        """Complete the construction: `Fetches` and `Leases` need this object's callbacks."""
        self._fetches, self._leases = fetches, leases
        self._waiting = Waiting(self._index, fetches, leases)
        self._arrivals = Arrivals(self._sources, fetches, leases, self._meter)
        self._locating = Locating(self._index, self._meter, self._sources, leases, self._waiting, self._out)
        self._acquiring = Acquiring(
            self._sources, fetches, leases, self._waiting, self._locating, self._deliveries, self._usefulness
        )

    # ---- beginning

    def begin(self, event: LoadWanted) -> None:
        """Start a load; an open load of the same name is cancelled. A load of an unknown model, or for a peer beyond
        what may be lent, ends at once with nothing."""
        self.cancel(event.load)
        shape = self._index.shapes.get(event.fingerprint)
        if shape is None:
            self._out.extend((Found(event.load, 0, False, ()), End(event.load, 0)))
            return
        if event.kind is LoadKind.PEER and lent_out(event, shape, self._loads.values(), self._arena_bytes):
            self._out.extend((Counted("peer_loads_refused"), Found(event.load, 0, False, ()), End(event.load, 0)))
            return
        advice = self._sessions.live(event.session, event.now) if event.session else None
        self._orders += 1
        load = StoreLoad(
            event, shape, sound_wants(event, shape), self._orders, advice.arrival if advice else float("inf")
        )
        self._loads[load.ident], load.late = load, self._sources.late(load)
        self._plan(load)
        self._locate(load, event.now)

    # ---- locating

    def _locate(self, load: StoreLoad, now: float) -> None:
        """Ask the next source, or settle when there is none left to ask."""
        if self._locating.advance(load, now):
            self._settle(load, now)

    def probed(self, ident: LoadId, keys: Iterable[bytes], found: Sequence[FoundCopy], now: float) -> None:
        """The blob tier's answer to a Probe. Copies are remembered even when the load is gone."""
        for copy in found:
            chunk = self._index.chunk(copy.key, copy.shape)
            if chunk is None:
                self._out.append(Counted("shape_mismatches"))
            elif chunk.blob is not CopyState.WAITING:
                self._index.set_copy(chunk, "blob", CopyState.PRESENT, copy.checksums)
        load = self._loads.get(ident)
        if load is None:
            return
        load.probed |= set(keys)
        load.probing -= set(keys)
        for i in sorted(load.missing):
            if i in load.missing and load.wants[i][0] not in load.probing:
                self._acquire(load, i)
        if load.state is LoadState.LOCATING:
            self._locate(load, now)
        else:
            self._update(load)

    def peer_holds(self, event: PeerHolds) -> None:
        """A peer's answer: the chunks that it will bring."""
        if self._locating.peer_holds(event, self._loads.values()):
            self.peer_answered(event.lease, event.now)

    def peer_answered(self, lease: str, now: float) -> None:
        """The peer asked under this lease has answered, failed or been given up: its load goes on locating."""
        for load in list(self._loads.values()):
            if load.asking == lease:
                load.asking = ""
                self._locate(load, now)

    def _settle(self, load: StoreLoad, now: float) -> None:
        """Everything that can be known is known: tell the owner what comes, and acquire it."""
        flags = [self._sources.obtainable(load, i) for i in range(load.found)]
        if load.leading_only:
            load.found = leading(flags)
            indices: tuple[int, ...] = tuple(range(load.found))
        else:
            indices = tuple(i for i, flag in enumerate(flags) if flag)
            load.void = set(range(load.found)) - set(indices)
        load.state = move(LOAD_MOVES, load.state, LoadState.FLOWING)
        if load.kind is LoadKind.DEMAND and load.found < len(load.wants):
            self._out.append(Counted("chunks_missed", len(load.wants) - load.found))
        self._deliveries.found(load, indices, self._sources, self._arrivals)
        load.progress = now
        self._plan(load)
        self._update(load)

    # ---- pieces

    @property
    def unplanned(self) -> bool:
        """Whether some hints have chunks left to plan."""
        return self._unplanned.first() is not None

    def plan_more(self, now: float) -> None:
        """Plan more of the most urgent hint that has chunks left."""
        if (first := self._unplanned.first()) is not None:
            load = self._loads[first]
            load.progress = now
            self._plan(load)
            self._update(load)

    def _plan(self, load: StoreLoad) -> None:
        """Acquire the next chunks: of a load that is still being located the leading ones that this node has. Of one
        that is planned in parts `pieces_at_once`."""
        located, pieces = load.state is LoadState.FLOWING, 0
        at_hand = self._sources.near if self._sources.own_first(load) else self._sources.coming
        while load.acquired < load.found and (located or at_hand(load, load.acquired)):
            if load.in_parts and pieces >= self.pieces_at_once:
                self._unplanned.add(load.ident, rank_of(load))
                return
            i = load.acquired
            load.acquired += 1
            if i not in load.void:
                self._acquire(load, i)
                pieces += len(load.wants[i][1])
        self._unplanned.drop(load.ident)

    def _acquire(self, load: StoreLoad, i: int) -> None:
        """Get chunk `i`; it is void when no source is left."""
        if not self._acquiring.acquire(load, i):
            self._void(load, i)

    def arrived(self, pieces: Iterable[PieceRef], now: float) -> None:
        """Pieces became READY: every load that waits for some gets them in one message."""
        touched: dict[LoadId, StoreLoad] = {}
        for chunk, layer in pieces:
            for ident in self._waiting.of(chunk.key, layer):
                load = self._loads[ident]
                i = load.places[chunk.key]
                self._waiting.end(load, i, layer)
                self._deliveries.lease(load, i, layer, chunk)
                load.progress = now
                touched[ident] = load
        for load in touched.values():
            self._update(load)

    def hurry(self, now: float) -> None:
        """Time passed: pieces that slow peers still owe are taken from a sooner source."""
        self._locating.leave_slow_peers(self._loads, now)

    def lost(self, pieces: Sequence[PieceRef], source: SourceKind, fault: Fault, now: float) -> None:
        """Pieces did not come from `source`. A bad copy is deleted; loads that wait try the next source, but give up on
        NO_ROOM and CANCELLED."""
        self._judge_copies(pieces, source, fault)
        again: dict[tuple[LoadId, int], None] = {}
        for chunk, layer in pieces:
            for ident in self._waiting.of(chunk.key, layer):
                load = self._loads[ident]
                if fault is not Fault.CANCELLED:
                    load.tried.add((chunk.key, source))
                again[ident, load.places[chunk.key]] = None
        for ident, i in again:
            found = self._loads.get(ident)
            if found is not None and i in found.missing:
                if fault in (Fault.NO_ROOM, Fault.CANCELLED):
                    found.cut = True
                    self._void(found, i)
                else:
                    self._acquire(found, i)
                self._update(found)

    def _judge_copies(self, pieces: Sequence[PieceRef], source: SourceKind, fault: Fault) -> None:
        """Count the fault, and forget the copies that it shows to be bad; delete them unless they are merely missing
        from one answer."""
        counters = {
            Fault.CORRUPT: "checksum_failures",
            Fault.MISSING: "missing_pieces",
            Fault.MEDIUM: "medium_errors",
            Fault.ERASED: "erased_pieces",
            Fault.LOCKED: "locked_pieces",
        }
        if fault in counters:
            self._out.append(Counted(counters[fault], len(pieces), (source.name.lower(),)))
        # A medium error is the copy's fault only while the disk otherwise works.
        bad = fault in (Fault.CORRUPT, Fault.MISSING, Fault.ERASED) or (
            fault is Fault.MEDIUM and self._meter.reads(source)
        )
        if not bad or source is SourceKind.PEER:
            return
        tier, delete = ("ssd", DeleteSsd) if source is SourceKind.SSD else ("blob", DeleteBlob)
        for chunk in {chunk.key: chunk for chunk, _ in pieces}.values():
            if getattr(chunk, tier) is CopyState.PRESENT:
                self._index.set_copy(chunk, tier, CopyState.ABSENT)
                if fault is not Fault.MISSING:
                    self._out.append(delete(chunk.key, chunk.shape.fingerprint))

    def _void(self, load: StoreLoad, i: int) -> None:
        """Chunk `i` cannot be brought."""
        if load.leading_only:
            load.found = min(load.found, i)
            if load.acquired >= load.found:
                self._unplanned.drop(load.ident)
            gone = [j for j in load.missing if j >= i]
        else:
            load.void.add(i)
            gone = [i]
        for j in gone:
            self._waiting.leave(load, j)

    def void_key(self, key: bytes) -> None:
        """The chunk was erased: loads get no more of it."""
        for load in list(self._loads.values()):
            i = load.places.get(key)
            if i is not None and i < load.found:
                self._void(load, i)
                self._check_end(load)

    # ---- the owner

    def _update(self, load: StoreLoad) -> None:
        """Deliver what has come, and end the load when nothing is missing; nothing while it is LOCATING."""
        if load.state is not LoadState.LOCATING:
            self._deliveries.deliver(load)
            self._check_end(load)

    def _check_end(self, load: StoreLoad) -> None:
        if load.state is LoadState.FLOWING and not load.missing and load.acquired >= load.found:
            self._deliveries.deliver(load)
            load.state = move(LOAD_MOVES, load.state, LoadState.ENDED)
            self._deliveries.end(load)
            if load.kind is LoadKind.ADVISED and load.cut and load.session is not None:
                self.short[load.session] = None
        if load.state is LoadState.ENDED and not load.leased:
            self._loads.pop(load.ident, None)

    def taken(self, ident: LoadId, pieces: Iterable[tuple[int, int]], now: float) -> None:
        """The owner has copied these pieces, (chunk, layer). Unknown ones are ignored."""
        load = self._loads.get(ident)
        if load is None:
            return
        load.progress = now
        self._deliveries.taken(load, pieces)
        self._check_end(load)

    def cancel(self, ident: LoadId) -> None:
        """The owner wants nothing more, and is told nothing."""
        load = self._loads.pop(ident, None)
        if load is None:
            return
        self._unplanned.drop(ident)
        for i in list(load.missing):
            self._waiting.leave(load, i)
        self._deliveries.release(load)
        if load.asking:
            self._leases.close_unanswered(load.asking)

    def cancel_owner(self, owner: str) -> None:
        """The owner, a worker or a reading peer, is gone: cancel all of its loads."""
        for ident in [i for i in self._loads if i[0] == owner]:
            self.cancel(ident)

    def awaited(self, key: bytes, layer: int) -> bool:
        """Whether a load waits for the piece."""
        return bool(self._waiting.of(key, layer))

    def of_session(self, session: SessionKey, kind: LoadKind) -> list[LoadId]:
        """The session's loads of one kind."""
        return [i for i, load in self._loads.items() if load.kind is kind and load.session == session]

    def repeated(self, ident: LoadId, keys: Sequence[bytes], now: float) -> bool:
        """Whether this advised load already brings exactly these chunks. If it was offered, the offer is repeated with
        new times."""
        load = self._loads[ident]
        same = [key for key, _ in load.wants] == list(keys)
        if same and load.offered:
            self._deliveries.offer(load, now)
        return same

    def shape_of(self, ident: LoadId) -> bytes | None:
        """The fingerprint of the load's model; None when the load is gone."""
        load = self._loads.get(ident)
        return load.shape.fingerprint if load else None

    @property
    def count(self) -> int:
        """Loads that have not ended, or that still have pieces pinned."""
        return len(self._loads)

    def expire(self, now: float) -> None:
        """End loads whose pieces stopped coming; delivered pieces stay pinned."""
        for load in list(self._loads.values()):
            if load.is_stuck(now):
                self._out.append(Counted("loads_timed_out"))
                if load.state is LoadState.LOCATING:
                    load.asking, load.probing, load.sources, load.deferred = "", frozenset(), [], []
                    self._settle(load, now)
                for i in sorted(load.missing, reverse=True):
                    self._void(load, i)
                self._check_end(load)

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self._waiting.validate(self._loads.values())
        self._deliveries.validate(self._loads.values(), self._index)
        for load in self._loads.values():
            left = load.state is LoadState.FLOWING and load.acquired < load.found
            assert not left or (load.in_parts and load.ident in self._unplanned)
            for i, layers in load.missing.items():
                assert layers and i < load.found
                for layer in layers:
                    if load.state is LoadState.FLOWING and not load.probing:
                        assert self._index.chunks[load.wants[i][0]].state(layer) in COMING
            assert load.state is not LoadState.ENDED or (load.leased and not load.missing)
