"""What erasing a session removes, and when: every chunk that no other manifest names, from every tier of this node and the
blob tier, at once where nothing uses it and as soon as nothing does otherwise.

An erased chunk is doomed: no load finds it, no save revives it, and a write that was under way is undone when it ends. A
session that was erased a moment ago may still have a turn running; its late saves and its manifest are refused.

An erasure outlives the node that was told of it: a tombstone in the blob tier names the session, the time, and the chunks that
only it named. A node that was away heeds it: what it knows of the session from before that time is forgotten, and those chunks
leave its own tiers (the blob tier's copies are the eraser's to delete, as the same content may be saved anew). Chunks that
nobody names for other reasons, such as a crash before a turn's end or a history that was cut, are orphans, and leave when they
were seen so twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core.chunk import Chunk
from kvstore.core.events import SessionErased, Tombstone
from kvstore.core.eviction import evictable
from kvstore.core.index import Index
from kvstore.core.instructions import Counted, DeleteBlob, DeleteManifest, DeleteSsd, Instruction, PutTombstone, TellErase
from kvstore.core.ledger import Ledger
from kvstore.core.loads import Loads
from kvstore.core.room import Room
from kvstore.core.sessions import Sessions
from kvstore.core.state import CopyState, PieceState

#: How long an erased session's late saves and manifests are refused, in seconds; so much may clocks differ, too.
TOMBSTONE_S = 60.0
#: A turn that has neither saved nor ended for so long will not.
CLAIM_S = 3600.0
#: How many erasures are remembered, and how many chunks one of them names.
_REMEMBERED, _NAMED = 10_000, 1 << 16
#: How many erased chunks a worker that attaches is told of.
_TOLD = 20_000
_GONE = (CopyState.ABSENT, CopyState.SKIPPED)


class Erasure:
    """See the module. `tombstones`: the erasures that this node knows of."""

    def __init__(self, index: Index, ledger: Ledger, room: Room, loads: Loads, sessions: Sessions, out: list[Instruction]) -> None:
        self._index = index
        self._ledger = ledger
        self._room = room
        self._loads = loads
        self._sessions = sessions
        self._out = out
        self._doomed: dict[bytes, Chunk] = {}
        self._late: dict[SessionKey, tuple[float, frozenset[bytes]]] = {}  #: until when, and what it named
        self.tombstones: dict[SessionKey, Tombstone] = {}
        self._nobodys: set[bytes] = set()  #: in the arena and named by nobody at the last sweep
        #: In the blob tier for long and named by nobody at the last sweep, and at this one.
        self._nobodys_blob: tuple[set[bytes], set[bytes]] = (set(), set())

    # ---- erasing

    def erase(self, event: SessionErased) -> None:
        """Forget the session and everything that only it names, on this node and in the blob tier."""
        session, now = event.session, event.now
        manifest = self._index.manifests.get(session)
        claims = self._index.claims.get(session, {})
        known = (*manifest.keys, *manifest.former) if manifest else ()
        named = dict.fromkeys([*known, *claims, *(event.told.keys if event.told else ())])
        told = event.told.fingerprint if event.told else b""
        fingerprint = manifest.fingerprint if manifest else next(iter(claims.values()), told)
        self._index.drop_manifest(session)
        orphans = tuple(key for key in named if key not in self._index.names)
        self._late[session] = (now + TOMBSTONE_S, frozenset(named))
        # No earlier than what it erases, whichever node's clock wrote that.
        erased_s = max(event.wall, manifest.last_use_s if manifest else 0.0, event.told.erased_s if event.told else 0.0)
        tombstone = Tombstone(session, fingerprint, orphans[:_NAMED], erased_s)
        if not event.expired:
            self._remember(tombstone)
            if named or not event.told:  # one who knows nothing must not write over one who does
                self._out.append(PutTombstone(tombstone))
        self._out.append(DeleteManifest(session))
        self._out.append(TellErase(orphans, (session,)))
        self._remove(orphans, fingerprint)

    def heed(self, tombstones: Iterable[Tombstone]) -> None:
        """Erasures that happened while this node may not have been told."""
        for tombstone in tombstones:
            session = tombstone.session
            known = self.tombstones.get(session)
            if known is None or known.erased_s < tombstone.erased_s:
                self._remember(tombstone)
            manifest = self._index.manifests.get(session)
            gone = dict.fromkeys(tombstone.keys)
            heeded = manifest is not None and self.void(manifest)
            if manifest is not None and heeded:
                gone |= dict.fromkeys([*self._index.drop_manifest(session), *manifest.former])
                self._sessions.forget(session)
                self._out += [Counted("erasures_heeded"), DeleteManifest(session)]
            here = tuple(key for key in gone if key in self._index.chunks and key not in self._index.names)
            if here or heeded:
                self._out.append(TellErase(here, (session,) if heeded else ()))
            self._remove_here(here)

    def void(self, manifest: Manifest) -> bool:
        """Whether a manifest is from before its session's erasure."""
        return manifest.last_use_s <= self.over_s(manifest.session)

    def over_s(self, session: SessionKey) -> float:
        """Until when, by manifests' times, a use of the session was before its erasure; minus infinity: it was not erased."""
        tombstone = self.tombstones.get(session)
        return tombstone.erased_s + TOMBSTONE_S if tombstone is not None else float("-inf")

    def told_again(self) -> TellErase:
        """What a worker that was not attached may still have of erased sessions."""
        late = [t for t in reversed(self.tombstones.values()) if t.session not in self._index.manifests]
        keys = (k for t in reversed(self.tombstones.values()) for k in t.keys if k not in self._index.names)
        return TellErase(tuple(islice(keys, _TOLD)), tuple(t.session for t in late))

    def _remember(self, tombstone: Tombstone) -> None:
        self.tombstones.pop(tombstone.session, None)
        self.tombstones[tombstone.session] = tombstone
        while len(self.tombstones) > _REMEMBERED:
            del self.tombstones[next(iter(self.tombstones))]

    # ---- orphans

    def sweep_orphans(self, now: float) -> None:
        """Remove what is on the SSD or in the arena and was nobody's at the last call already. All sessions must be known. What
        `sweep_blob` is given until the next call belongs to this sweep."""
        self._nobodys_blob = (self._nobodys_blob[1], set())
        for session in [s for s in self._index.claims if self._sessions.standing(s, now).last_use < now - CLAIM_S]:
            self._index.drop_claims(session)
        old = [key for key, sweeps in self._index.unnamed.items() if sweeps]
        for key in self._index.unnamed:
            self._index.unnamed[key] += 1
        self._count_orphans(len(old), "ssd")
        nobodys = {key for key in self._index.resident if key not in self._index.names and key not in self._index.unnamed}
        stale = [key for key in self._index.resident if key in nobodys and key in self._nobodys]
        self._count_orphans(len(stale), "dram")
        self._nobodys = nobodys.difference(stale)
        if old or stale:
            self._out.append(TellErase((*old, *stale)))
        self._remove_here(old + stale)

    def sweep_blob(self, fingerprint: bytes, keys: Sequence[bytes]) -> None:
        """Remove those that nobody names from the blob tier, where they have been for long; note that it has the others.

        "For long" was told by comparing this node's clock with the tier's. As either may be wrong, they were nobody's at the last
        sweep already.
        """
        removed, (before, seen) = 0, self._nobodys_blob
        for key in keys:
            chunk = self._index.chunks.get(key)
            if key in self._index.names:
                if chunk is not None:
                    chunk.backed = True
            elif key not in before:
                seen.add(key)
            elif chunk is None or chunk.blob is not CopyState.WAITING:
                removed += 1
                if chunk is not None:
                    self._index.set_copy(chunk, "blob", CopyState.ABSENT)
                    chunk.backed = False
                self._out.append(DeleteBlob(key, fingerprint))
        self._count_orphans(removed, "blob")

    def _count_orphans(self, number: int, tier: str) -> None:
        if number:
            self._out.append(Counted(f"orphans_removed_{tier}", number))

    # ---- removing

    def _remove(self, keys: Iterable[bytes], fingerprint: bytes) -> None:
        """Doom chunks that nobody names; `fingerprint` finds those in the blob tier that this node has no record of."""
        for key in keys:
            chunk = self._index.chunks.get(key)
            if chunk is None:
                if fingerprint:
                    self._out.append(DeleteBlob(key, fingerprint))
                continue
            self._doom(chunk)
            if chunk.blob is not CopyState.PRESENT:
                self._out.append(DeleteBlob(key, chunk.shape.fingerprint))
        self.sweep()

    def _remove_here(self, keys: Iterable[bytes]) -> None:
        """As `_remove`, from this node only."""
        for key in keys:
            chunk = self._index.chunks[key]
            if chunk.blob is CopyState.PRESENT:
                self._index.set_copy(chunk, "blob", CopyState.ABSENT)
            self._doom(chunk)
        self.sweep()

    def _doom(self, chunk: Chunk) -> None:
        chunk.doomed = True
        self._doomed[chunk.key] = chunk
        self._loads.void_key(chunk.key)

    def buried(self, session: SessionKey, now: float) -> bool:
        """Whether the session was erased a moment ago and its saves are late ones."""
        grave = self._late.get(session)
        return grave is not None and now < grave[0]

    def late(self, session: SessionKey, keys: list[bytes], now: float) -> bool:
        """Whether a manifest belongs to a turn from before the erasure: it names what was erased, or nothing was known to tell by."""
        grave = self._late.get(session)
        return grave is not None and now < grave[0] and (not grave[1] or not grave[1].isdisjoint(keys))

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
            if chunk.idle and chunk.ssd in _GONE and chunk.blob in _GONE:
                del self._doomed[key]
                chunk.doomed = False

    def left(self, keys: Iterable[bytes]) -> dict[str, int]:
        """How many of the chunks that nobody names this node's "dram" and "ssd", or its view of "blob", still has."""
        left = dict.fromkeys(("dram", "ssd", "blob"), 0)
        for key in keys:
            chunk = self._index.chunks.get(key)
            if chunk is not None and key not in self._index.names:
                left["dram"] += not chunk.idle
                left["ssd"] += chunk.ssd not in _GONE
                left["blob"] += chunk.blob not in _GONE
        return left

    def trim(self, now: float) -> None:
        """Forget whose late saves are refused."""
        for session in [s for s, grave in self._late.items() if now >= grave[0]]:
            del self._late[session]

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert {k for k, c in self._index.chunks.items() if c.doomed} == set(self._doomed)
