"""What erasing a session removes, and when: every chunk that no other manifest names, from every tier of this node and the
blob tier, at once where nothing uses it and as soon as nothing does otherwise.

An erased chunk is doomed: no load finds it, no save revives it, and a write that was under way is undone when it ends. Turns of the
session that were running are told by what their worker has heard (graves.py): their late saves and manifests are refused.

An erasure outlives the processes that were told of it. Each node notes it in its journal (NoteErasure) before it answers, and
goes on until every tier of its own and the blob tier have confirmed. A tombstone in the blob tier tells nodes that were away:
what they know of the session's ended lives is forgotten, and those chunks leave their own tiers (the blob tier's copies are the
eraser's to delete, as the same content may be saved anew). Until then nothing of it is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core.chunk import Chunk
from kvstore.core.erasure_events import EraseHeard, ErasureEnded, ErasureSeen, ErasuresReplayed, SessionErased, TombstonesListed
from kvstore.core.events import FoundCopy, LoadWanted
from kvstore.core.eviction import evictable
from kvstore.core.graves import MOST_NAMED, Graves
from kvstore.core.index import Index
from kvstore.core.instructions import (
    Counted,
    DeleteBlob,
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

#: How many erased chunks a worker that attaches is told of.
_TOLD = 20_000
_GONE = (CopyState.ABSENT, CopyState.SKIPPED)


class Erasure:
    """See the module. `graves`: the erasures that this node knows of."""

    def __init__(self, index: Index, ledger: Ledger, room: Room, loads: Loads, sessions: Sessions, out: list[Instruction]) -> None:
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
        """An erasure that others were told of before: it is known here, or the session has begun a new life since."""
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
        orphans = {key: fingerprint for key, fingerprint in named.items() if key not in self._index.names}
        if not event.expired:
            self.graves.bury(Tombstone(session, number, orphans), is_open=True, blind=event.blind)
            self._note(session)
        self._out.append(DeleteManifest(session))
        self._tell(orphans, session)
        self._remove(orphans)

    def reopen(self, session: SessionKey) -> None:
        """Look at a known erasure again, of everything that was known to be its; a life that has begun since goes on."""
        grave = self.graves.get(session)
        if grave is not None:
            self.graves.bury(Tombstone(session, grave.number), is_open=True)
            self._note(session)
            self._remove({key: fingerprint for key, fingerprint in grave.chunks.items() if key not in self._index.names})

    def _number(self, session: SessionKey, manifest: Manifest | None, running: bool) -> int:
        """Above every life that the session may have had. An erasure that is repeated keeps its number."""
        known = self.graves.number(session)
        if manifest is not None:
            return max(known, manifest.life + 1)
        return known if known and not running else self.graves.floor + 1

    def _note(self, session: SessionKey) -> None:
        """The grave, as it is now, goes into the journal and into the blob tier."""
        grave = self.graves.get(session)
        assert grave is not None
        tombstone = Tombstone(session, grave.number, dict(grave.chunks))
        self._out += [NoteErasure(OpenErasure(tombstone, grave.blind)), PutTombstone(tombstone)]

    def _tell(self, keys: Iterable[bytes], session: SessionKey) -> None:
        self._out.append(TellErase(tuple(keys), (session,), self.graves.tell([session])))

    def exhumed(self, manifest: Manifest) -> None:
        """A manifest of an ended life turned up: what only it names goes, too."""
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
        """What workers, the blob tier and the journal say of erasures."""
        match event:
            case EraseHeard():
                self.graves.heard(event.worker, event.telling)
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

    def recovered(self, copies: Iterable[FoundCopy]) -> None:
        """The SSD has these: what was erased meanwhile leaves it."""
        if len(self.graves):
            self.remove_here([c.key for c in copies if c.key in self.graves.shut_keys and self._unnamed(c.key)])

    def _heed(self, event: TombstonesListed) -> None:
        """Erasures that happened while this node may not have been told."""
        for tombstone in event.tombstones:
            session = tombstone.session
            news = self.graves.bury(tombstone)
            gone = dict.fromkeys(tombstone.chunks)
            manifest = self._index.manifests.get(session)
            ended = self.void(manifest) if manifest is not None else news
            if ended:
                gone |= dict.fromkeys([*self._index.drop_manifest(session), *(manifest.former if manifest is not None else ())])
                self._sessions.forget(session)
            if ended and manifest is not None:
                self._out += [Counted("erasures_heeded"), DeleteManifest(session)]
            here = [key for key in gone if self._unnamed(key)]
            if ended:
                self._tell(here, session)
            elif here:
                self._out.append(TellErase(tuple(here)))
            self.remove_here(here)
        if event.complete:
            self.graves.listed({tombstone.session for tombstone in event.tombstones})

    def _unnamed(self, key: bytes) -> bool:
        return key in self._index.chunks and key not in self._index.names

    def void(self, manifest: Manifest) -> bool:
        """Whether a manifest is of a life that an erasure ended."""
        return manifest.life < self.graves.number(manifest.session)

    def is_erasing(self, session: SessionKey) -> bool:
        """Whether some tier of this node may still have something of the session, which was erased."""
        grave = self.graves.get(session)
        return grave is not None and grave.is_open

    # ---- serving

    def serves(self, key: bytes, tenant: str = "") -> bool:
        """Whether the chunk may be handed out. tenant: of who asks, empty when it is not known."""
        return not self.graves.shuts(key, tenant, key in self._index.names)

    def allowed(self, event: LoadWanted) -> LoadWanted:
        """The load up to the first chunk that was erased."""
        if not len(self.graves):
            return event
        tenant = event.session.tenant if event.session is not None else ""
        stop = next((i for i, (key, _) in enumerate(event.wants) if not self.serves(key, tenant)), None)
        return event if stop is None else replace(event, wants=event.wants[:stop])

    def attached(self, worker: str) -> None:
        """A worker that was not here may still have something of erased sessions."""
        dead = [s for s in self.graves if s not in self._index.manifests and s not in self._index.claims]
        telling = self.graves.attach(worker, dead)
        keys = tuple(key for key in self.graves.keys(_TOLD) if key not in self._index.names)
        if dead or keys:
            self._out.append(TellErase(keys, tuple(dead), telling))

    # ---- removing

    def _remove(self, keys: Mapping[bytes, bytes]) -> None:
        """Doom chunks (key -> fingerprint) that nobody names, wherever they are."""
        for key, fingerprint in keys.items():
            chunk = self._index.chunks.get(key)
            if chunk is None:
                self._out.append(DeleteBlob(key, fingerprint))
                continue
            self._doom(chunk)
            if chunk.blob is not CopyState.PRESENT:
                self._out.append(DeleteBlob(key, chunk.shape.fingerprint))
        self.sweep()

    def remove_here(self, keys: Iterable[bytes]) -> None:
        """Doom chunks that nobody names, on this node only."""
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

    def settled(self, session: SessionKey) -> bool:
        """Whether this node, as far as it knows itself, has nothing of the erased session any more."""
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
