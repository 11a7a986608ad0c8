"""What erasing a session deletes, and when: every chunk that no other session names, from every tier of this node and
from blob, as soon as nothing uses it.

An erased chunk is doomed: no load finds it, no save revives it, and a write in progress is undone when it ends. Late
saves and manifests of turns that were running are refused; graves.py recognises them. The session's keys are deleted
first (DeleteKeys): what is encrypted can then not be read, wherever a copy is.

An erasure survives restarts. Each node writes it to its journal (NoteErasure) before it answers, and continues until
every tier of its own and blob have confirmed. A tombstone in blob informs nodes that were down: they forget the
session's ended lives and delete its chunks from their own tiers. Copies in blob are deleted only by the node that
erased, because the same content may have been saved again. Erased chunks are not served meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core.chunk import Chunk
from kvstore.core.erasure_events import (
    EraseHeard,
    ErasureEnded,
    ErasureSeen,
    ErasuresReplayed,
    SessionErased,
    TombstonesListed,
)
from kvstore.core.events import LoadWanted
from kvstore.core.eviction import evictable
from kvstore.core.graves import MOST_NAMED, Graves
from kvstore.core.index import Index
from kvstore.core.instructions import (
    Counted,
    DeleteBlob,
    DeleteKeys,
    DeleteManifest,
    DeleteSsd,
    Instruction,
    NoteErasure,
    PutTombstone,
    TellErase,
)
from kvstore.core.ledger import Ledger
from kvstore.core.loads import Loads
from kvstore.core.room import Room
from kvstore.core.sessions import Sessions
from kvstore.core.state import CopyState, PieceState
from kvstore.core.tombstone import OpenErasure, Tombstone

#: Most erased chunks that a worker is told of when it attaches.
_TOLD = 20_000
#: Doomed chunks that every event looks at, whether or not something of theirs has changed.
_LOOKS = 16
_GONE = (CopyState.ABSENT, CopyState.SKIPPED)


class Erasure:
    """See the module. graves: the erasures that this node knows."""

    def __init__(
        self, index: Index, ledger: Ledger, room: Room, loads: Loads, sessions: Sessions, out: list[Instruction]
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._room = room
        self._loads = loads
        self._sessions = sessions
        self._out = out
        self._doomed: dict[bytes, Chunk] = {}
        self.graves = Graves()

    # ---- erasing

    def is_old_news(self, event: SessionErased) -> bool:
        """Whether a repeated erasure is known here already, or the session has begun a new life since."""
        manifest = self._index.manifests.get(event.session)
        lives = manifest is not None and manifest.life >= event.number
        return bool(event.number) and (lives or self.graves.number(event.session) >= event.number)

    def erase(self, event: SessionErased) -> None:
        """Forget the session and everything that only it names, on this node and in the blob tier."""
        session = event.session
        manifest = self._index.manifests.get(session)
        claims = self._index.claims.get(session, {})
        number = max(event.number, self._number(session, manifest, bool(claims)))
        named = claims | (dict.fromkeys((*manifest.keys, *manifest.former), manifest.fingerprint) if manifest else {})
        self._index.drop_manifest(session)
        orphans = {
            key: fingerprint
            for key, fingerprint in named.items()
            if key not in self._index.names and key not in event.kept
        }
        self._out.append(DeleteKeys(session, number, event.expired))
        if not event.expired:
            self.graves.bury(Tombstone(session, number, orphans), is_open=True, blind=event.blind)
            self._note(session)
        self._out.append(DeleteManifest(session))
        self._tell(orphans, session)
        self._remove(orphans)

    def reopen(self, session: SessionKey) -> None:
        """Delete again everything that a known erasure named, except what a session names now."""
        grave = self.graves.get(session)
        if grave is not None:
            self.graves.bury(Tombstone(session, grave.number), is_open=True)
            self._out.append(DeleteKeys(session, grave.number))
            self._note(session)
            self._remove(
                {key: fingerprint for key, fingerprint in grave.chunks.items() if key not in self._index.names}
            )

    def _number(self, session: SessionKey, manifest: Manifest | None, running: bool) -> int:
        """The erasure's number: above every life the session may have had. A repeated erasure keeps its number."""
        known = self.graves.number(session)
        if manifest is not None:
            return max(known, manifest.life + 1)
        return known if known and not running else self.graves.floor + 1

    def _note(self, session: SessionKey) -> None:
        """Write the grave to the journal and its tombstone to blob."""
        grave = self.graves.get(session)
        assert grave is not None
        tombstone = Tombstone(session, grave.number, dict(grave.chunks))
        self._out += [NoteErasure(OpenErasure(tombstone, grave.blind)), PutTombstone(tombstone)]

    def _tell(self, keys: Iterable[bytes], session: SessionKey) -> None:
        self._out.append(TellErase(tuple(keys), (session,), self.graves.tell([session])))

    def exhumed(self, manifest: Manifest) -> None:
        """A manifest of an ended life was found: delete it and the chunks that only it names."""
        session, grave = manifest.session, self.graves.get(manifest.session)
        self._out.append(DeleteManifest(session))
        keys = [key for key in (*manifest.keys, *manifest.former) if key not in self._index.names]
        if grave is None or not grave.is_open:
            here = [key for key in keys if key in self._index.chunks]
            if here:
                self._out.append(TellErase(tuple(here)))
            self.remove_here(here)
        elif self.graves.bury(Tombstone(session, grave.number, dict.fromkeys(keys, manifest.fingerprint))):
            self._note(session)
            self._tell(keys, session)
            self._remove(dict.fromkeys(keys, manifest.fingerprint))

    def told(self, event: EraseHeard | ErasureSeen | ErasureEnded | ErasuresReplayed | TombstonesListed) -> None:
        """Handle what workers, the blob tier and the journal report about erasures."""
        match event:
            case EraseHeard():
                self.graves.heard(event.worker, event.notice)
            case ErasureSeen():
                if self.graves.seen(event.session):
                    self._note(event.session)
            case ErasureEnded():
                self.graves.close(event.session)
            case ErasuresReplayed():
                self.graves.note(event.floor)
                for erasure in event.open:
                    self.graves.bury(erasure.tombstone, is_open=True, blind=erasure.blind)
            case TombstonesListed():
                self._heed(event)

    def recovered(self) -> None:
        """The SSD was recovered: delete chunks that were erased meanwhile."""
        self.remove_here([k for k in self.graves.shut_keys if self._unnamed(k) and self._on_ssd(k)])

    def _heed(self, event: TombstonesListed) -> None:
        """Tombstones were listed: apply erasures that this node may have missed."""
        for tombstone in event.tombstones:
            session = tombstone.session
            news = self.graves.bury(tombstone)
            gone = dict.fromkeys(tombstone.chunks)
            manifest = self._index.manifests.get(session)
            ended = self.void(manifest) if manifest is not None else news
            if ended:
                gone |= dict.fromkeys(
                    [*self._index.drop_manifest(session), *(manifest.former if manifest is not None else ())]
                )
                self._sessions.forget(session)
            if ended:
                self._out.append(DeleteKeys(session, tombstone.number))
            if ended and manifest is not None:
                self._out += [Counted("erasures_heeded"), DeleteManifest(session)]
            here = [key for key in gone if self._unnamed(key)]
            if ended:
                self._tell(here, session)
            elif here:
                self._out.append(TellErase(tuple(here)))
            self.remove_here(here)
        if event.complete:
            self.graves.listed({tombstone.session for tombstone in (*event.earlier, *event.tombstones)})

    def _unnamed(self, key: bytes) -> bool:
        return key in self._index.chunks and key not in self._index.names

    def _on_ssd(self, key: bytes) -> bool:
        return self._index.chunks[key].ssd is CopyState.PRESENT

    def void(self, manifest: Manifest) -> bool:
        """Whether the manifest is of a life that an erasure ended."""
        return manifest.life < self.graves.number(manifest.session)

    def is_erasing(self, session: SessionKey) -> bool:
        """Whether the session was erased and a tier of this node may still hold something of it."""
        grave = self.graves.get(session)
        return grave is not None and grave.is_open

    # ---- serving

    def serves(self, key: bytes, tenant: str = "") -> bool:
        """Whether the chunk may be served. tenant: of the reader; empty when unknown."""
        return not self.graves.shuts(key, tenant, key in self._index.names)

    def allowed(self, event: LoadWanted) -> LoadWanted:
        """The load, cut before the first erased chunk."""
        if not len(self.graves):
            return event
        tenant = event.session.tenant if event.session is not None else ""
        stop = next((i for i, (key, _) in enumerate(event.wants) if not self.serves(key, tenant)), None)
        return event if stop is None else replace(event, wants=event.wants[:stop])

    def attached(self, worker: str) -> None:
        """A worker attached: tell it of erasures, because it may still hold erased chunks."""
        dead = [s for s in self.graves if s not in self._index.manifests and s not in self._index.claims]
        notice = self.graves.attach(worker, dead)
        keys = tuple(key for key in self.graves.keys(_TOLD) if key not in self._index.names)
        if dead or keys:
            self._out.append(TellErase(keys, tuple(dead), notice))

    # ---- removing

    def _remove(self, keys: Mapping[bytes, bytes]) -> None:
        """Doom unnamed chunks (key -> fingerprint) on this node and in blob."""
        for key, fingerprint in keys.items():
            chunk = self._index.chunks.get(key)
            if chunk is None:
                self._out.append(DeleteBlob(key, fingerprint))
                continue
            self._doom(chunk)
            if chunk.blob is not CopyState.PRESENT:
                self._out.append(DeleteBlob(key, chunk.shape.fingerprint))
        self._delete_unused(keys)

    def remove_here(self, keys: Collection[bytes]) -> None:
        """Doom unnamed chunks on this node only."""
        for key in keys:
            chunk = self._index.chunks[key]
            if chunk.blob is CopyState.PRESENT:
                self._index.set_copy(chunk, "blob", CopyState.ABSENT)
            self._doom(chunk)
        self._delete_unused(keys)

    def _doom(self, chunk: Chunk) -> None:
        chunk.doomed = True
        self._doomed[chunk.key] = chunk
        self._loads.void_key(chunk.key)

    def sweep(self) -> None:
        """Delete what is no longer in use of doomed chunks: of those that this event has loosened, and of a few others
        in turn. Called after every event."""
        loosened, self._index.loosened = self._index.loosened, {}
        self._delete_unused(loosened)
        others = list(islice(self._doomed, _LOOKS))
        for key in others:
            self._doomed[key] = self._doomed.pop(key)
        self._delete_unused(others)

    def _delete_unused(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            chunk = self._doomed.get(key)
            if chunk is None:
                continue
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
        """By tier ("dram", "ssd", "blob" as known here), how many of these chunks are still there and unnamed."""
        left = dict.fromkeys(("dram", "ssd", "blob"), 0)
        for key in keys:
            chunk = self._index.chunks.get(key)
            if chunk is not None and key not in self._index.names:
                left["dram"] += not chunk.idle
                left["ssd"] += chunk.ssd not in _GONE
                left["blob"] += chunk.blob not in _GONE
        return left

    def settled(self, session: SessionKey) -> bool:
        """Whether this node holds nothing of the erased session any more, by its own records."""
        grave = self.graves.get(session)
        if grave is None:
            return True
        left = self.left(grave.chunks)
        return not (grave.is_open or self.graves.unheard(session) or left["dram"] or left["ssd"])

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert {k for k, c in self._index.chunks.items() if c.doomed} == set(self._doomed)
        self.graves.validate()
        assert not any(self.void(m) for m in self._index.manifests.values())
        for session in self.graves:
            grave = self.graves.get(session)
            assert grave is not None and len(grave.chunks) <= MOST_NAMED
