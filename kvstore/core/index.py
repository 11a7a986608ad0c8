"""What this node knows: chunks, where each piece and copy is, sessions' manifests, and which session names which chunk.

It records and answers; it decides nothing. Everyone changes a piece or a copy through `set_piece` and `set_copy`, so that
the tables of `state` hold and the sessions whose residency changed are known (`dirty`).

Invariants (`validate`): a chunk has slots exactly for its LOADING, SAVING and READY pieces; `names[key]` are exactly the
sessions whose manifest or claim contains the key; no record is kept that holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest, leading
from kvstore.core.state import COPY_MOVES, PIECE_MOVES, CopyState, PieceState, move

WITH_SLOT = (PieceState.LOADING, PieceState.SAVING, PieceState.READY)


class Chunk:
    """One chunk's whereabouts. `states`, `offsets` and `sums` are by layer and empty while nothing is in the arena.

    saved_here: a worker of this node wrote it, so that this node owes the slower tiers a copy.
    doomed: it was erased while something still used it; it goes as soon as nothing does.
    """

    __slots__ = (
        "blob",
        "blob_sums",
        "doomed",
        "key",
        "offsets",
        "position",
        "ready",
        "saved_here",
        "shape",
        "ssd",
        "ssd_sums",
        "states",
        "sums",
    )

    def __init__(self, key: bytes, shape: KvShape) -> None:
        self.key = key
        self.shape = shape
        self.position = 0
        self.states: list[PieceState] = []
        self.offsets: list[int] = []
        self.sums: list[int] = []
        self.ready = 0
        self.ssd = CopyState.ABSENT
        self.blob = CopyState.ABSENT
        self.ssd_sums: tuple[int, ...] = ()
        self.blob_sums: tuple[int, ...] = ()
        self.saved_here = False
        self.doomed = False

    def state(self, layer: int) -> PieceState:
        """Where the piece stands."""
        return self.states[layer] if self.states else PieceState.ABSENT

    @property
    def complete(self) -> bool:
        """Every layer is READY in the arena."""
        return self.ready == self.shape.layers

    @property
    def held_here(self) -> bool:
        """All of it can be read on this node, without peers and blob."""
        return self.complete or self.ssd is CopyState.PRESENT

    @property
    def idle(self) -> bool:
        """Nothing is in the arena or on its way into it."""
        return not self.states


@dataclass(slots=True)
class Residency:
    """How much of one session one tier holds (contracts: TierResidency)."""

    layer_chunks: list[int] = field(default_factory=list)
    tokens: int = 0
    bytes: int = 0


class Index:
    """See the module."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, Chunk] = {}
        self.resident: dict[bytes, Chunk] = {}  #: those with something in the arena or on its way
        self.shapes: dict[bytes, KvShape] = {}  #: by fingerprint
        self.manifests: dict[SessionKey, Manifest] = {}
        self.claims: dict[SessionKey, dict[bytes, None]] = {}  #: saved in a turn that has not ended
        self.names: dict[bytes, set[SessionKey]] = {}
        self.dirty: set[SessionKey] = set()
        self.stirred: dict[bytes, None] = {}  #: resident chunks whose place among victims may have changed
        self._perhaps_empty: set[bytes] = set()
        self.ssd_bytes = 0

    # ---- chunks

    def chunk(self, key: bytes, shape: KvShape) -> Chunk | None:
        """The record of `key`, made when it is new; None when it is known with another shape."""
        found = self.chunks.get(key)
        if found is None:
            found = self.chunks[key] = Chunk(key, shape)
            self._perhaps_empty.add(key)
        return found if found.shape == shape else None

    def set_piece(self, chunk: Chunk, layer: int, new: PieceState, offset: int = -1) -> None:
        """Move one piece; `offset` is its slot for states that have one. Raises IllegalTransition."""
        if not chunk.states:
            layers = chunk.shape.layers
            chunk.states = [PieceState.ABSENT] * layers
            chunk.offsets = [-1] * layers
            chunk.sums = [0] * layers
            self.resident[chunk.key] = chunk
        old = chunk.states[layer]
        was_held = chunk.held_here
        chunk.states[layer] = move(PIECE_MOVES, old, new)
        if new is PieceState.READY:
            chunk.ready += 1
        elif old is PieceState.READY:
            chunk.ready -= 1
        if new is PieceState.ABSENT or new in WITH_SLOT:
            chunk.offsets[layer] = offset if new is not PieceState.ABSENT else -1
        if PieceState.READY in (old, new):
            self._touch(chunk.key)
        if new is PieceState.ABSENT and not any(chunk.states):
            chunk.states, chunk.offsets, chunk.sums = [], [], []
            del self.resident[chunk.key]
            self._perhaps_empty.add(chunk.key)
        if PieceState.READY in (old, new):
            self._stir_key(chunk.key)
        if was_held != chunk.held_here:
            self._touch(chunk.key)

    def set_copy(self, chunk: Chunk, tier: str, new: CopyState, sums: tuple[int, ...] = ()) -> None:
        """Move the chunk's copy in "ssd" or "blob"; no move when it stands there already. Raises IllegalTransition."""
        old: CopyState = getattr(chunk, tier)
        if old is new:
            return
        move(COPY_MOVES, old, new)
        setattr(chunk, tier, new)
        if tier == "ssd":
            chunk.ssd_sums = sums if new is CopyState.PRESENT else ()
            self.ssd_bytes += chunk.shape.chunk_bytes * ((new is CopyState.PRESENT) - (old is CopyState.PRESENT))
        else:
            chunk.blob_sums = sums if new is CopyState.PRESENT else ()
        self._touch(chunk.key)
        self._stir_key(chunk.key)
        self._perhaps_empty.add(chunk.key)

    def sweep(self) -> None:
        """Drop the records of chunks that are nowhere that this node knows of. Called when no event is being handled."""
        gone = (CopyState.ABSENT, CopyState.SKIPPED)
        for key in self._perhaps_empty:
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.idle and chunk.ssd in gone and chunk.blob in gone:
                del self.chunks[key]
        self._perhaps_empty.clear()

    def _touch(self, key: bytes) -> None:
        self.dirty |= self.names.get(key, set())

    def stir(self, session: SessionKey) -> None:
        """The session's standing has changed."""
        for key in self._named_by(session):
            self._stir_key(key)

    def _stir_key(self, key: bytes) -> None:
        if key in self.resident:
            self.stirred[key] = None

    # ---- sessions

    def set_manifest(self, manifest: Manifest) -> list[bytes]:
        """Replace the session's manifest and claims; returns the keys that nobody names any more."""
        session = manifest.session
        before = self._named_by(session)
        self.manifests[session] = manifest
        self.claims.pop(session, None)
        now = dict.fromkeys(manifest.keys)
        for position, key in enumerate(manifest.keys):
            self.names.setdefault(key, set()).add(session)
            self._stir_key(key)
            chunk = self.chunks.get(key)
            if chunk is not None:
                chunk.position = position
        self.dirty.add(session)
        return self._unname(session, [k for k in before if k not in now])

    def drop_manifest(self, session: SessionKey) -> list[bytes]:
        """Forget the session; returns the keys that nobody names any more."""
        before = self._named_by(session)
        self.manifests.pop(session, None)
        self.claims.pop(session, None)
        self.dirty.add(session)
        return self._unname(session, before)

    def claim(self, session: SessionKey, keys: Iterable[bytes]) -> None:
        """The session's running turn uses these chunks; its manifest will name them."""
        claims = self.claims.setdefault(session, {})
        manifest = self.manifests.get(session)
        position = len(manifest.keys) if manifest else 0
        for key in keys:
            claims[key] = None
            self.names.setdefault(key, set()).add(session)
            self._stir_key(key)
            chunk = self.chunks.get(key)
            if chunk is not None and not chunk.position:
                chunk.position = position + len(claims)

    def _named_by(self, session: SessionKey) -> list[bytes]:
        manifest = self.manifests.get(session)
        return [*(manifest.keys if manifest else ()), *self.claims.get(session, ())]

    def _unname(self, session: SessionKey, keys: Iterable[bytes]) -> list[bytes]:
        orphans = []
        for key in keys:
            sessions = self.names.get(key)
            if sessions is None:
                continue
            sessions.discard(session)
            self._stir_key(key)
            if not sessions:
                del self.names[key]
                orphans.append(key)
        return orphans

    # ---- questions

    def residency(self, keys: Sequence[bytes], tier: str) -> Residency:
        """What the tier ("dram", "ssd", "blob") holds of these chunks."""
        answer = Residency()
        whole: list[bool] = []
        tokens = 0
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is None:
                whole.append(False)
                continue
            layers, tokens = chunk.shape.layers, chunk.shape.chunk_tokens
            if len(answer.layer_chunks) < layers:
                answer.layer_chunks += [0] * (layers - len(answer.layer_chunks))
            if tier == "dram":
                present = [layer for layer in range(layers) if chunk.state(layer) is PieceState.READY]
            else:
                present = list(range(layers)) if getattr(chunk, tier) is CopyState.PRESENT else []
            for layer in present:
                answer.layer_chunks[layer] += 1
            answer.bytes += len(present) * chunk.shape.piece_bytes
            whole.append(len(present) == layers)
        answer.tokens = leading(whole) * tokens
        return answer

    def held(self, session: SessionKey) -> tuple[int, int, int]:
        """(tokens of the leading chunks here, of those wholly in the arena, bytes here) of the session."""
        manifest = self.manifests.get(session)
        if manifest is None:
            return 0, 0, 0
        here = dram = size = tokens = 0
        in_here = in_dram = True
        for key in manifest.keys:
            chunk = self.chunks.get(key)
            if chunk is None or not chunk.held_here:
                in_here = in_dram = False
                continue
            size += chunk.shape.chunk_bytes
            tokens = chunk.shape.chunk_tokens
            in_dram = in_dram and in_here and chunk.complete
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
            ssd += chunk.shape.chunk_bytes * (chunk.ssd is CopyState.PRESENT)
        assert set(self.resident) <= set(self.chunks)
        assert ssd == self.ssd_bytes
        named: dict[bytes, set[SessionKey]] = {}
        for session in {*self.manifests, *self.claims}:
            for key in self._named_by(session):
                named.setdefault(key, set()).add(session)
        assert named == self.names
