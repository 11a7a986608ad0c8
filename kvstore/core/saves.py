"""Which of a worker's chunks get slots in the arena, and which slower tiers they are then written to.

Write-back is bounded: when more than `limit_bytes` wait for the SSD, or for the blob tier, further saves to it are
skipped and counted, so decoding never waits. A granted chunk that every slower tier skipped is the first victim. A
chunk for which the SSD has no room (capacity.py) goes to the blob tier straight from the arena.

Invariants (`validate`): `ssd_waiting_bytes` and `blob_waiting_bytes` count exactly the granted and WAITING chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from contracts.kv import KEY_BYTES, KvShape
from kvstore.core.capacity import Capacity
from kvstore.core.events import (
    BlobWritten,
    Fault,
    SaveEnded,
    SaveId,
    SaveWanted,
    SourceKind,
    SsdWritten,
    Summed,
    TierChannel,
    Wrote,
)
from kvstore.core.fetches import PieceRef
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import Counted, DeleteSsd, Grant, Instruction, Sum, WriteBlob, WriteSsd
from kvstore.core.ledger import Ledger
from kvstore.core.meter import Meter
from kvstore.core.room import Room
from kvstore.core.state import CopyState, PieceState

_SKIPPED = (Wrote.NOT_TRIED, Wrote.RESERVED)
_LACKING = (CopyState.ABSENT, CopyState.SKIPPED)
#: Chunks from a peer are copied to the SSD only when this share of the arena is used.
_FILLING = 0.75


class Saves:
    """See the module. `arrived(...)` and `lost(...)` tell loads that wait for a chunk being saved; `make_way(bytes)`
    cancels prefetches when a save found no room."""

    def __init__(
        self,
        index: Index,
        ledger: Ledger,
        room: Room,
        capacity: Capacity,
        meter: Meter,
        out: list[Instruction],
        limit_bytes: int,
        arrived: Callable[[Sequence[PieceRef], float], None],
        lost: Callable[[Sequence[PieceRef], SourceKind, Fault, float], None],
        make_way: Callable[[int], None],
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._room = room
        self._capacity = capacity
        self._meter = meter
        self._out = out
        self._limit_bytes = limit_bytes
        self._arrived = arrived
        self._lost = lost
        self._make_way = make_way
        self._open: dict[SaveId, dict[int, Chunk]] = {}
        self._summing: dict[bytes, Chunk] = {}
        #: chunks to write when the tier is idle, oldest first
        self._owed_ssd: dict[bytes, None] = {}
        self._owed_blob: dict[bytes, None] = {}
        self._listing = 2  #: number of the current listing of blob
        self.ssd_waiting_bytes = 0
        self.blob_waiting_bytes = 0

    def want(self, event: SaveWanted, refused_session: bool, beyond: Set[int] = frozenset()) -> None:
        """Answer for each chunk: granted, held already, or refused. beyond: indices over a quota; they are refused."""
        shape = self._index.shapes.get(event.fingerprint)
        grants: dict[int, Chunk] = {}
        offsets: list[int] = []
        held: list[int] = []
        refused: list[int] = []
        for i, key in enumerate(event.keys):
            chunk = self._index.chunk(key, shape) if shape is not None and len(key) == KEY_BYTES else None
            if (
                shape is None
                or chunk is None
                or chunk.doomed
                or refused_session
                or i in beyond
                or event.save in self._open
            ):
                refused.append(i)
            elif self._held(chunk):
                held.append(i)
            elif (slots := self._slots(chunk, shape, event.now)) is None:
                refused.append(i)
            else:
                grants[i] = chunk
                offsets += slots
        if refused:
            self._out.append(Counted("saves_refused", len(refused)))
        skip = set(refused)
        self._index.claim(event.session, [k for i, k in enumerate(event.keys) if i not in skip], event.fingerprint)
        if grants:
            self._open[event.save] = grants
        self._out.append(Grant(event.save, tuple(grants), tuple(offsets), tuple(held), tuple(refused)))

    def _held(self, chunk: Chunk) -> bool:
        """Whether the chunk is in the arena or a readable slower tier, or is being written to the SSD."""
        if chunk.complete or chunk.ssd is CopyState.WAITING:
            return True
        on_ssd = chunk.ssd is CopyState.PRESENT and self._meter.admits(TierChannel.SSD_READ)
        return on_ssd or (chunk.blob is CopyState.PRESENT and self._meter.admits(TierChannel.BLOB_READ))

    def _slots(self, chunk: Chunk, shape: KvShape, now: float) -> list[int] | None:
        """Reserve slots for all layers; the chunk becomes SAVING. None when a transfer uses it or there is no room."""
        if any(s not in (PieceState.ABSENT, PieceState.READY) for s in chunk.states):
            return None
        if any(o >= 0 and self._ledger.pinned(o) for o in chunk.offsets):
            return None
        if self.ssd_waiting_bytes + shape.chunk_bytes > self._limit_bytes:
            self._out.append(Counted("saves_over_limit"))
            return None
        for layer in range(shape.layers):
            if chunk.state(layer) is PieceState.READY:
                self._room.drop(chunk, layer)
        slots = self._room.reserve([(chunk, layer) for layer in range(shape.layers)], now, below=None)
        if slots is None:
            self._make_way(shape.chunk_bytes)
            return None
        self.ssd_waiting_bytes += shape.chunk_bytes
        for layer, offset in enumerate(slots):
            self._index.set_piece(chunk, layer, PieceState.SAVING, offset)
        return slots

    def ended(self, event: SaveEnded) -> None:
        """The worker has written the `ok` chunks, and will never write the `aborted` ones."""
        grants = self._open.get(event.save, {})
        for i in event.ok:
            chunk = grants.pop(i, None)
            if chunk is not None:
                self._summing[chunk.key] = chunk
                self._out.append(Sum(chunk.key, chunk.shape, tuple(chunk.offsets)))
        for i in event.aborted:
            chunk = grants.pop(i, None)
            if chunk is not None:
                self._abort(chunk, event.now)
        if not grants:
            self._open.pop(event.save, None)

    def cancel_owner(self, worker: str, now: float) -> None:
        """The worker is gone: abort its unfinished saves."""
        for save in [s for s in self._open if s[0] == worker]:
            for chunk in self._open.pop(save).values():
                self._abort(chunk, now)

    def _abort(self, chunk: Chunk, now: float) -> None:
        self.ssd_waiting_bytes -= chunk.shape.chunk_bytes
        for layer, offset in enumerate(chunk.offsets.copy()):
            self._ledger.abort(offset)
            self._index.set_piece(chunk, layer, PieceState.ABSENT)
        self._lost([(chunk, layer) for layer in range(chunk.shape.layers)], SourceKind.SSD, Fault.UNAVAILABLE, now)

    def summed(self, event: Summed) -> None:
        """The chunk's checksums are known: it becomes READY and is queued for the SSD."""
        chunk = self._summing.pop(event.key, None)
        if chunk is None:
            return
        chunk.saved_here = True
        for layer, offset in enumerate(chunk.offsets.copy()):
            self._ledger.finish(offset)
            chunk.sums[layer] = event.checksums[layer]
            self._index.set_piece(chunk, layer, PieceState.READY, offset)
        if chunk.doomed or chunk.ssd is CopyState.PRESENT:
            self.ssd_waiting_bytes -= chunk.shape.chunk_bytes
        else:
            self._write_ssd(chunk)
        self._out.append(Counted("chunks_saved"))
        self._arrived([(chunk, layer) for layer in range(chunk.shape.layers)], event.now)

    def replicate(self, chunks: Sequence[Chunk], source: SourceKind, now: float) -> None:
        """Copy chunks that came whole from a peer or the blob tier to the SSD, while write-back is quiet and at the
        cost only of copies that the blob tier has too. Chunks from a peer are not copied while the arena is below
        _FILLING: nothing is evicted then, and the peer has them."""
        if source is SourceKind.PEER and self._ledger.used_bytes < _FILLING * self._ledger.arena_bytes:
            return
        for chunk in chunks:
            size = chunk.shape.chunk_bytes
            fresh = (
                chunk.complete
                and chunk.ssd in _LACKING
                and not chunk.doomed
                and self._meter.admits(TierChannel.SSD_WRITE)
            )
            quiet = self.ssd_waiting_bytes + size <= self._limit_bytes // 2
            if fresh and quiet and self._capacity.admit(chunk.shape, now, backed_only=True):
                self.ssd_waiting_bytes += size
                self._write_ssd(chunk)

    def _write_ssd(self, chunk: Chunk) -> None:
        """Write to the SSD, or to blob while the SSD is degraded or full. The caller has counted the bytes as
        waiting."""
        if not self._meter.admits(TierChannel.SSD_WRITE) or not self._capacity.admit(chunk.shape, self._meter.now):
            self.ssd_waiting_bytes -= chunk.shape.chunk_bytes
            self._not_on_ssd(chunk, "ssd_writes_skipped")
            return
        self._meter.write_began(TierChannel.SSD_WRITE, chunk.key)
        self._index.set_copy(chunk, "ssd", CopyState.WAITING)
        self._out.append(WriteSsd(chunk.key, chunk.shape, tuple(chunk.offsets), tuple(chunk.sums)))

    def ssd_written(self, event: SsdWritten) -> None:
        """The SSD has written or refused the chunk. The blob tier is next if this node saved the chunk."""
        chunk, outcome = self._index.chunks.get(event.key), Wrote(event.outcome)
        if chunk is None or chunk.ssd is not CopyState.WAITING:
            return
        self._meter.written(TierChannel.SSD_WRITE, event.key, chunk.shape.chunk_bytes, outcome)
        self.ssd_waiting_bytes -= chunk.shape.chunk_bytes
        if outcome is Wrote.OK:
            self._index.set_copy(chunk, "ssd", CopyState.PRESENT, event.sums or tuple(chunk.sums), event.encoded_bytes)
            self._to_blob(chunk)
        else:
            self._not_on_ssd(chunk, "ssd_writes_skipped" if outcome in _SKIPPED else "ssd_write_failures")
        self.pay()

    def _not_on_ssd(self, chunk: Chunk, why: str) -> None:
        self._index.set_copy(chunk, "ssd", CopyState.SKIPPED)
        self._out.append(Counted(why))
        if chunk.saved_here:
            self._owed_ssd[chunk.key] = None
        self._to_blob(chunk)

    def _to_blob(self, chunk: Chunk) -> None:
        if chunk.saved_here and not chunk.doomed and chunk.blob in _LACKING:
            self._write_blob(chunk)

    def _not_in_blob(self, chunk: Chunk, why: str) -> None:
        self._index.set_copy(chunk, "blob", CopyState.SKIPPED)
        self._out.append(Counted(why))
        self._owed_blob[chunk.key] = None

    def _write_blob(self, chunk: Chunk) -> None:
        size = chunk.shape.chunk_bytes
        if self.blob_waiting_bytes + size > self._limit_bytes or not self._meter.admits(TierChannel.BLOB_WRITE):
            self._not_in_blob(chunk, "blob_writes_skipped")
            return
        self._meter.write_began(TierChannel.BLOB_WRITE, chunk.key)
        self.blob_waiting_bytes += size
        from_arena = chunk.ssd is not CopyState.PRESENT
        sums = tuple(chunk.sums) if from_arena else chunk.ssd_sums
        self._index.set_copy(chunk, "blob", CopyState.WAITING)
        chunk.leaving = from_arena
        self._out.append(WriteBlob(chunk.key, chunk.shape, tuple(chunk.offsets) if from_arena else (), sums))

    def blob_written(self, event: BlobWritten) -> None:
        """The blob tier has written or refused the chunk."""
        chunk, outcome = self._index.chunks.get(event.key), Wrote(event.outcome)
        if chunk is None or chunk.blob is not CopyState.WAITING:
            return
        self._meter.written(TierChannel.BLOB_WRITE, event.key, chunk.shape.chunk_bytes, outcome)
        self.blob_waiting_bytes -= chunk.shape.chunk_bytes
        if outcome is Wrote.OK:
            self._index.set_copy(chunk, "blob", CopyState.PRESENT, event.sums or chunk.ssd_sums or tuple(chunk.sums))
        elif outcome in (Wrote.LOST, Wrote.UNREADABLE):
            # Owed again at the next listing of blob, if it is still there.
            self._index.set_copy(chunk, "blob", CopyState.SKIPPED)
            self._out.append(Counted("blob_writes_unreadable"))
            if outcome is Wrote.LOST and chunk.ssd is CopyState.PRESENT:
                self._index.set_copy(chunk, "ssd", CopyState.ABSENT)
                self._out.append(DeleteSsd(chunk.key, chunk.shape.fingerprint))
        else:
            self._not_in_blob(chunk, "blob_writes_skipped" if outcome in _SKIPPED else "blob_write_failures")
        self.pay()

    def backed(self, present: Iterable[bytes]) -> None:
        """The current listing of blob has these chunks."""
        for key in present:
            chunk = self._index.chunks.get(key)
            if chunk is not None:
                chunk.backed = self._listing

    def catch_up(self, fingerprint: bytes) -> None:
        """The current listing has ended: owe blob the model's named chunks on the SSD that it did not have."""
        for key, chunk in self._index.chunks.items():
            lacks = chunk.backed != self._listing and chunk.shape.fingerprint == fingerprint
            if lacks and key in self._index.names and chunk.ssd is CopyState.PRESENT and chunk.blob in _LACKING:
                self._owed_blob[key] = None
        self._listing += 1
        self.pay()

    def pay(self) -> None:
        """Write one owed chunk to each slower tier that is healthy and idle."""
        while self._owed_ssd and not self.ssd_waiting_bytes and self._meter.admits(TierChannel.SSD_WRITE):
            chunk = self._pop(self._owed_ssd)
            if chunk is None or chunk.ssd not in _LACKING or not chunk.complete:
                continue
            if not self._capacity.admit(chunk.shape, self._meter.now):
                # back to the end of the queue: no other chunk would find room now either
                self._owed_ssd[chunk.key] = None
                break
            self.ssd_waiting_bytes += chunk.shape.chunk_bytes
            self._write_ssd(chunk)
        while self._owed_blob and not self.blob_waiting_bytes and self._meter.admits(TierChannel.BLOB_WRITE):
            chunk = self._pop(self._owed_blob)
            if chunk is not None and chunk.blob in _LACKING and (chunk.ssd is CopyState.PRESENT or chunk.complete):
                self._write_blob(chunk)

    def _pop(self, owed: dict[bytes, None]) -> Chunk | None:
        """Remove the oldest owed chunk; None when it no longer exists or is erased."""
        key = next(iter(owed))
        del owed[key]
        chunk = self._index.chunks.get(key)
        return (
            chunk if chunk is not None and not chunk.doomed and chunk.shape.chunk_bytes <= self._limit_bytes else None
        )

    @property
    def owed_to_blob(self) -> int:
        """Chunks to be written to the blob tier when it is idle."""
        return len(self._owed_blob)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for a slower tier."""
        return self.ssd_waiting_bytes + self.blob_waiting_bytes

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        granted = [c for grants in self._open.values() for c in grants.values()] + list(self._summing.values())
        assert all(s is PieceState.SAVING for c in granted for s in c.states)
        waiting = [c for c in self._index.chunks.values() if c.ssd is CopyState.WAITING]
        assert self.ssd_waiting_bytes == sum(c.shape.chunk_bytes for c in (*granted, *waiting))
        assert all(c.complete for c in waiting)
        blob = [c for c in self._index.chunks.values() if c.blob is CopyState.WAITING]
        assert self.blob_waiting_bytes == sum(c.shape.chunk_bytes for c in blob)
        leaving = [c for c in self._index.chunks.values() if c.leaving]
        assert all(c.complete and c.blob is CopyState.WAITING for c in leaving)
