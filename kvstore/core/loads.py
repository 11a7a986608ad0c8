"""What becomes of a load: which chunks can be had, from which source each piece comes, what its owner is told, and when.

A load is LOCATING while peers and the blob tier are asked, then FLOWING, then ENDED. Its owner hears once how many chunks
come (Found), then pieces as they can be read (Pieces), then how many chunks really came (End). A piece that fails from
one source is tried from the next; when none is left its chunk is void, and so are all later ones.

Prior art: vLLM's offloading manager pins between prepare and complete; here the pin is per piece and per load.

Invariants (`validate`): a load's `missing` pieces are exactly those that it waits for; its leased pieces are READY and pinned once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from contracts.ids import SessionKey
from contracts.kv import leading
from kvstore.core.arrivals import Arrivals
from kvstore.core.events import Fault, FoundCopy, LoadId, LoadKind, LoadWanted, PeerHolds, SourceKind
from kvstore.core.fetches import Fetches, PieceRef
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import Counted, DeleteBlob, DeleteSsd, End, Found, Instruction, Offer, Pieces
from kvstore.core.leases import Leases
from kvstore.core.ledger import Ledger
from kvstore.core.lent import lent_out
from kvstore.core.load import Load, sound_wants
from kvstore.core.locating import Locating
from kvstore.core.meter import Meter
from kvstore.core.prefetch import FetchRank, rank, reads
from kvstore.core.sessions import Sessions
from kvstore.core.sources import COMING, Sources
from kvstore.core.state import LOAD_MOVES, CopyState, LoadState, PieceState, move
from kvstore.core.usefulness import Usefulness
from kvstore.core.waiting import Waiting


class Loads:
    """See the module."""

    def __init__(
        self, index: Index, ledger: Ledger, sessions: Sessions, usefulness: Usefulness, meter: Meter, out: list[Instruction]
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._sessions = sessions
        self._usefulness = usefulness
        self._meter = meter
        self._sources = Sources(index, meter)
        self._out = out
        self._loads: dict[LoadId, Load] = {}
        #: Sessions of hints whose load has ended with less than it wanted, since the store looked.
        self.short: dict[SessionKey, None] = {}
        self._orders = 0
        self._fetches: Fetches
        self._leases: Leases
        self._waiting: Waiting
        self._arrivals: Arrivals
        self._locating: Locating

    def connect(self, fetches: Fetches, leases: Leases) -> None:
        """The two that this one and that are called by each other."""
        self._fetches, self._leases = fetches, leases
        self._waiting = Waiting(self._index, fetches, leases)
        self._arrivals = Arrivals(self._sources, fetches, leases, self._meter)
        self._locating = Locating(self._index, self._meter, self._sources, leases, self._waiting, self._out)

    # ---- beginning

    def begin(self, event: LoadWanted) -> None:
        """A new load. One with a name that is in use ends the old one."""
        self.cancel(event.load)
        shape = self._index.shapes.get(event.fingerprint)
        if shape is None:
            self._out.extend((Found(event.load, 0, False, ()), End(event.load, 0)))
            return
        if event.kind is LoadKind.PEER and lent_out(event, shape, self._loads.values(), self._ledger.arena_bytes):
            self._out.extend((Counted("peer_loads_refused"), Found(event.load, 0, False, ()), End(event.load, 0)))
            return
        advice = self._sessions.live(event.session, event.now) if event.session else None
        self._orders += 1
        load = Load(event, shape, sound_wants(event, shape), self._orders, advice.arrival if advice else float("inf"))
        self._loads[load.ident], load.late = load, self._sources.late(load)
        self._acquire_leading(load, event.now)
        self._locate(load, event.now)

    def _acquire_leading(self, load: Load, now: float) -> None:
        """Start on the chunks that this node has, while others are still being located."""
        at_hand = self._sources.near if self._sources.own_first(load) else self._sources.coming
        while load.acquired < load.found and at_hand(load, load.acquired):
            self._acquire(load, load.acquired, now)
            load.acquired += 1

    # ---- locating

    def _locate(self, load: Load, now: float) -> None:
        """Ask the next source that could help, or settle."""
        if self._locating.advance(load, now):
            self._settle(load, now)

    def probed(self, ident: LoadId, keys: Iterable[bytes], found: Sequence[FoundCopy], now: float) -> None:
        """What the blob tier answered; copies are remembered whether or not the load still wants them."""
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
                self._acquire(load, i, now)
        if load.state is LoadState.LOCATING:
            self._locate(load, now)
        else:
            self._deliver(load)
            self._check_end(load)

    def peer_holds(self, event: PeerHolds) -> None:
        """What a peer promises."""
        if self._locating.peer_holds(event, self._loads.values()):
            self.peer_answered(event.lease, event.now)

    def peer_answered(self, lease: str, now: float) -> None:
        """The peer that a load was asking has answered, failed or been given up."""
        for load in list(self._loads.values()):
            if load.asking == lease:
                load.asking = ""
                self._locate(load, now)

    def _settle(self, load: Load, now: float) -> None:
        """Tell the owner what comes, and go for it."""
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
        ready = tuple(i for i in indices if self._sources.ready(load, i))
        expected, due_s = self._sources.expected(load, indices), self._arrivals.due_s(load, indices)
        self._out.append(Found(load.ident, len(indices), () != ready == indices, indices, ready, expected, due_s))
        load.progress = now
        for i in indices:
            if i >= load.acquired and i < load.found:
                self._acquire(load, i, now)
        load.acquired = load.found
        self._deliver(load)
        self._check_end(load)

    # ---- pieces

    def _rank(self, load: Load, layer: int, i: int) -> FetchRank:
        return rank(load.kind, layer=layer, priority=load.priority, arrival=load.arrival, order=load.order, position=i, late=load.late)

    def _acquire(self, load: Load, i: int, now: float) -> None:
        """Lease what is READY of chunk `i`, join what is on its way, plan reads of the rest; else ask the blob tier, else void."""
        key, wanted = load.wants[i]
        layers = sorted(load.missing.get(i, wanted))
        chunk = self._sources.usable(load, key)
        absent: list[int] = []
        promised: list[int] = []
        for layer in layers:
            state = chunk.state(layer) if chunk else PieceState.ABSENT
            if chunk is not None and state is PieceState.READY:
                self._waiting.end(load, i, layer)
                self._usefulness.found(chunk, load.kind)
                self._lease(load, i, layer, chunk)
                continue
            self._waiting.begin(load, i, layer)
            if state in (PieceState.QUEUED, PieceState.LOADING):
                self._fetches.lift(key, layer, self._rank(load, layer, i), load.kind)
            elif state is PieceState.EXPECTED and load.leading_only:
                self._leases.lift(key, layer, load.kind, load.priority)
            elif state is PieceState.EXPECTED:
                promised.append(layer)
            elif state is PieceState.ABSENT:
                absent.append(layer)
        if not absent and not promised:
            return
        source = self._sources.tier(load, chunk, len(absent) + len(promised)) if chunk else None
        if source is not None:
            # A peer never waits for another's promise, or two nodes could wait for each other: the piece is read here for all.
            for layer in promised:
                self._leases.drop(key, layer)
            absent = sorted(absent + promised)
        if chunk is not None and source is not None:
            sums = chunk.ssd_sums if source is SourceKind.SSD else chunk.blob_sums
            for band in reads(load.shape, absent, source, load.kind):
                pieces = [(chunk, layer, 0, sums[layer]) for layer in band]
                self._fetches.plan(source, load.shape, pieces, self._rank(load, band[0], i), load.kind)
        elif (chunk and chunk.doomed) or not self._locating.probe_again(load, key):
            self._void(load, i)

    def _lease(self, load: Load, i: int, layer: int, chunk: Chunk) -> None:
        if load.kind is LoadKind.ADVISED:
            return
        self._usefulness.taken(chunk, layer, load.kind)
        offset = chunk.offsets[layer]
        self._ledger.pin(offset)
        load.leased[i, layer] = offset
        load.fresh.append((layer, i, offset, chunk.sums[layer]))

    def arrived(self, pieces: Iterable[PieceRef], now: float) -> None:
        """Pieces became READY: whoever waits gets them, many in one message."""
        touched: dict[LoadId, Load] = {}
        for chunk, layer in pieces:
            for ident in self._waiting.of(chunk.key, layer):
                load = self._loads[ident]
                i = load.places[chunk.key]
                self._waiting.end(load, i, layer)
                self._lease(load, i, layer, chunk)
                load.progress = now
                touched[ident] = load
        for load in touched.values():
            if load.state is not LoadState.LOCATING:
                self._deliver(load)
                self._check_end(load)

    def hurry(self, now: float) -> None:
        """Time passed: slow peers are left where that helps."""
        self._locating.leave_slow_peers(self._loads, now)

    def lost(self, pieces: Sequence[PieceRef], source: SourceKind, fault: Fault, now: float) -> None:
        """Pieces did not come from `source`: a bad copy is deleted, and whoever waits tries the next source,
        unless there is no room for it from any."""
        chunks = {chunk.key: chunk for chunk, _ in pieces}
        # A medium error of a disk that otherwise works stays with that copy; those of a broken disk say nothing about its copies.
        bad = fault in (Fault.CORRUPT, Fault.MISSING) or (fault is Fault.MEDIUM and self._meter.reads(source))
        what = {Fault.CORRUPT: "checksum_failures", Fault.MISSING: "missing_pieces", Fault.MEDIUM: "medium_errors"}.get(fault)
        if what is not None:
            self._out.append(Counted(what, len(pieces), (source.name.lower(),)))
        for chunk in chunks.values() if bad and source is not SourceKind.PEER else ():
            tier = "ssd" if source is SourceKind.SSD else "blob"
            if getattr(chunk, tier) is CopyState.PRESENT:
                self._index.set_copy(chunk, tier, CopyState.ABSENT)
                if fault is not Fault.MISSING:  # one answer that lacked it is no reason to delete what another may have
                    delete = DeleteSsd if source is SourceKind.SSD else DeleteBlob
                    self._out.append(delete(chunk.key, chunk.shape.fingerprint))
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
                    self._acquire(found, i, now)
                self._deliver(found)
                self._check_end(found)

    def _void(self, load: Load, i: int) -> None:
        """Chunk `i` cannot be had."""
        if load.leading_only:
            load.found = min(load.found, i)
            gone = [j for j in load.missing if j >= i]
        else:
            load.void.add(i)
            gone = [i]
        for j in gone:
            self._waiting.leave(load, j)

    def void_key(self, key: bytes) -> None:
        """The chunk was erased: no load gets more of it."""
        for load in list(self._loads.values()):
            i = load.places.get(key)
            if i is not None and i < load.found:
                self._void(load, i)
                self._check_end(load)

    # ---- telling the owner

    def _deliver(self, load: Load) -> None:
        if load.state is LoadState.LOCATING:
            return
        if load.fresh:
            load.fresh.sort()
            self._out.append(Pieces(load.ident, tuple((i, layer, offset, checksum) for layer, i, offset, checksum in load.fresh)))
            load.fresh = []
        if load.kind is LoadKind.ADVISED and not load.offered and load.found and all(0 not in m for m in load.missing.values()):
            load.offered = True
            self.offer(load, load.progress)

    def offer(self, load: Load, now: float) -> None:
        """Tell the worker that is to answer of an advised session whose first layer is in the arena."""
        advice = self._sessions.live(load.session, now) if load.session else None
        if advice is not None and load.session is not None:
            keys = tuple(key for key, _ in load.wants[: load.found])
            arrival = 0.0 if advice.arrival == math.inf else max(0.0, advice.arrival - now)
            left_s = advice.expires - now
            self._out.append(Offer(load.session, load.shape.fingerprint, keys, advice.priority, arrival, left_s, advice.device))

    def _check_end(self, load: Load) -> None:
        if load.state is LoadState.FLOWING and not load.missing:
            self._deliver(load)
            load.state = move(LOAD_MOVES, load.state, LoadState.ENDED)
            self._out.append(End(load.ident, load.found - len(load.void)))
            if load.kind is LoadKind.ADVISED and load.cut and load.session is not None:
                self.short[load.session] = None
        if load.state is LoadState.ENDED and not load.leased:
            self._loads.pop(load.ident, None)

    def taken(self, ident: LoadId, pieces: Iterable[tuple[int, int]], now: float) -> None:
        """The owner has copied these pieces. Unknown ones are ignored."""
        load = self._loads.get(ident)
        if load is None:
            return
        load.progress = now
        for piece in pieces:
            offset = load.leased.pop(piece, None)
            if offset is not None:
                self._ledger.unpin(offset)
        self._check_end(load)

    def cancel(self, ident: LoadId) -> None:
        """The owner wants nothing more; nothing is told to it."""
        load = self._loads.pop(ident, None)
        if load is None:
            return
        for i in list(load.missing):
            self._waiting.leave(load, i)
        for offset in load.leased.values():
            self._ledger.unpin(offset)
        if load.asking:
            self._leases.close_unanswered(load.asking)

    def cancel_owner(self, owner: str) -> None:
        """The worker or reader is gone."""
        for ident in [i for i in self._loads if i[0] == owner]:
            self.cancel(ident)

    def awaited(self, key: bytes, layer: int) -> bool:
        """Whether some load waits for the piece."""
        return bool(self._waiting.of(key, layer))

    def of_session(self, session: SessionKey, kind: LoadKind) -> list[LoadId]:
        """The session's loads of one kind."""
        return [i for i, load in self._loads.items() if load.kind is kind and load.session == session]

    def repeated(self, ident: LoadId, keys: Sequence[bytes], now: float) -> bool:
        """Whether this advised load brings just these chunks already; its offer, if it was made, is made again with new times."""
        load = self._loads[ident]
        same = [key for key, _ in load.wants] == list(keys)
        if same and load.offered:
            self.offer(load, now)
        return same

    def shape_of(self, ident: LoadId) -> bytes | None:
        """Fingerprint of the load's model; None when the load is gone."""
        load = self._loads.get(ident)
        return load.shape.fingerprint if load else None

    @property
    def count(self) -> int:
        """Loads that have not ended or whose leases have not."""
        return len(self._loads)

    def expire(self, now: float) -> None:
        """End loads whose pieces stopped coming; what has come stays leased."""
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
        pins: dict[int, int] = {}
        for load in self._loads.values():
            for i, layers in load.missing.items():
                assert layers and i < load.found
                for layer in layers:
                    if load.state is LoadState.FLOWING and not load.probing:
                        assert self._index.chunks[load.wants[i][0]].state(layer) in COMING
            for (i, layer), offset in load.leased.items():
                pins[offset] = pins.get(offset, 0) + 1
                chunk = self._index.chunks[load.wants[i][0]]
                assert chunk.state(layer) is PieceState.READY and chunk.offsets[layer] == offset
            assert load.state is not LoadState.ENDED or (load.leased and not load.missing)
        for offset, count in pins.items():
            for _ in range(count):
                assert self._ledger.pinned(offset)
