"""What this node knows: chunks, where each piece and copy is, sessions' manifests, and which session names which chunk.

Decides nothing. Pieces and copies change only through `set_piece` and `set_copy`, which check the tables of state.py
and record the sessions whose residency changed (`dirty`); `add_listed` makes records of files found at the start.

Invariants (`validate`): a chunk has slots exactly for its LOADING, SAVING and READY pieces; `names[key]` are exactly
the sessions whose manifest or claim contains the key; no empty record is kept; the sums
(`ssd_bytes`, `ssd_stored_bytes`, `ssd_chunks`, `named`, `unnamed`) equal what they count.

A node may know millions of chunks, so equal objects are shared (shapes, keys, one-session tuples).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.chunk import NO_NUMBERS, NO_STATES, UNREAD, Chunk, stored_bytes
from kvstore.core.residency import Residency, residency
from kvstore.core.state import COPY_MOVES, PIECE_MOVES, CopyState, PieceState, move

__all__ = ["WITH_SLOT", "Chunk", "Index"]

#: States of copies that take room on the SSD.
_STORED = (CopyState.PRESENT, CopyState.WAITING)
WITH_SLOT = (PieceState.LOADING, PieceState.SAVING, PieceState.READY)
#: Manifests are trimmed when there are 1 / _TRIM_SHARE more than the limit.
_TRIM_SHARE = 16
#: A chunk that more sessions name is not ranked by all of them each time (eviction.py).
MANY_NAMES = 256
#: Most former chunks kept in a manifest, the latest.
MOST_FORMER = 512


class Index:
    """See the module."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, Chunk] = {}
        self.resident: dict[bytes, Chunk] = {}  #: chunks with a piece that is not ABSENT
        self.shapes: dict[bytes, KvShape] = {}  #: by fingerprint
        self.manifests: dict[SessionKey, Manifest] = {}
        #: by session, key -> fingerprint of chunks saved in a turn that has not ended
        self.claims: dict[SessionKey, dict[bytes, bytes]] = {}
        #: sessions that name a chunk: a shared tuple of one, or a set
        self.names: dict[bytes, Collection[SessionKey]] = {}
        self.dirty: set[SessionKey] = set()
        self.stirred: dict[bytes, None] = {}  #: resident chunks whose victim key may have changed
        self.joined: dict[SessionKey, None] = {}  #: sessions that name a chunk of many since; eviction.py clears it
        self.ssd_bytes = 0  #: raw bytes of the chunks on the SSD
        self.ssd_stored_bytes = 0  #: bytes of its files, including those being written
        self.ssd_chunks: Counter[SessionKey] = Counter()  #: by session, number of its chunks on the SSD
        #: (tenant, fingerprint) -> number of chunks that the tenant's sessions name
        self.named: Counter[tuple[str, bytes]] = Counter()
        self.named_chunks: Counter[bytes] = Counter()  #: fingerprint -> number of named chunks
        self.unnamed: dict[bytes, int] = {}  #: unnamed chunks on the SSD -> number of sweeps that found them so
        self.loosened: dict[bytes, None] = {}  #: doomed chunks that may be less in use; erasure.py clears it
        self._alone: dict[SessionKey, tuple[SessionKey]] = {}
        self._perhaps_empty: set[bytes] = set()

    # ---- chunks

    def chunk(self, key: bytes, shape: KvShape) -> Chunk | None:
        """The record of `key`, created if new; None when it is known with another shape."""
        found = self.chunks.get(key)
        if found is None:
            known = self.shapes.get(shape.fingerprint)
            found = self.chunks[key] = Chunk(key, known if known is not None and known == shape else shape)
            self._perhaps_empty.add(key)
        return found if found.shape is shape or found.shape == shape else None

    def set_piece(self, chunk: Chunk, layer: int, new: PieceState, offset: int = -1) -> None:
        """Change one piece's state. offset: its slot, for states that have one. Raises IllegalTransition."""
        if not chunk.states:
            layers = chunk.shape.layers
            chunk.states = [PieceState.ABSENT] * layers
            chunk.offsets = [-1] * layers
            chunk.sums = [0] * layers
            self.resident[chunk.key] = chunk
        self.loosen(chunk)
        old = chunk.states[layer]
        chunk.states[layer] = move(PIECE_MOVES, old, new)
        if new in WITH_SLOT:
            chunk.offsets[layer] = offset
        elif new is PieceState.ABSENT:
            chunk.offsets[layer] = -1
            if not any(chunk.states):
                chunk.states, chunk.offsets, chunk.sums = NO_STATES, NO_NUMBERS, NO_NUMBERS
                del self.resident[chunk.key]
                self._perhaps_empty.add(chunk.key)
        if new is PieceState.READY:
            chunk.ready += 1
        elif old is PieceState.READY:
            chunk.ready -= 1
        else:
            return
        self._touch(chunk.key)
        self.stir_key(chunk.key)

    def set_copy(
        self, chunk: Chunk, tier: str, new: CopyState, sums: tuple[int, ...] = (), encoded_bytes: int = 0
    ) -> None:
        """Change the state of the chunk's copy in "ssd" or "blob"; nothing when it is the same. Raises
        IllegalTransition.

        sums: checksums of a PRESENT copy. encoded_bytes: length of the SSD's file if a codec made it, else 0.
        """
        old: CopyState = getattr(chunk, tier)
        if old is new:
            return
        move(COPY_MOVES, old, new)
        self.loosen(chunk)
        setattr(chunk, tier, new)
        chunk.set_sums(tier, sums if new is CopyState.PRESENT else ())
        if tier == "ssd":
            self._count_ssd(chunk, old, new, encoded_bytes)
        else:
            chunk.leaving = False
            if new in (CopyState.PRESENT, CopyState.ABSENT):
                chunk.backed = int(new is CopyState.PRESENT)
        self._touch(chunk.key)
        self.stir_key(chunk.key)
        self._perhaps_empty.add(chunk.key)

    def add_listed(self, shape: KvShape, keys: Iterable[bytes]) -> None:
        """The SSD has raw files of these chunks, whose headers were not read. Like `chunk` and `set_copy`, for millions
        of them."""
        added = 0
        for key in keys:
            known = self.chunks.get(key)
            if known is None:
                known = self.chunks[key] = Chunk(key, shape)
                known.ssd = CopyState.PRESENT
                added += 1
                sessions = self.names.get(key)
                if sessions is None:
                    self.unnamed[key] = 0
                    continue
                for session in sessions:
                    self._count_session(session, 1)
                self.dirty.update(sessions)
            elif known.shape == shape and known.ssd in (CopyState.ABSENT, CopyState.SKIPPED):
                self.set_copy(known, "ssd", CopyState.PRESENT)
        self.ssd_bytes += added * shape.chunk_bytes
        self.ssd_stored_bytes += added * stored_bytes(shape)

    def _count_ssd(self, chunk: Chunk, old: CopyState, new: CopyState, encoded_bytes: int) -> None:
        self.ssd_stored_bytes -= chunk.ssd_stored_bytes if old in _STORED else 0
        chunk.encoded_bytes = encoded_bytes
        self.ssd_stored_bytes += chunk.ssd_stored_bytes if new in _STORED else 0
        change = (new is CopyState.PRESENT) - (old is CopyState.PRESENT)
        if not change:
            return
        self.ssd_bytes += change * chunk.shape.chunk_bytes
        sessions = self.names.get(chunk.key, ())
        for session in sessions:
            self._count_session(session, change)
        if change < 0:
            self.unnamed.pop(chunk.key, None)
        elif not sessions:
            self.unnamed[chunk.key] = 0

    def _count_session(self, session: SessionKey, change: int) -> None:
        self.ssd_chunks[session] += change
        if not self.ssd_chunks[session]:
            del self.ssd_chunks[session]

    def sweep(self) -> None:
        """Drop the records of chunks without any piece or copy. Called after an event was handled."""
        gone = (CopyState.ABSENT, CopyState.SKIPPED)
        for key in self._perhaps_empty:
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.idle and chunk.ssd in gone and chunk.blob in gone:
                del self.chunks[key]
        self._perhaps_empty.clear()

    def loosen(self, chunk: Chunk) -> None:
        """Something of the chunk may no longer be in use."""
        if chunk.doomed:
            self.loosened[chunk.key] = None

    def _touch(self, key: bytes) -> None:
        self.dirty.update(self.names.get(key, ()))

    def stir(self, session: SessionKey) -> Collection[bytes]:
        """The session's standing has changed. Returns the chunks that it names."""
        keys = self._named_by(session)
        for key in keys:
            self.stir_key(key)
        return keys

    def stir_key(self, key: bytes) -> None:
        """The victim key of the chunk may have changed."""
        if key in self.resident:
            self.stirred[key] = None

    # ---- sessions

    def set_manifest(self, manifest: Manifest) -> list[bytes]:
        """Replace the session's manifest and claims. Returns the keys that no session names any more.

        Chunks that the session named until now and names no more become `former` in the stored manifest.
        """
        session, fingerprint = manifest.session, manifest.fingerprint
        before = self._named_by(session)
        known = self.manifests.get(session)
        former = dict.fromkeys([*(known.former if known else ()), *manifest.former, *before])
        self.claims.pop(session, None)
        keys = []
        for position, key in enumerate(manifest.keys):
            chunk = self.chunks.get(key)
            if chunk is not None:
                chunk.position = position
                key = chunk.key
            keys.append(key)
            self._name(session, key, fingerprint, chunk)
        self.dirty.add(session)
        now = set(keys)
        self.manifests[session] = replace(
            manifest, keys=keys, former=[key for key in former if key not in now][-MOST_FORMER:]
        )
        return self._unname(session, {k: f for k, f in before.items() if k not in now})

    def drop_manifest(self, session: SessionKey) -> list[bytes]:
        """Forget the session. Returns the keys that no session names any more."""
        before = self._named_by(session)
        self.manifests.pop(session, None)
        self.claims.pop(session, None)
        self.dirty.add(session)
        orphans = self._unname(session, before)
        self._alone.pop(session, None)
        return orphans

    def trim_manifests(self, most: int, needed: Container[SessionKey]) -> None:
        """When there are many more than `most` manifests, forget the least recently used that name no chunk here and
        are not `needed`. Blob has them. The session still exists, so `dirty` does not change."""
        beyond = len(self.manifests) - most
        if beyond <= most // _TRIM_SHARE:
            return
        idle = [m for s, m in self.manifests.items() if s not in self.claims and s not in needed]
        idle = [m for m in idle if not any(key in self.chunks for key in m.keys)]
        for manifest in sorted(idle, key=lambda m: m.last_use_s)[:beyond]:
            told = manifest.session in self.dirty
            self.drop_manifest(manifest.session)
            if not told:
                self.dirty.discard(manifest.session)

    def drop_claims(self, session: SessionKey) -> None:
        """Forget the claims of a turn that will not end: only the session's manifest names chunks."""
        manifest = self.manifests.get(session)
        kept = set(manifest.keys) if manifest else set()
        self._unname(session, {k: f for k, f in self.claims.pop(session, {}).items() if k not in kept})

    def claim(self, session: SessionKey, keys: Iterable[bytes], fingerprint: bytes) -> None:
        """The session's running turn uses these chunks; its manifest will name them."""
        claims = self.claims.setdefault(session, {})
        manifest = self.manifests.get(session)
        position = len(manifest.keys) if manifest else 0
        for key in keys:
            claims[key] = fingerprint
            chunk = self.chunks.get(key)
            self._name(session, key, fingerprint, chunk)
            if chunk is not None and not chunk.position:
                chunk.position = position + len(claims)

    def _named_by(self, session: SessionKey) -> dict[bytes, bytes]:
        """Key -> fingerprint."""
        manifest = self.manifests.get(session)
        named = dict.fromkeys(manifest.keys, manifest.fingerprint) if manifest else {}
        return named | self.claims.get(session, {})

    def _name(self, session: SessionKey, key: bytes, fingerprint: bytes, chunk: Chunk | None) -> None:
        self.stir_key(key)
        sessions = self.names.get(key)
        if sessions is None:
            alone = self._alone.get(session)
            if alone is None:
                alone = self._alone[session] = (session,)
            self.names[key] = alone
            self.named[session.tenant, fingerprint] += 1
            self.named_chunks[fingerprint] += 1
            self.unnamed.pop(key, None)
            if not self.unnamed:
                self.unnamed = {}  # a dict keeps the memory of its largest size
        elif session in sessions:
            return
        elif isinstance(sessions, set):
            sessions.add(session)
            if len(sessions) > MANY_NAMES:
                self.joined[session] = None
        else:
            self.names[key] = {*sessions, session}
        if chunk is not None and chunk.ssd is CopyState.PRESENT:
            self._count_session(session, 1)

    def _unname(self, session: SessionKey, keys: dict[bytes, bytes]) -> list[bytes]:
        orphans = []
        for key, fingerprint in keys.items():
            sessions = self.names.get(key, ())
            if session not in sessions:
                continue
            self.stir_key(key)
            chunk = self.chunks.get(key)
            on_ssd = chunk is not None and chunk.ssd is CopyState.PRESENT
            if on_ssd:
                self._count_session(session, -1)
            if isinstance(sessions, set) and len(sessions) > 1:
                sessions.discard(session)
                continue
            del self.names[key]
            self.named[session.tenant, fingerprint] -= 1
            self.named_chunks[fingerprint] -= 1
            if not self.named[session.tenant, fingerprint]:
                del self.named[session.tenant, fingerprint]
            if on_ssd:
                self.unnamed[key] = 0
            orphans.append(key)
        return orphans

    # ---- questions

    def residency(self, keys: Sequence[bytes], tier: str) -> Residency:
        """What the tier ("dram", "ssd", "blob") holds of these chunks."""
        return residency(self.chunks, keys, tier)

    def held(self, session: SessionKey) -> tuple[int, int, int]:
        """Of the session: (tokens of the leading chunks on this node, of those wholly in the arena, bytes here). Of a
        chunk counts what the next turn reads."""
        manifest = self.manifests.get(session)
        if manifest is None:
            return 0, 0, 0
        here = dram = size = tokens = 0
        in_here = in_dram = True
        shape = self.shapes.get(manifest.fingerprint)
        layers = shape.read_after(len(manifest.keys)) if shape is not None else [()] * len(manifest.keys)
        for key, read in zip(manifest.keys, layers, strict=True):
            chunk = self.chunks.get(key)
            in_arena = chunk is not None and chunk.has(read)
            if chunk is None or not (in_arena or chunk.held_here):
                in_here = in_dram = False
                continue
            size += chunk.shape.chunk_bytes
            tokens = chunk.shape.chunk_tokens
            in_dram = in_dram and in_here and in_arena
            here += in_here
            dram += in_dram
        return here * tokens, dram * tokens, size

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        ssd = 0
        for key, chunk in self.chunks.items():
            assert chunk.key == key
            assert (key in self.resident) == bool(chunk.states)
            assert chunk.ready == sum(s is PieceState.READY for s in chunk.states)
            assert not chunk.states or any(chunk.states)
            for state, offset in zip(chunk.states, chunk.offsets, strict=True):
                assert (state in WITH_SLOT) == (offset >= 0), (state, offset)
            ready = (i for i, state in enumerate(chunk.states) if state is PieceState.READY)
            assert all(chunk.sums[i] != UNREAD for i in ready), "a peer would be sent no checksum"
            ssd += chunk.shape.chunk_bytes * (chunk.ssd is CopyState.PRESENT)
        assert set(self.resident) <= set(self.chunks)
        assert ssd == self.ssd_bytes
        named: dict[bytes, set[SessionKey]] = {}
        for session in {*self.manifests, *self.claims}:
            for key in self._named_by(session):
                named.setdefault(key, set()).add(session)
        assert named == {key: set(sessions) for key, sessions in self.names.items()}
        # A key belongs to one tenant and one model. Only a broken worker says otherwise, and then the sum still holds.
        assert sum(self.named.values()) == sum(self.named_chunks.values()) == len(named)
        stored = [c for c in self.chunks.values() if c.ssd in _STORED]
        assert self.ssd_stored_bytes == sum(c.ssd_stored_bytes for c in stored)
        assert all(c.ssd is CopyState.PRESENT for c in self.chunks.values() if c.encoded_bytes)
        present = [c for c in stored if c.ssd is CopyState.PRESENT]
        assert self.ssd_chunks == Counter(session for c in present for session in named.get(c.key, ()))
        assert set(self.unnamed) == {c.key for c in present if c.key not in named}
