"""What erasing a session removes, and when: every chunk that no other manifest names, from every tier of this node and the
blob tier, at once where nothing uses it and as soon as nothing does otherwise.

An erased chunk is doomed: no load finds it, no save revives it, and a write that was under way is undone when it ends. A
session that was erased a moment ago may still have a turn running; its late saves and its manifest are refused.
"""

from __future__ import annotations

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core.eviction import evictable
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import DeleteBlob, DeleteManifest, DeleteSsd, Instruction, TellErase
from kvstore.core.ledger import Ledger
from kvstore.core.loads import Loads
from kvstore.core.room import Room
from kvstore.core.state import CopyState, PieceState

#: How long an erased session's late saves and manifests are refused, in seconds.
TOMBSTONE_S = 60.0


class Erasure:
    """See the module."""

    def __init__(self, index: Index, ledger: Ledger, room: Room, loads: Loads, out: list[Instruction]) -> None:
        self._index = index
        self._ledger = ledger
        self._room = room
        self._loads = loads
        self._out = out
        self._doomed: dict[bytes, Chunk] = {}
        self._tombstones: dict[SessionKey, tuple[float, frozenset[bytes]]] = {}

    def erase(self, session: SessionKey, now: float) -> None:
        """Forget the session and everything that only it names."""
        manifest = self._index.manifests.get(session)
        named = frozenset([*(manifest.keys if manifest else ()), *self._index.claims.get(session, ())])
        shape = self._index.shapes.get(manifest.fingerprint) if manifest else None
        orphans = self._index.drop_manifest(session)
        self._tombstones[session] = (now + TOMBSTONE_S, named)
        self._out.append(DeleteManifest(session))
        if orphans:
            self._out.append(TellErase(tuple(orphans)))
        self.remove(orphans, manifest.fingerprint if manifest else b"", shape)

    def remove(self, keys: list[bytes], fingerprint: bytes, shape: KvShape | None) -> None:
        """Doom chunks that nobody names; `fingerprint` finds those in the blob tier that this node has no record of."""
        for key in keys:
            chunk = self._index.chunks.get(key)
            if chunk is None:
                if fingerprint:
                    self._out.append(DeleteBlob(key, fingerprint))
                continue
            chunk.doomed = True
            self._doomed[key] = chunk
            self._loads.void_key(key)
            if chunk.blob is not CopyState.PRESENT:
                self._out.append(DeleteBlob(key, chunk.shape.fingerprint))
        self.sweep()

    def buried(self, session: SessionKey, now: float) -> bool:
        """Whether the session was erased a moment ago and its saves are late ones."""
        grave = self._tombstones.get(session)
        return grave is not None and now < grave[0]

    def late(self, session: SessionKey, keys: list[bytes], now: float) -> bool:
        """Whether a manifest belongs to a turn from before the erasure."""
        grave = self._tombstones.get(session)
        return grave is not None and now < grave[0] and not grave[1].isdisjoint(keys)

    def sweep(self) -> None:
        """Remove what has become removable of doomed chunks. Called after every event."""
        for key, chunk in list(self._doomed.items()):
            for layer, state in enumerate(chunk.states.copy()):
                if state is PieceState.READY and evictable(chunk) and not self._ledger.pinned(chunk.offsets[layer]):
                    self._room.drop(chunk, layer)
            if chunk.ssd is CopyState.PRESENT and chunk.blob is not CopyState.WAITING:
                self._index.set_copy(chunk, "ssd", CopyState.ABSENT)
                self._out.append(DeleteSsd(key, chunk.shape.fingerprint))
            if chunk.blob is CopyState.PRESENT:
                self._index.set_copy(chunk, "blob", CopyState.ABSENT)
                self._out.append(DeleteBlob(key, chunk.shape.fingerprint))
            gone = (CopyState.ABSENT, CopyState.SKIPPED)
            if chunk.idle and chunk.ssd in gone and chunk.blob in gone:
                del self._doomed[key]
                chunk.doomed = False

    def trim(self, now: float) -> None:
        """Forget old tombstones."""
        for session in [s for s, grave in self._tombstones.items() if now >= grave[0]]:
            del self._tombstones[session]

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert {k for k, c in self._index.chunks.items() if c.doomed} == set(self._doomed)
