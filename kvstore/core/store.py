"""The node's KV store as one synchronous machine: `handle(event)` returns the instructions that follow from it.

It dispatches events to the parts that decide: `loads`, `leases` (peers), `fetches` (what is read next), `room` (what is
evicted), `saves` (write-back), `hints`, `erasure`, `quotas`. The shell (kvstore/node.py) executes instructions and
reports back; the simulator does the same in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import assert_never

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.capacity import Capacity
from kvstore.core.erasure import Erasure
from kvstore.core.fetches import Fetches, PieceRef
from kvstore.core.hints import Hints
from kvstore.core.index import Index
from kvstore.core.leases import Leases
from kvstore.core.ledger import Ledger
from kvstore.core.loads import Loads
from kvstore.core.meter import READ_TIER, Meter
from kvstore.core.orphans import Orphans
from kvstore.core.pacing import ReadPacer
from kvstore.core.prefetch import rank
from kvstore.core.quotas import Quotas
from kvstore.core.room import Room
from kvstore.core.saves import Saves
from kvstore.core.sessions import Sessions, use_s
from kvstore.core.state import CopyState, PieceState
from kvstore.core.usefulness import Usefulness

#: A trial of the SSD reads one of this many candidate pieces.
_TRIAL_CHOICES = 64


class Store:
    """See the module.

    node: this node's name. granule_bytes: see `Ledger`. prefetch_bytes_per_s: see `ReadPacer`.
    default_quota_bytes, quota_bytes: limit of a tenant's sessions in the slow tiers; 0 means none.
    most_sessions: manifests kept although none of their chunks is here.
    """

    def __init__(
        self,
        node: str,
        arena_bytes: int,
        *,
        write_back_limit_bytes: int,
        layer_priority: bool = True,
        granule_bytes: int | None = None,
        prefetch_bytes_per_s: float = 0.0,
        default_quota_bytes: int = 0,
        quota_bytes: Mapping[str, int] | None = None,
        most_sessions: int = 100_000,
    ) -> None:
        self.node = node
        self._out: list[do.Instruction] = []
        self.index = Index()
        self.sessions = Sessions()
        self.ledger = Ledger(arena_bytes, granule_bytes)
        self.usefulness = Usefulness(arena_bytes)
        self.meter = Meter(self._out)
        self.room = Room(
            self.index, self.ledger, self.sessions, self.usefulness, self._out, layer_priority=layer_priority
        )
        self.loads = Loads(self.index, self.ledger, self.sessions, self.usefulness, self.meter, self._out)
        self.fetches = Fetches(
            self.index,
            self.ledger,
            self.room,
            self.usefulness,
            self.meter,
            ReadPacer(prefetch_bytes_per_s),
            self._out,
            self._arrived,
            self.loads.lost,
            self._read,
            self.loads.awaited,
        )
        self.leases = Leases(self.index, self.fetches, self.meter, self._out, self.loads.lost)
        self.loads.connect(self.fetches, self.leases)
        self.capacity = Capacity(self.index, self.sessions, self._out)
        self.saves = Saves(
            self.index,
            self.ledger,
            self.room,
            self.capacity,
            self.meter,
            self._out,
            write_back_limit_bytes,
            self.loads.arrived,
            self.loads.lost,
            self.fetches.make_way,
        )
        self.erasure = Erasure(self.index, self.ledger, self.room, self.loads, self.sessions, self._out)
        self.orphans = Orphans(self.index, self.sessions, self._out, self.erasure.remove_here)
        self.quotas = Quotas(
            self.index,
            self.sessions,
            self._out,
            lambda s, now: self._erase(ev.SessionErased(s, now, expired=True)),
            default_quota_bytes,
            quota_bytes or {},
        )
        self.hints = Hints(node, self.index, self.sessions, self.loads, self.usefulness, self._out)
        self._has_recovered = False  #: the SSD's files are known
        self._numbers = 0
        self._most_sessions = most_sessions

    def handle(self, event: ev.Event) -> list[do.Instruction]:
        """Handle one event. Returns the instructions to execute, in order. Unknown ids in events are ignored."""
        if not isinstance(event, ev.Recovered):
            self.meter.now = event.now
        now = self._dispatch(event)
        self._tiers_changed(self.meter.now)
        if now is not None:
            self.fetches.pump(now)
        self.erasure.sweep()
        self.index.sweep()
        out = [*self._out, *self.usefulness.drain()]
        self._out.clear()
        return out

    def _dispatch(self, event: ev.Event) -> float | None:
        match event:
            case ev.Recovered():
                self._recovered(event)
                return None
            case ev.TierFailed():
                self.meter.health.bad(event.tier, event.reason, event.now, event.now, at_once=True)
            case ev.TierTried():
                self.meter.tried(event.tier, ev.Wrote(event.outcome), event.size)
            case ev.ShapesDeclared():
                self._declared(event)
            case ev.WorkerGone():
                self.loads.cancel_owner(event.worker)
                self.erasure.graves.detach(event.worker)
                self.saves.cancel_owner(event.worker, event.now)
            case ev.LoadWanted():
                if event.kind is ev.LoadKind.DEMAND and event.session is not None:
                    self.sessions.used(event.session, event.now)
                    self.hints.turn_comes(event.session, event.sources)
                self.loads.begin(self.erasure.allowed(event))
                if event.kind is ev.LoadKind.DEMAND and event.session is not None:
                    self.hints.turn_begun(event.session)
            case ev.PiecesTaken():
                self.loads.taken(event.load, event.pieces, event.now)
            case ev.LoadCancelled():
                self.loads.cancel(event.load)
            case ev.Probed():
                self.meter.probed(len(event.keys) - event.failed, event.failed)
                found = [copy for copy in event.found if self.erasure.serves(copy.key)]
                self.loads.probed(event.load, event.keys, found, event.now)
            case ev.PeerHolds():
                self.loads.peer_holds(event)
            case ev.PeerReady():
                self.leases.ready(event.lease, event.pieces, event.now)
            case ev.PeerEnded():
                self.leases.ended(event.lease, event.answered, event.now)
                self.loads.peer_answered(event.lease, event.now)
            case ev.FetchDone():
                self.fetches.done(event.fetch, event.faults, event.now, event.sums)
            case ev.FetchStalled():
                self.fetches.stalled(event.fetch, event.now)
            case ev.SaveWanted():
                self.sessions.seen(event.session, event.now)
                beyond, named = self.quotas.beyond(event), self.quotas.named_bytes
                self.saves.want(event, self.erasure.graves.is_late(event.session, event.save[0]), beyond)
                self.quotas.follow(named)
            case ev.SaveEnded():
                self.saves.ended(event)
            case ev.Summed():
                self.saves.summed(event)
            case ev.SsdWritten():
                self.saves.ssd_written(event)
            case ev.BlobWritten():
                self.saves.blob_written(event)
            case ev.BlobListed():
                self.saves.backed(event.keys)
                if event.complete:
                    self.saves.catch_up(event.fingerprint)
                    self.capacity.trim(event.now)
            case ev.TierSized(tier="ssd"):
                self.capacity.limit_bytes = event.limit_bytes
            case ev.TierSized():
                self.quotas.sized(event.limit_bytes, event.held_bytes)
            case ev.TurnEnded():
                self._turn(event)
            case ev.ManifestsListed():
                for manifest in event.manifests:
                    if self._learn(manifest):
                        self.sessions.seen(manifest.session, event.now - max(0.0, event.wall - manifest.last_use_s))
                self.capacity.learned = self.capacity.learned or event.complete
                if event.complete:
                    self.index.trim_manifests(self._most_sessions, self.hints.sessions)
            case ev.ManifestFetched():
                if event.manifest is not None:
                    self._learn(event.manifest, asked=True)
                self.hints.fetched(event.session, event.now)
            case ev.Advised():
                self.hints.advise(event)
            case ev.Invalidated():
                self._invalidate(event.session)
            case ev.SessionErased():
                self._erase(event)
            case ev.EraseHeard() | ev.ErasureSeen() | ev.ErasureEnded() | ev.ErasuresReplayed() | ev.TombstonesListed():
                self.erasure.told(event)
            case ev.OrphansSought():
                self.orphans.sweep(event.now)
            case ev.OldChunksListed():
                self.orphans.sweep_blob(event.fingerprint, event.keys, event.named)
            case ev.PlanMore():
                self.loads.plan_more(event.now)
            case ev.Tick():
                self._tick(event.now)
            case _:
                assert_never(event)
        return event.now

    # ---- arrivals

    def _arrived(self, pieces: Sequence[PieceRef], source: ev.SourceKind, now: float) -> None:
        self.loads.arrived(pieces, now)
        self.saves.replicate(list({chunk.key: chunk for chunk, _ in pieces}.values()), source, now)

    def _read(self, lease: str, pieces: int) -> None:
        self.leases.read(lease, pieces)

    def _tiers_changed(self, now: float) -> None:
        """Act on tiers that degraded or recovered during this event: divert queued reads, write what is owed."""
        health = self.meter.health
        for tier in health.fallen:
            for kind, read in READ_TIER.items():
                if read is tier:
                    self.fetches.divert(kind, now)
        health.fallen.clear()
        if health.risen:
            health.risen.clear()
            self.saves.pay()

    def _try(self, tier: ev.TierChannel, now: float) -> None:
        """Begin a tier's trial. The SSD is tried by reading a piece that no load wants; the shell tries the others."""
        if tier is ev.TierChannel.SSD_READ and self._has_recovered:
            on_ssd = (c for c in self.index.chunks.values() if c.ssd is CopyState.PRESENT and not c.doomed)
            lacking = ((c, i) for c in on_ssd for i in range(c.shape.layers) if c.state(i) is PieceState.ABSENT)
            self._numbers += 1  # another piece every time: one bad file must not keep the disk degraded
            choices = list(islice(lacking, _TRIAL_CHOICES))
            if choices:
                chunk, layer = choices[self._numbers % len(choices)]
                where = rank(ev.LoadKind.PEER, layer=0, priority=0, arrival=now, order=0, position=0)
                self.fetches.plan(
                    ev.SourceKind.SSD,
                    chunk.shape,
                    [(chunk, layer, 0, chunk.ssd_expected[layer])],
                    where,
                    ev.LoadKind.PEER,
                )
                return
        self._out.append(do.TryTier(tier, max((s.chunk_bytes for s in self.index.shapes.values()), default=1 << 20)))

    def _recovered(self, event: ev.Recovered) -> None:
        self._has_recovered = True
        for shape, keys in event.listed:
            known = self.index.shapes.setdefault(shape.fingerprint, shape)
            self.index.add_listed(known if known == shape else shape, keys)
        for copy in event.copies:
            self.index.shapes.setdefault(copy.shape.fingerprint, copy.shape)
            chunk = self.index.chunk(copy.key, copy.shape)
            if chunk is not None and chunk.ssd in (CopyState.ABSENT, CopyState.SKIPPED):
                self.index.set_copy(chunk, "ssd", CopyState.PRESENT, copy.checksums, copy.encoded_bytes)
        self.erasure.recovered()

    # ---- sessions

    def _turn(self, event: ev.TurnEnded) -> None:
        manifest, now = event.manifest, event.now
        if self.erasure.graves.is_late(manifest.session, event.worker):
            self._out.append(do.Counted("late_turns"))
            return
        self.sessions.used(manifest.session, now)
        self.hints.ended(manifest.session)
        known = self.index.manifests.get(manifest.session)
        life = self.life(manifest.session)
        self.index.set_manifest(replace(manifest, last_use_s=use_s(manifest, known), life=life))
        self._out.append(do.PutManifest(self.index.manifests[manifest.session]))

    def _learn(self, manifest: Manifest, *, asked: bool = False) -> bool:
        """Keep the manifest if it is newer than the known one and its life has not ended. A manifest of an unknown
        session that was not `asked` for is kept only if it names a chunk that is here, or while few are kept. False if
        not kept."""
        if self.erasure.void(manifest):
            self.erasure.exhumed(manifest)
            return False
        self.erasure.graves.note(manifest.life)
        known = self.index.manifests.get(manifest.session)
        few = len(self.index.manifests) < self._most_sessions
        if not (known or asked or few or any(key in self.index.chunks for key in manifest.keys)):
            return False
        if known is None or known.last_use_s < manifest.last_use_s:
            self.index.set_manifest(manifest)
        return True

    def _declared(self, event: ev.ShapesDeclared) -> None:
        for shape in event.shapes:
            self.index.shapes[shape.fingerprint] = shape
        self.erasure.attached(event.worker)
        self.hints.attached(event.now)

    def _erase(self, event: ev.SessionErased) -> None:
        if self.erasure.is_old_news(event):
            self.erasure.reopen(event.session)
            return
        self._invalidate(event.session, tell=False)
        self.sessions.forget(event.session)
        named = self.quotas.named_bytes
        self.erasure.erase(event)
        self.quotas.follow(named)

    def _invalidate(self, session: SessionKey, *, tell: bool = True) -> None:
        self.hints.forget(session)
        self.sessions.invalidate(session)
        if tell:
            self._out.append(do.TellInvalid(session))

    def _tick(self, now: float) -> None:
        for lease in self.leases.overdue(now):
            self.leases.ended(lease, answered=False, now=now)
            self.loads.peer_answered(lease, now)
        self.loads.hurry(now)
        self.loads.expire(now)
        for tier in self.meter.tick():
            self._try(tier, now)
        self.hints.tick(now)
        self.sessions.trim(now, self.index.manifests)
        self.room.refresh(now)

    # ---- for the shell

    def life(self, session: SessionKey) -> int:
        """The number of the session's life that goes on or begins now."""
        known = self.index.manifests.get(session)
        return known.life if known is not None else self.erasure.graves.next_life(session)

    def owner_of(self, key: bytes) -> tuple[SessionKey, int] | None:
        """The session that the chunk is encrypted for, and its life: of several that name it, always the same one. None
        when none names it."""
        session = min(self.index.names.get(key, ()), default=None)
        return (session, self.life(session)) if session is not None else None

    @property
    def busy(self) -> bool:
        """Whether the store needs ticks."""
        return self.loads.count > 0 or not self.meter.idle or self.hints.waiting

    @property
    def unplanned(self) -> bool:
        """Whether the shell must send `PlanMore`, once events that came meanwhile have had their turn."""
        return self.loads.unplanned

    def queued(self, what: str) -> int:
        """Number of queued and running reads of a source ("ssd", "peer", "blob"), or of open loads ("loads")."""
        return self.loads.count if what == "loads" else self.fetches.depth(ev.SourceKind[what.upper()])

    def validate(self) -> None:
        """Raise AssertionError when any part's invariant does not hold. Tests call it after every event."""
        for part in (
            self.index,
            self.ledger,
            self.fetches,
            self.leases,
            self.loads,
            self.hints,
            self.saves,
            self.erasure,
            self.meter,
        ):
            part.validate()
        self.usefulness.validate(self.index)
        slots = [o for c in self.index.resident.values() for o in c.offsets if o >= 0]
        assert len(slots) == len(set(slots))
