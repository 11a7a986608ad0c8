"""A node of the simulated world: executes the instructions of the real `Store` after random delays, with random faults.

What kvstore/node.py and kvstore/tiers do with bytes is done here with contents; the guarantees are the same: an
operation on one chunk of a tier follows the one before it, slots of a fetch are written until FetchDone is told, and a
copy is durable when it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.store import Store
from tests.sim.world import Content, Copy, Pages, World

_TICK_S, _PLAN_S = 1.0, 0.001
#: Small, so that hints are planned in parts.
_PIECES_AT_ONCE = 6


class Owner(Protocol):
    """A worker, or a peer's lease."""

    def answer(self, instruction: do.Instruction) -> None: ...

    def erased(self, sessions: Sequence[SessionKey]) -> None: ...


class SimNode:
    """See the module. `epoch` is the life: what an earlier life began has no effect any more."""

    def __init__(
        self, world: World, name: str, arena_bytes: int, granule_bytes: int, limit_bytes: int, make: type[Store] = Store
    ) -> None:
        self.world = world
        self.name = name
        self._sizes = (arena_bytes, granule_bytes, limit_bytes)
        self._make = make
        self.epoch = 0
        self.others: dict[str, SimNode] = {}
        self.ssd: dict[bytes, Copy] = {}
        self.full = False
        self.owners: dict[str, Owner] = {}
        self.workers: dict[str, Owner] = {}
        self.start()

    # ---- life

    def start(self) -> None:
        """A new life: the arena is empty, the SSD has what was durable."""
        arena_bytes, granule_bytes, limit_bytes = self._sizes
        self.epoch += 1
        self.alive = True
        self.pages = Pages(arena_bytes)
        self.store = self._make(
            f"{self.name}", arena_bytes, write_back_limit_bytes=limit_bytes, granule_bytes=granule_bytes
        )
        self.owners.clear()
        self.workers.clear()
        self._ends: dict[object, float] = {}
        self._cancels: set[int] = set()
        self._ticking = self._planning = False
        self.store.loads.pieces_at_once = _PIECES_AT_ONCE
        self.handle(ev.Recovered([ev.FoundCopy(key, copy.shape, copy.sums) for key, copy in self.ssd.items()]))
        self.catch_up()

    def crash(self) -> None:
        """Everything but what is durable is gone; a write that was under way may have left anything with a good
        header."""
        self.alive = False
        self.epoch += 1
        self.owners.clear()
        self.workers.clear()

    def catch_up(self) -> None:
        """What a node does at its start and now and then: it lists sessions, and erasures that it may have missed."""
        self.list_manifests()
        if not self.world.blob.away:
            self.handle(ev.TombstonesListed(list(self.world.blob.tombstones.values()), self.now, complete=True))

    def list_manifests(self) -> None:
        if not self.world.blob.away:
            self.handle(
                ev.ManifestsListed(list(self.world.blob.manifests.values()), self.now, complete=True, wall=self.now)
            )

    def list_old_chunks(self) -> None:
        """What a sweep of the blob tier sees: everything, as when nobody has written for the grace time."""
        if not self.world.blob.away:
            for fingerprint in {copy.shape.fingerprint: None for copy in self.world.blob.chunks.values()}:
                keys = [key for key, copy in self.world.blob.chunks.items() if copy.shape.fingerprint == fingerprint]
                self.handle(ev.OldChunksListed(fingerprint, keys, self.now))

    @property
    def now(self) -> float:
        return self.world.now

    def handle(self, event: ev.Event) -> None:
        """Give the core an event, check it, and do what it says."""
        if not self.alive:
            return
        self.world.events += 1
        out = self.store.handle(event)
        self.store.validate()
        for instruction in out:
            self._execute(instruction)
        if self.store.busy and not self._ticking:
            self._ticking = True
            self._tick()
        if self.store.unplanned and not self._planning:
            self._planning = True
            self._later(_PLAN_S, self._plan_more)

    def _plan_more(self) -> None:
        self._planning = False
        self.handle(ev.PlanMore(self.now))

    def _tick(self) -> None:
        def tick() -> None:
            self._ticking = False
            self.handle(ev.Tick(self.now))

        self._later(_TICK_S, tick)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        epoch = self.epoch
        self.world.at(delay_s, lambda: call() if self.epoch == epoch else None)

    def _soon(self, call: Callable[[], None], mean_s: float = 0.05) -> None:
        epoch = self.epoch
        self.world.soon(lambda: call() if self.epoch == epoch else None, mean_s)

    def _in_order(self, what: object, call: Callable[[], None]) -> None:
        """As `_soon`, after everything else that was begun for `what`."""
        delay = self.world.random.expovariate(20.0) * (40 if self.world.chance(0.05) else 1)
        end = max(self._ends.get(what, 0.0), self.now) + delay
        self._ends[what] = end
        self._later(end - self.now, call)

    def _execute(self, i: do.Instruction) -> None:
        match i:
            case do.Found() | do.Pieces() | do.End():
                owner = self.owners.get(i.load[0])
                if owner is not None:
                    owner.answer(i)
            case do.Grant():
                owner = self.owners.get(i.save[0])
                if owner is not None:
                    owner.answer(i)
            case do.Offer():
                for worker in self.workers.values():
                    worker.answer(i)
            case do.Fetch():
                self._fetch(i)
            case do.CancelFetch():
                self._cancels.add(i.fetch)
            case do.Probe():
                self._soon(lambda: self._probe(i))
            case do.AskPeer():
                self._ask(i)
            case do.ReleasePeer():
                self._release(i)
            case do.Sum():
                self._soon(lambda: self._sum(i))
            case do.WriteSsd():
                self._in_order(("ssd", i.key), lambda: self._write_ssd(i))
            case do.DeleteSsd():
                self._in_order(("ssd", i.key), lambda: self.ssd.pop(i.key, None) and None)
            case do.WriteBlob():
                self._in_order(("blob", i.key), lambda: self._write_blob(i))
            case do.DeleteBlob():
                self._in_order(("blob", i.key), lambda: self._delete_blob(i.key))
            case do.PutManifest():
                self._in_order(i.manifest.session, lambda: self._put_manifest(i.manifest))
            case do.DeleteManifest():
                self._in_order(i.session, lambda: self.world.blob.manifests.pop(i.session, None) and None)
            case do.TellErase() if i.notice:
                for name in self.workers:
                    self._in_order(("told", name), partial(self._hear, name, i))
            case do.PutTombstone():
                self._in_order(i.tombstone.session, lambda: self._put_tombstone(i.tombstone))
            case do.FetchManifest():
                self._soon(lambda: self._fetch_manifest(i))
            case do.TryTier():
                self._soon(lambda: self.handle(ev.TierTried(i.tier, self._outcome(), i.size, self.now)))
            case _:
                pass

    def _outcome(self) -> ev.Wrote:
        return ev.Wrote.FAILED if self.world.chance(0.2) else ev.Wrote.OK

    # ---- reading

    def _fetch(self, fetch: do.Fetch) -> None:
        """Pieces are written to their slots at random times until the end is told."""
        ended: list[bool] = []
        faults: dict[int, ev.Fault] = {}
        epoch_there = self.others[fetch.peer].epoch if fetch.kind is ev.SourceKind.PEER else 0

        def end() -> None:
            size = fetch.shape.piece_bytes
            for index, piece in enumerate(fetch.pieces):
                if fetch.fetch in self._cancels and self.world.random.random() < 0.7:
                    faults[index] = ev.Fault.CANCELLED
                    continue
                got = self._read(fetch, piece, epoch_there)
                if isinstance(got, ev.Fault):
                    faults[index] = got
                    continue
                self.pages.write(piece.offset, size, got)
                if not self.verify(got, piece.checksum):
                    faults[index] = ev.Fault.CORRUPT
            ended.append(True)
            self._cancels.discard(fetch.fetch)
            self.handle(ev.FetchDone(fetch.fetch, faults, self.now))

        def stall() -> None:
            if not ended:
                self.handle(ev.FetchStalled(fetch.fetch, self.now))

        self._later(fetch.give_up_s, stall)
        self._soon(end, 0.03)

    def verify(self, content: Content, checksum: int) -> bool:
        """Whether the content is what its source announced."""
        return self.world.sum_of(content) == checksum

    def _read(self, fetch: do.Fetch, piece: do.FetchPiece, epoch_there: int) -> Content | ev.Fault:
        if self.world.chance(0.03):
            return ev.Fault.UNAVAILABLE
        if fetch.kind is ev.SourceKind.PEER:
            there = self.others[fetch.peer]
            if there.epoch != epoch_there or not self._linked(there):
                return ev.Fault.UNAVAILABLE
            return there.pages.read(piece.remote_offset, fetch.shape.piece_bytes) or self.world.spoil()
        if fetch.kind is ev.SourceKind.BLOB and self.world.blob.away:
            return ev.Fault.UNAVAILABLE
        tier = self.ssd if fetch.kind is ev.SourceKind.SSD else self.world.blob.chunks
        copy = tier.get(piece.key)
        if copy is None:
            return ev.Fault.MISSING
        if self.world.chance(0.02):
            copy.contents[piece.layer] = self.world.spoil()  # a bit has flipped, and stays so
        return copy.contents[piece.layer]

    def _linked(self, there: SimNode) -> bool:
        return there.alive and self.world.reaches(self.name, there.name) and self.world.reaches(there.name, self.name)

    def _sum(self, work: do.Sum) -> None:
        contents = [self.pages.read(offset, work.shape.piece_bytes) for offset in work.offsets]
        for layer, content in enumerate(contents):
            self.world.check(content, work.key, layer, f"{self.name}'s checksummer")
        self.handle(ev.Summed(work.key, tuple(self.world.sum_of(c) for c in contents if c is not None), self.now))

    # ---- the SSD and the blob tier

    def _copy(self, shape: KvShape, offsets: Sequence[int], sums: tuple[int, ...]) -> Copy:
        contents = [self.pages.read(offset, shape.piece_bytes) or self.world.spoil() for offset in offsets]
        if self.world.chance(0.03):
            contents[self.world.random.randrange(len(contents))] = self.world.spoil()
        return Copy(shape, sums, contents)

    def _write_ssd(self, write: do.WriteSsd) -> None:
        outcome = ev.Wrote.FULL if self.full else self._outcome()
        if outcome is ev.Wrote.OK:
            self.ssd[write.key] = self._copy(write.shape, write.offsets, write.checksums)
        self.handle(ev.SsdWritten(write.key, outcome, self.now))

    def _write_blob(self, write: do.WriteBlob) -> None:
        outcome = ev.Wrote.FAILED if self.world.blob.away else self._outcome()
        if outcome is ev.Wrote.OK:
            source = self.ssd.get(write.key)
            if write.offsets:
                self.world.blob.chunks[write.key] = self._copy(write.shape, write.offsets, write.checksums)
            elif source is not None:
                self.world.blob.chunks[write.key] = Copy(source.shape, source.sums, list(source.contents))
            else:
                outcome = ev.Wrote.FAILED
        self.handle(ev.BlobWritten(write.key, outcome, self.now))

    def _delete_blob(self, key: bytes) -> None:
        if not self.world.blob.away:
            self.world.blob.chunks.pop(key, None)

    def _put_manifest(self, manifest: Manifest) -> None:
        if not self.world.blob.away:
            self.world.blob.manifests[manifest.session] = manifest

    def _hear(self, name: str, told: do.TellErase) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            worker.erased(told.sessions)
            self.handle(ev.EraseHeard(name, told.notice, self.now))

    def _put_tombstone(self, tombstone: ev.Tombstone) -> None:
        if not self.world.blob.away:
            self.world.blob.tombstones[tombstone.session, tombstone.number, tuple(sorted(tombstone.chunks))] = tombstone

    def _fetch_manifest(self, fetch: do.FetchManifest) -> None:
        manifest = None if self.world.blob.away else self.world.blob.manifests.get(fetch.session)
        self.handle(ev.ManifestFetched(fetch.session, manifest, self.now))

    def _probe(self, probe: do.Probe) -> None:
        if self.world.blob.away or self.world.chance(0.05):
            self.handle(ev.Probed(probe.load, probe.keys, [], self.now, len(probe.keys)))
            return
        copies = {
            key: self.world.blob.chunks[key]
            for key in probe.keys
            if key in self.world.blob.chunks and not self.world.chance(0.05)
        }
        self.handle(
            ev.Probed(probe.load, probe.keys, [ev.FoundCopy(k, c.shape, c.sums) for k, c in copies.items()], self.now)
        )

    # ---- peers

    def _ask(self, ask: do.AskPeer) -> None:
        there = self.others[ask.peer]

        def arrive() -> None:
            if self._linked(there) and ask.fingerprint in there.store.index.shapes:
                Loan(self, there, ask).begin()
            elif self._linked(there):
                self.handle(ev.PeerEnded(ask.lease, True, self.now))
            elif self.world.random.random() < 0.5:
                self.handle(ev.PeerEnded(ask.lease, False, self.now))

        self._soon(arrive)

    def _release(self, release: do.ReleasePeer) -> None:
        there, owner = self.others[release.peer], f"peer-{self.name}-{self.epoch}-{release.lease}"
        self._soon(lambda: there.let_go(owner) if self._linked(there) else None)

    def let_go(self, owner: str) -> None:
        """A peer's lease ends here."""
        if self.owners.pop(owner, None) is not None:
            self.handle(ev.WorkerGone(owner, self.now))


class Loan:
    """What a node lends to a reader: messages go over the link, and the pins end when the reader says so or a minute
    has passed."""

    def __init__(self, reader: SimNode, lender: SimNode, ask: do.AskPeer) -> None:
        self._reader = reader
        self._lender = lender
        self._ask = ask
        self._epochs = (reader.epoch, lender.epoch)
        self._arrival = 0.0
        self._owner = f"peer-{reader.name}-{reader.epoch}-{ask.lease}"

    def begin(self) -> None:
        lender, ask = self._lender, self._ask
        lender.owners[self._owner] = self
        lender.world.at(60.0, lambda: lender.let_go(self._owner))
        lender.handle(
            ev.LoadWanted((self._owner, "0"), ev.LoadKind.PEER, None, ask.fingerprint, ask.wants, (), 0, lender.now)
        )

    def answer(self, instruction: do.Instruction) -> None:
        lease = self._ask.lease
        if isinstance(instruction, do.Found):
            indices = instruction.indices
            self._tell(lambda now: ev.PeerHolds(lease, indices, now, instruction.in_arena))
        elif isinstance(instruction, do.Pieces):
            self._tell(lambda now: ev.PeerReady(lease, instruction.pieces, now))
        elif isinstance(instruction, do.End):
            self._tell(lambda now: ev.PeerEnded(lease, True, now))

    def _tell(self, event: Callable[[float], ev.Event]) -> None:
        """In order, unless a message does not arrive: then the call has failed."""
        world, reader, lender = self._reader.world, self._reader, self._lender
        self._arrival = max(self._arrival, world.now) + world.random.expovariate(50.0)

        def arrive() -> None:
            if (reader.epoch, lender.epoch) != self._epochs or not reader.alive:
                if reader.epoch == self._epochs[0]:
                    reader.handle(ev.PeerEnded(self._ask.lease, False, world.now))
            elif world.reaches(lender.name, reader.name):
                reader.handle(event(world.now))

        world.at(self._arrival - world.now, arrive)
