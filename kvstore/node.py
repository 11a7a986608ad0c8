"""The shell around the core: executes its instructions with the tiers, and reports what happened as events.

One event loop owns the core; threads only move bytes and compute checksums. `handle` is the only way in. A load answers
to an Owner, an attached worker or a reading peer; loads of advisories have none.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from contracts.errors import ConfigError
from kvstore import gauges, metrics
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.store import Store
from kvstore.erasing import Erasing
from kvstore.failpoints import reach
from kvstore.finding import HintedManifests
from kvstore.heeding import Heeding
from kvstore.members import Members
from kvstore.metrics import count, log
from kvstore.notes import Notes
from kvstore.owners import Attached, Owner
from kvstore.peers import Peers
from kvstore.reading import Reading
from kvstore.sizes import Sizes, most_sessions
from kvstore.tiers.arena import Arena
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.codecs import Codecs
from kvstore.tiers.encoded_files import EncodedFiles
from kvstore.tiers.file_io import make_file_io
from kvstore.tiers.manifests import decode_manifest, manifest_path
from kvstore.tiers.objects import Objects, open_store
from kvstore.tiers.older_formats import OlderFormats
from kvstore.tiers.populate import Populating
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.tombstones import Listing as Tombstones
from kvstore.tiers.transport import Card, LeasedRanges, Transport
from kvstore.tiers.transport_choice import start_transport
from kvstore.tracing import StoreTraces
from kvstore.trials import try_tier
from kvstore.writeback import WriteBack
from runtime.clock import Clock
from runtime.config import Config
from runtime.config_file import cluster_secret
from runtime.directory_lock import DirectoryLock
from runtime.sections import GIB
from runtime.service import Tasks

_TICK_S = 0.25
#: Least time between two wake-ups for paced prefetches.
_RESUME_S = 0.005
#: `settle` waits for attached workers until they have been quiet for this long, in seconds.
_QUIET_S, _LOOK_S = 3.0, 0.1
#: How long the start waits for the blob tier's tombstones.
_HEED_S = 0.5


class StoreNode:
    """See the module. Everything of one node except gRPC."""

    def __init__(self, config: Config, number: int, clock: Clock, tasks: Tasks, lock: DirectoryLock) -> None:
        """lock: on the node's directory; without it the SSD is neither read nor written."""
        self.places = config.node(number)
        self.name = self.places.name
        self.instance = uuid.uuid4().hex
        self.clock = clock
        self._config = config
        self._tasks = tasks
        self.background = tasks.start  #: starts a task that is cancelled at stop
        self._lock = lock
        keys = ClusterKeys(cluster_secret(config.data))
        codecs = Codecs()
        ssd_codec = codecs.configured("kv.ssd_codec", config.kv.ssd_codec)
        blob_codec = codecs.configured("kv.blob_codec", config.kv.blob_codec)
        place = config.kv.blob_url, config.kv.blob_options, config.data / "blob"
        blob_store = open_store(*place)
        self.older = OlderFormats(Objects(open_store(*place, root="")))
        self.arena = Arena(self.places.arena_stem, int(config.kv.dram_gib * GIB), config.kv.hugepages)
        self.pages = Populating(self.arena.address, self.arena.size_bytes)
        self.store = Store(
            self.name,
            self.arena.size_bytes,
            write_back_limit_bytes=config.kv.write_back_limit_bytes,
            layer_priority=config.kv.layer_priority,
            prefetch_bytes_per_s=config.kv.prefetch_mb_s * 1e6,
            default_quota_bytes=int(config.kv.default_tenant_quota_gib * GIB),
            quota_bytes={tenant: int(gib * GIB) for tenant, gib in config.kv.tenant_quota_gib.items()},
            most_sessions=most_sessions(config),
        )
        catalogue, decode = self.places.ssd.parent / "sessions.sqlite", partial(decode_manifest, keys)
        self.catalogue = Catalogue(catalogue, config.kv.blob_url, decode, clock, self._has_directory)
        self.blob = BlobTier(blob_store, self.arena, keys, codecs, self.catalogue)
        self.ssd = SsdTier(
            self.places.ssd,
            self.arena,
            keys,
            make_file_io(config.kv.file_io, self.arena, f"{self.name}-reads"),
            make_file_io(config.kv.file_io, self.arena, f"{self.name}-writes"),
            config.kv.direct_io,
            EncodedFiles(self.arena, keys, codecs, ssd_codec, self.blob.session_keys.known),
        )
        self.traces = StoreTraces(clock)
        report = self.traces.reporting(self.handle)
        self.reading = Reading(self.ssd, self.blob, clock, self.handle, self.fail, tasks)
        self.leased = LeasedRanges()
        self.sizes = Sizes(config, self.places.ssd)
        spaces = self.sizes.ssd_space, self.sizes.blob_space
        owner_of = self.store.owner_of if config.kv.encrypt else None
        self.write_back = WriteBack(
            self.ssd, self.blob, self.arena, keys, clock, report, tasks, blob_codec, *spaces, owner_of
        )
        self.owners: dict[str, Owner] = self.traces.owners()
        self.workers: dict[str, Attached] = {}
        self.peers: Peers
        self.transport: Transport
        self.erasing = Erasing(self, tasks)
        self._manifests = HintedManifests(self)
        self.notes = Notes(self, tasks, encrypts=config.kv.encrypt)
        self._recovered = False
        configured = {config.node(n).name: config.node(n).store_address for n in config.nodes.numbers}
        self._known = configured
        self.members = Members(self.name, configured, self.places.directory)
        self.heeding = Heeding(self, alone=self.members.alone)
        #: Whether this node's list of confirmations may be non-empty, or is missing.
        self.confirms = True
        #: Called when the blob tier can be read again (set by upkeep.py).
        self.blob_is_back: Callable[[], object] = lambda: None
        self._ticking = self._resuming = self._planning = False
        self.ready = asyncio.Event()
        self.heard_from_worker = clock.now()
        gauges.show(self)

    # ---- life

    async def start(self) -> None:
        """Learn what was erased, recover the SSD and start write-back. Peers and sessions follow in the background
        (`ready`)."""
        metrics.show_tiers(ev.TierChannel)
        if not await self._recover():
            for tier in (ev.TierChannel.SSD_READ, ev.TierChannel.SSD_WRITE):
                self.handle(ev.TierFailed(tier, f"{self.ssd.root} cannot be used", self.clock.now()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEED_S):
                await self.heed_tombstones()
        if (found := self.heeding.held_back) is not None:
            log.warning(
                "tombstones could not be read yet; the SSD's chunks are not served until it is known what was erased "
                "while this node was down",
                chunks=found.chunks,
            )
        self.write_back.start()
        self._tasks.start(self._join(), "join")
        log.info(
            "arena",
            path=str(self.arena.path),
            mib=self.arena.size_bytes >> 20,
            pages=self.arena.pages.kind,
            page=self.arena.pages.bytes,
        )

    async def _recover(self) -> bool:
        """Learn what the SSD holds. False when its directory cannot be made or read. Runs on the write thread, never
        beside a group commit."""
        try:
            self._lock.take(0)
            if not await self.erasing.load():
                return False
            recovery = await self.write_back.on_thread(self.ssd.recover)
        except OSError as e:
            log.warning("the SSD cannot be recovered now", ssd=str(self.ssd.root), error=str(e))
            return False
        if recovery.deleted:
            count("ssd_files_deleted_at_start", recovery.deleted)
        self._recovered = True
        await self.heeding.recovered(recovery)
        log.info("recovered", chunks=recovery.chunks, deleted=recovery.deleted, ssd=str(self.ssd.root))
        return True

    # ---- tiers

    def _has_directory(self) -> bool:
        return self._recovered and self.may_write()

    def may_write(self) -> bool:
        """Whether this store holds the lock on the node's directory. Ends the process when another store has it."""
        try:
            self._lock.take(0)
        except OSError:
            return False
        except ConfigError as e:
            self.fail(e)
            return False
        return True

    def _tier_changed(self, change: do.TierChanged) -> None:
        """Log and show the change; on recovery resume what was postponed."""
        metrics.tier_changed(change.tier, change.up, change.reason)
        self.write_back.tier_changed(change.tier, change.up)
        if change.up and change.tier in (ev.TierChannel.BLOB_READ, ev.TierChannel.BLOB_WRITE):
            self.erasing.hurry()
        if change.up and change.tier is ev.TierChannel.BLOB_READ:
            self.blob_is_back()

    async def _try_tier(self, trial: do.TryTier) -> None:
        outcome, size = await try_tier(self, trial, None if self._recovered else self._recover)
        self.handle(ev.TierTried(trial.tier, outcome, size, self.clock.now()))
        if self.heeding.held_back is not None:
            await self.heed_tombstones()

    async def _join(self) -> None:
        """Start the transport and peers, which may take longer than `start`."""
        self.transport = await start_transport(
            self._config.kv.transport, self.arena, self.leased, f"{self.name}-{self.instance}", self.places
        )
        card = self.transport.fill(Card(self.name, self.instance, b"", self.arena.address, self.arena.size_bytes, ""))
        self.peers = Peers(self._known, card, self.arena, self.transport, self.clock, self.handle, self._tasks)
        self.reading.peers = self.peers
        self.ready.set()
        log.info("peers can read", transport=self.transport.name)

    async def stop(self) -> None:
        """Release everything without waiting for write-back."""
        if self.ready.is_set():
            await self.peers.stop()
            await self.transport.stop()
        self.write_back.close()
        self.erasing.close()
        self.catalogue.close()
        self.ssd.close()
        self.pages.close()
        self.arena.close()

    def fail(self, error: Exception) -> None:
        """The core's state is in doubt, or useless: end the process, so that a new one replaces it."""

        async def end() -> None:
            raise error

        self._tasks.start(end(), "core")

    async def flush(self, timeout_s: float) -> tuple[bool, int]:
        """Wait for write-back. Returns (everything written, bytes that still wait)."""
        deadline = self.clock.now() + timeout_s
        while self.pending_bytes or self.write_back.pending:
            if self.clock.now() >= deadline:
                return False, self.pending_bytes
            await self.clock.sleep(0.02)
        return True, 0

    async def settle(self, timeout_s: float) -> bool:
        """Finish write-back, including that of workers that end at the same time: until they leave or save nothing
        more. timeout_s: without progress of a worker. Returns whether everything was written."""
        begun = self.clock.now()
        complete, _ = await self.flush(timeout_s)
        while self.workers and self.clock.now() - max(begun, self.heard_from_worker) < _QUIET_S:
            await self.clock.sleep(_LOOK_S)
            complete, _ = await self.flush(timeout_s)
        return complete

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for a slower tier."""
        return self.store.saves.waiting_bytes

    # ---- the core

    def handle(self, event: ev.Event) -> None:
        """Give the core an event and execute its instructions."""
        for instruction in self.store.handle(event):
            self._execute(instruction)
        self.pages.used_to(self.store.ledger.top_bytes)
        if self.store.busy and not self._ticking:
            self._ticking = True
            self._tasks.start(self._ticks(), "ticks")
        if self.store.unplanned and not self._planning:
            self._planning = True
            asyncio.get_running_loop().call_soon(self._plan_more)
        if self.store.fetches.resume_at is not None and not self._resuming:
            self._resuming = True
            wait_s = self.store.fetches.resume_at - self.clock.now()
            asyncio.get_running_loop().call_later(max(_RESUME_S, wait_s), self._resume)

    def _plan_more(self) -> None:
        """Other events have had their turn."""
        self._planning = False
        try:
            self.handle(ev.PlanMore(self.clock.now()))
        except Exception as e:
            self.fail(e)

    def _resume(self) -> None:
        """The pause of a paced prefetch is over."""
        self._resuming = False
        self.handle(ev.Tick(self.clock.now()))

    async def _ticks(self) -> None:
        while self.store.busy:
            await self.clock.sleep(_TICK_S)
            self.handle(ev.Tick(self.clock.now()))
        self._ticking = False

    def _execute(self, instruction: do.Instruction) -> None:
        start: Callable[[Awaitable[None], str], object] = self._tasks.start  # type: ignore[assignment]
        match instruction:
            case do.Found() | do.Pieces() | do.End():
                owner = self.owners.get(instruction.load[0])
                if owner is not None:
                    owner.answer(instruction)
            case do.Grant():
                owner = self.owners.get(instruction.save[0])
                if owner is not None:
                    owner.answer(instruction)
            case do.Offer():
                self.notes.offer(instruction)
            case do.TellInvalid() | do.TellErase():
                for worker in self.workers.values():
                    worker.tell(instruction)
            case do.Fetch(kind=ev.SourceKind.SSD):
                self.reading.from_ssd(instruction)
            case do.Fetch():
                start(self.reading.fetch(instruction), "fetch")
            case do.CancelFetch():
                self.reading.cancel(instruction.fetch)
            case do.Probe():
                start(self._probe(instruction), "probe")
            case do.AskPeer():
                self._ask_peer(instruction)
            case do.ReleasePeer():
                if self.ready.is_set():
                    self.peers.release(instruction)
            case do.Sum():
                start(self._sum(instruction), "sum")
            case do.WriteSsd() | do.DeleteSsd():
                self.write_back.disk(instruction)
            case do.WriteBlob() | do.DeleteBlob():
                self.write_back.blob(instruction)
            case do.PutManifest():
                self.write_back.put_manifest(instruction.manifest)
            case do.NoteErasure():
                self.erasing.note(instruction.erasure)
            case do.PutTombstone():
                self.write_back.put_tombstone(instruction.tombstone)
            case do.DeleteKeys():
                self.write_back.delete_keys(instruction.session, instruction.number, expired=instruction.expired)
            case do.DeleteManifest():
                self.write_back.delete_manifest(instruction.session)
                start(self.catalogue.drop(manifest_path(instruction.session)), "catalogue")
            case do.FetchManifest():
                start(self._manifests.fetch(instruction.session), "fetch-manifest")
            case do.TierChanged():
                self._tier_changed(instruction)
            case do.TryTier():
                start(self._try_tier(instruction), "try-tier")
            case do.Counted():
                count(instruction.what, instruction.amount, instruction.labels)

    # ---- bytes

    async def _sum(self, work: do.Sum) -> None:
        ranges = [(offset, work.shape.piece_bytes) for offset in work.offsets]
        checksums = await asyncio.to_thread(self.arena.checksums, ranges)
        reach("save.summed")
        self.handle(ev.Summed(work.key, tuple(checksums), self.clock.now()))

    # ---- finding things

    async def _probe(self, probe: do.Probe) -> None:
        shape_of = self.store.loads.shape_of(probe.load)
        found, failed = await self.blob.locate_many(probe.keys, shape_of, probe.timeout_s) if shape_of else ([], 0)
        self.handle(ev.Probed(probe.load, probe.keys, found, self.clock.now(), failed))

    def _ask_peer(self, question: do.AskPeer) -> None:
        if self.ready.is_set():
            self.peers.ask(question, self.store.index.shapes[question.fingerprint].layers)
        else:
            self._tasks.start(self._ask_when_ready(question), "ask-when-ready")

    async def _ask_when_ready(self, question: do.AskPeer) -> None:
        """Ask the peer once peers can be asked. The core gives up by itself when that takes too long."""
        await self.ready.wait()
        if self.store.leases.is_open(question.lease):
            self._ask_peer(question)

    # ---- sessions

    async def heed_tombstones(self) -> Tombstones:
        """Read the tombstones, and apply erasures that this node missed."""
        return await self.heeding.heed()

    @property
    def knows_ssd(self) -> bool:
        """Whether the core knows what the SSD holds."""
        return self._recovered and self.heeding.held_back is None
