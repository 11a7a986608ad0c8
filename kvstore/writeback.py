"""Write-back: chunks to the SSD in group commits, then to the blob tier; manifests to the blob tier at once.

Changes of one file, object or manifest happen in the order in which the core asked for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core.events import BlobWritten, Event, Fault, SsdWritten, TierChannel, Wrote
from kvstore.core.instructions import DeleteBlob, DeleteSsd, WriteBlob, WriteSsd
from kvstore.core.tombstone import Tombstone
from kvstore.failpoints import reach
from kvstore.metrics import BYTES_WRITTEN
from kvstore.tiers.arena import Arena
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.codec import Codec
from kvstore.tiers.durability import write_outcome
from kvstore.tiers.encoded import encode_chunk, views
from kvstore.tiers.format import RAW, Header
from kvstore.tiers.key_names import KeyName
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.session_keys import NOBODY
from kvstore.tiers.space import Space
from kvstore.tiers.ssd import SsdTier
from runtime.clock import Clock
from runtime.service import Tasks

#: A group commit waits this long for more chunks unless it has _ENOUGH_BYTES; it takes at most _GATHER_BYTES.
_GATHER_S, _ENOUGH_BYTES, _GATHER_BYTES = 0.02, 16 << 20, 64 << 20
_BLOB_CONCURRENCY = 4
_RETRY_S = (0.5, 2.0)
_MANIFESTS_OWED = 10_000

#: A session, and the number of its life.
Life = tuple[SessionKey, int]
T = TypeVar("T")


class WriteBack:
    """See the module. report: gives events to the core."""

    def __init__(
        self,
        ssd: SsdTier,
        blob: BlobTier,
        arena: Arena,
        keys: ClusterKeys,
        clock: Clock,
        report: Callable[[Event], None],
        tasks: Tasks,
        blob_codec: Codec | None = None,
        ssd_space: Space | None = None,
        blob_space: Space | None = None,
        owner_of: Callable[[bytes], Life | None] | None = None,
    ) -> None:
        """blob_codec: for new objects; None: raw. ssd_space, blob_space: the tiers' disks; None: they never lack
        room. owner_of: the session that a chunk is encrypted for, None if there is none; without it, nothing is
        encrypted."""
        self._ssd_space, self._blob_space = ssd_space, blob_space
        self._blob_codec = blob_codec
        self._cluster_keys = keys
        self._keys = blob.session_keys
        self._owner_of = owner_of
        self._ssd = ssd
        self._blob = blob
        self._arena = arena
        self._clock = clock
        self._report = report
        self._tasks = tasks
        self._disk: asyncio.Queue[WriteSsd | DeleteSsd] = asyncio.Queue()
        self._queued_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssd-write")
        self._gate = asyncio.Semaphore(_BLOB_CONCURRENCY)
        self._last: dict[object, asyncio.Task[None]] = {}
        self._manifests: dict[SessionKey, Manifest] = {}
        #: failed manifests, written when the blob tier is back
        self._owed_manifests: dict[SessionKey, Manifest] = {}
        self._away: set[TierChannel] = set()

    def start(self) -> None:
        """Start executing queued work."""
        self._tasks.start(self._commits(), "ssd-commits")

    # ---- the SSD

    def disk(self, work: WriteSsd | DeleteSsd) -> None:
        """Queue a write or a deletion."""
        self._queued_bytes += _size(work)
        self._disk.put_nowait(work)

    async def _commits(self) -> None:
        while True:
            batch = [await self._disk.get()]
            if isinstance(batch[0], WriteSsd) and self._queued_bytes < _ENOUGH_BYTES:
                await self._clock.sleep(_GATHER_S)
            size = _size(batch[0])
            while not self._disk.empty() and size < _GATHER_BYTES:
                work = self._disk.get_nowait()
                batch.append(work)
                size += _size(work)
            self._queued_bytes -= size
            await self._commit(batch)

    async def _commit(self, batch: list[WriteSsd | DeleteSsd]) -> None:
        loop = asyncio.get_running_loop()
        while batch:
            alike = type(batch[0])
            count = next((i for i, work in enumerate(batch) if type(work) is not alike), len(batch))
            group, batch = batch[:count], batch[count:]
            writes = [w for w in group if isinstance(w, WriteSsd)]
            if not writes:
                await loop.run_in_executor(self._thread, self._delete, [d for d in group if isinstance(d, DeleteSsd)])
                continue
            secrets = {w.key: secret for w in writes if (secret := self._secret(w.key)) is not None}
            headers: dict[bytes, Header] = {}
            done = await loop.run_in_executor(self._thread, self._write, writes, secrets, headers)
            reach("ssd.before_report")
            for write, outcome in zip(writes, done, strict=True):
                sums: tuple[int, ...] = ()
                encoded_bytes = 0
                if outcome is Wrote.OK:
                    header = headers[write.key]
                    BYTES_WRITTEN.labels("ssd").inc(sum(header.layout.lengths))
                    sums = header.checksums
                    encoded_bytes = header.layout.object_bytes if header.layout.codec != RAW else 0
                self._report(SsdWritten(write.key, outcome, self._clock.now(), sums, encoded_bytes))

    def _write(
        self, writes: list[WriteSsd], secrets: dict[bytes, SessionSecret], headers: dict[bytes, Header]
    ) -> list[Wrote]:
        if self._ssd_space is not None and self._ssd_space.lacks(sum(w.shape.chunk_bytes for w in writes)):
            return [Wrote.RESERVED] * len(writes)
        try:
            return self._ssd.write(writes, secrets, headers)
        except OSError as e:
            return [write_outcome(e)] * len(writes)

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on the write thread, never beside a group commit."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def tier_changed(self, tier: TierChannel, up: bool) -> None:
        """A tier recovered, or degraded: then waiting writes are answered as not tried at once."""
        (self._away.discard if up else self._away.add)(tier)
        if tier is TierChannel.SSD_WRITE and not up:
            waiting = [self._disk.get_nowait() for _ in range(self._disk.qsize())]
            for work in waiting:
                if isinstance(work, WriteSsd):
                    asyncio.get_running_loop().call_soon(self._not_tried, work)
                else:
                    self._disk.put_nowait(work)
        if tier is TierChannel.BLOB_WRITE and up:
            for name in list(self._keys.unstored):
                self._store_key(name)
            for manifest in list(self._owed_manifests.values()):
                self.put_manifest(manifest)

    def _not_tried(self, work: WriteSsd) -> None:
        self._report(SsdWritten(work.key, Wrote.NOT_TRIED, self._clock.now()))

    def _delete(self, deletes: list[DeleteSsd]) -> None:
        for d in deletes:
            try:
                self._ssd.delete(d.key, d.fingerprint)
            except OSError:
                continue

    # ---- the blob tier

    def blob(self, work: WriteBlob | DeleteBlob) -> None:
        """Queue a write or a deletion; those of one chunk stay in order."""
        self._chain(work.key, partial(self._blob_work, work))

    async def _blob_work(self, work: WriteBlob | DeleteBlob) -> None:
        async with self._gate:
            if isinstance(work, DeleteBlob):
                await self._blob.delete_chunk(work.key, work.fingerprint)
                return
            ok, unreadable, sums, size = False, None, work.checksums, 0
            space = self._blob_space if TierChannel.BLOB_WRITE not in self._away else None
            if space is not None and await asyncio.to_thread(space.lacks, work.shape.chunk_bytes):
                self._report(BlobWritten(work.key, Wrote.RESERVED, self._clock.now(), sums))
                return
            for pause in (*_RETRY_S, 0.0):
                if TierChannel.BLOB_WRITE in self._away:
                    break
                try:
                    stored = await self._stored(work)
                    data, header = await asyncio.to_thread(self._object, work, self._secret(work.key), stored)
                    # Without its key nobody could read it.
                    ok = header.seal is None or await self._is_stored(header.seal.key)
                    ok = ok and await self._blob.write(work.key, work.shape.fingerprint, data, header)
                    sums, size = header.checksums, sum(header.layout.lengths)
                except (PieceLost, FileNotFoundError):
                    unreadable, pause = Wrote.LOST, 0.0
                except OSError:
                    unreadable, pause = Wrote.UNREADABLE, 0.0
                if ok or not pause:
                    break
                await self._clock.sleep(pause)
        BYTES_WRITTEN.labels("blob").inc(size if ok else 0)
        failed = Wrote.FAILED if TierChannel.BLOB_WRITE not in self._away else Wrote.NOT_TRIED
        outcome = Wrote.OK if ok else unreadable or failed
        self._report(BlobWritten(work.key, outcome, self._clock.now(), sums))

    async def _stored(self, work: WriteBlob) -> Header | None:
        """The header of the SSD's file, whose key is known then; None: it is written from the arena. Raises PieceLost,
        OSError."""
        if work.offsets:
            return None
        header = await asyncio.to_thread(self._ssd.header, work.key, work.shape)
        found = await self._keys.find(header.seal.key) if header.seal is not None else None
        if found is Fault.ERASED:
            raise PieceLost("the session's key is gone")
        if isinstance(found, Fault):
            raise OSError("the session's key cannot be read")
        return header

    def _object(
        self, work: WriteBlob, secret: SessionSecret | None, header: Header | None
    ) -> tuple[Path | bytes, Header]:
        """What to store, with its header: the SSD's file if it has the blob tier's codec, and is encrypted if it should
        be. header: of that file; None: the chunk is in the arena. Raises PieceLost, OSError."""
        if header is None:
            pieces = views(self._arena, work.shape, work.offsets)
            stored = encode_chunk(
                self._cluster_keys, work.key, work.shape, pieces, work.checksums, self._blob_codec, secret
            )
            return stored.to_bytes(), stored.header
        path = self._ssd.path(work.key, work.shape.fingerprint)
        codec = self._blob_codec.name if self._blob_codec is not None else RAW
        if header.layout.codec == codec and (header.seal is not None or secret is None):
            return path, header
        stored = self._ssd.encoded.convert(path, header, self._blob_codec, secret)
        return stored.to_bytes(), stored.header

    # ---- keys

    def _secret(self, key: bytes) -> SessionSecret | None:
        """The key to encrypt the chunk with; None: it is not encrypted."""
        if self._owner_of is None:
            return None
        return self.secret_of(self._owner_of(key) or (NOBODY, 0))

    def secret_of(self, owner: Life) -> SessionSecret:
        """The session's key for what is written now. A new one is stored at once."""
        secret, new = self._keys.current(*owner)
        if new:
            self._store_key(secret.name)
        return secret

    def _store_key(self, name: KeyName) -> asyncio.Task[None] | None:
        made = self._keys.unstored.get(name)
        return self._chain(made[0], partial(self._put_key, name)) if made is not None else None

    async def _put_key(self, name: KeyName) -> None:
        for pause in (*_RETRY_S, 0.0):
            if TierChannel.BLOB_WRITE in self._away or await self._keys.store(name):
                return
            if pause:
                await self._clock.sleep(pause)

    async def _is_stored(self, name: KeyName) -> bool:
        """Whether the blob tier has the key, after one more try. Raises PieceLost when it is gone for good."""
        if name not in self._keys.unstored:
            there = await self._keys.confirm(name)
            if there is False and name not in self._keys.unstored:
                raise PieceLost("the session's key is gone")
            if name not in self._keys.unstored:
                return bool(there)
        writing = self._store_key(name)
        if writing is not None:
            await asyncio.wait([writing])
        return name not in self._keys.unstored

    def delete_keys(self, session: SessionKey, number: int, *, expired: bool = False) -> None:
        """Forget the keys of the session's lives below `number` now, and queue their deletion in the blob tier.
        expired: all of its keys; its life goes on."""
        if expired:
            self._keys.let_expire(session)
            self._chain(session, partial(self._keys.delete_expired, session))
            return
        self._keys.forget(session, number)
        self._chain(session, partial(self._delete_keys, session, number))

    async def _delete_keys(self, session: SessionKey, number: int) -> None:
        await self._keys.erase(session, number)

    # ---- manifests

    def put_manifest(self, manifest: Manifest) -> None:
        """Queue the newest manifest of its session."""
        self._owed_manifests.pop(manifest.session, None)
        waiting = manifest.session in self._manifests
        self._manifests[manifest.session] = manifest
        if not waiting:
            self._chain(manifest.session, partial(self._put_manifest, manifest.session))

    async def _put_manifest(self, session: SessionKey) -> None:
        for pause in (*_RETRY_S, 0.0):
            manifest = self._manifests.pop(session, None)
            if manifest is None or await self._blob.put_manifest(manifest):
                return
            if pause:
                self._manifests.setdefault(session, manifest)
                await self._clock.sleep(pause)
            elif len(self._owed_manifests) < _MANIFESTS_OWED:
                self._owed_manifests[session] = manifest

    def put_tombstone(self, tombstone: Tombstone) -> None:
        """Queue the tombstone; it is written before later deletions of its session."""
        self._chain(tombstone.session, partial(self._put_tombstone, tombstone))

    async def _put_tombstone(self, tombstone: Tombstone) -> None:
        for pause in (*_RETRY_S, 0.0):
            if await self._blob.tombstones.put(tombstone):
                return
            await self._clock.sleep(pause)

    def delete_manifest(self, session: SessionKey) -> None:
        """Queue the deletion; a write that has not begun is dropped."""
        self._manifests.pop(session, None)
        self._owed_manifests.pop(session, None)
        self._chain(session, partial(self._blob.delete_manifest, session))

    def erase_again(self, tombstone: Tombstone, keys: list[bytes], *, manifest: bool) -> None:
        """Queue the tombstone and the deletion of the session's keys and of these chunks, and of the manifest if
        `manifest`, again: the blob tier may have failed before."""
        self.delete_keys(tombstone.session, tombstone.number)
        self.put_tombstone(tombstone)
        if manifest:
            self.delete_manifest(tombstone.session)
        for key in keys:
            self.blob(DeleteBlob(key, tombstone.chunks[key]))

    # ---- order

    def _chain(self, key: object, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        before = self._last.get(key)

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work()
            if self._last.get(key) is task:
                del self._last[key]

        task = self._tasks.start(run(), "write-back")
        self._last[key] = task
        return task

    @property
    def owes(self) -> bool:
        """Whether a manifest or a session's key could not be written to the blob tier yet."""
        return bool(self._owed_manifests or self._keys.unstored)

    @property
    def pending(self) -> int:
        """Number of unfinished writes and deletions of the blob tier."""
        return len(self._last)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False)


def _size(work: WriteSsd | DeleteSsd) -> int:
    return work.shape.chunk_bytes if isinstance(work, WriteSsd) else 0
