"""Which chunks are deleted from the SSD when it is over its size.

Whole chunks, as a file is a whole chunk, in this order: chunks that no session names; then by class (dropped,
unadvised, advised), least urgent priority, least recently used session, last chunk. A chunk that several sessions name
counts with the one that protects it most. Chunks that the blob tier has go before all others. Never a chunk that is
being read, being copied to the blob tier, or doomed (erasure deletes it).

Sessions are ranked, not chunks. The ranking is walked lazily and kept; a session used since is moved when its turn
comes. A little more than needed is freed, a bounded number of chunks at a time. A file counts with its length; while it
is written, as if it were raw.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core.chunk import Chunk, stored_bytes
from kvstore.core.index import Index
from kvstore.core.instructions import Counted, DeleteSsd, Instruction
from kvstore.core.sessions import Sessions
from kvstore.core.state import CopyState, PieceState

#: Freed beyond what is needed, at most: 1 / share of the size, bytes, and chunks at a time.
_HEADROOM_SHARE, _HEADROOM_BYTES, _CHUNKS_AT_ONCE = 64, 1 << 30, 256
#: Oldest usable ranking. A ranking that is used up is made again only after _STEP_S for each step it took.
_STALE_S, _STEP_S = 10.0, 2e-5
_READING = (PieceState.QUEUED, PieceState.LOADING)


class _Walk:
    """A ranking: when it was made, its remaining victims, and the number of chunks examined for it."""

    __slots__ = ("ranked", "steps", "victims")

    def __init__(self, ranked: float) -> None:
        self.ranked = ranked
        self.steps = 0
        self.victims: Iterator[Chunk] = iter(())


class Capacity:
    """See the module.

    limit_bytes: limit of all files; None until the shell has set it, and then nothing is deleted. learned: whether a
    complete list of sessions has been seen; until then an unnamed chunk may belong to a session.
    """

    def __init__(self, index: Index, sessions: Sessions, out: list[Instruction]) -> None:
        self._index = index
        self._sessions = sessions
        self._out = out
        self.limit_bytes: int | None = None
        self.learned = False
        self._now = 0.0
        self._walks: dict[bool, _Walk] = {}  #: by `backed only`

    def admit(self, shape: KvShape, now: float, *, backed_only: bool = False) -> bool:
        """Make room for a chunk of this shape; whether there is. backed_only: delete only chunks that blob has."""
        if self.limit_bytes is None:
            return True
        size = stored_bytes(shape)
        free = self.limit_bytes - self._index.ssd_stored_bytes
        if size <= free:
            return True
        if size > self.limit_bytes:
            return False
        headroom = min(self.limit_bytes // _HEADROOM_SHARE, _HEADROOM_BYTES) // size * size
        self._make_room(size, headroom, now, backed_only=backed_only, most=_CHUNKS_AT_ONCE)
        return size <= self.limit_bytes - self._index.ssd_stored_bytes

    def trim(self, now: float) -> None:
        """Bring the SSD under its size at once, as after a restart with a smaller one."""
        self._make_room(0, 0, now, backed_only=False, most=len(self._index.chunks))

    def _make_room(self, needed: int, headroom: int, now: float, *, backed_only: bool, most: int) -> None:
        """Free `needed` bytes, and up to `headroom` more while that deletes no only copy."""
        if self.limit_bytes is None:
            return
        self._now = now
        goal = self.limit_bytes - needed
        gone: dict[str, int] = {}
        while most and self._index.ssd_stored_bytes > goal - headroom:
            over = self._index.ssd_stored_bytes > goal
            chunk = self._next(True) or (self._next(False) if over and not backed_only else None)
            if chunk is None:
                break
            most -= 1
            reason = self._reason(chunk)
            gone[reason] = gone.get(reason, 0) + chunk.shape.chunk_bytes
            self._index.set_copy(chunk, "ssd", CopyState.ABSENT)
            self._out.append(DeleteSsd(chunk.key, chunk.shape.fingerprint))
        self._out.extend(Counted("evicted_bytes", size, ("ssd", reason)) for reason, size in gone.items())

    def _reason(self, chunk: Chunk) -> str:
        """The reason label of `evicted_bytes`."""
        sessions = self._index.names.get(chunk.key)
        if not sessions:
            return "unnamed"
        if not chunk.backed:
            return "only copy"
        return max(self._sessions.standing(s, self._now) for s in sessions).rank.name.lower()

    # ---- the ranking

    def _next(self, backed_only: bool) -> Chunk | None:
        """The next victim; None when there is none. Ranks again when the ranking is old or used up."""
        walk = self._walks.get(backed_only)
        if walk is not None and self._now - walk.ranked <= _STALE_S:
            found = next(walk.victims, None)
            if found is not None or self._now - walk.ranked <= walk.steps * _STEP_S:
                return found
        walk = self._walks[backed_only] = _Walk(self._now)
        walk.victims = self._walk(backed_only, walk)
        return next(walk.victims, None)

    def _walk(self, backed_only: bool, walk: _Walk) -> Iterator[Chunk]:
        """Victims in order. Each is checked again before it is yielded."""
        for key in list(self._index.unnamed):
            walk.steps += 1
            chunk = self._index.chunks.get(key)
            if (
                chunk is not None
                and key in self._index.unnamed
                and self._may_go(chunk, backed_only and not self.learned)
            ):
                yield chunk
        heap = [(self._rank(s), s) for s in self._index.ssd_chunks]
        heapq.heapify(heap)
        while heap:
            rank, session = heapq.heappop(heap)
            for key in self._latest_first(session):
                walk.steps += 1
                current = self._rank(session)
                if current > rank:
                    heapq.heappush(heap, (current, session))
                    break
                chunk = self._index.chunks.get(key)
                if chunk is not None and self._may_go(chunk, backed_only) and not self._protected(chunk, session, rank):
                    yield chunk

    def _rank(self, session: SessionKey) -> tuple[int, int, float]:
        s = self._sessions.standing(session, self._now)
        return s.rank, s.urgency, s.last_use_s

    def _latest_first(self, session: SessionKey) -> list[bytes]:
        manifest = self._index.manifests.get(session)
        return [*reversed(self._index.claims.get(session, ())), *reversed(manifest.keys if manifest else ())]

    def _may_go(self, chunk: Chunk, backed_only: bool) -> bool:
        if chunk.ssd is not CopyState.PRESENT or chunk.blob is CopyState.WAITING or chunk.doomed:
            return False
        return (bool(chunk.backed) or not backed_only) and not any(s in _READING for s in chunk.states)

    def _protected(self, chunk: Chunk, session: SessionKey, rank: tuple[int, int, float]) -> bool:
        """Whether another session that names the chunk ranks higher: the chunk counts with that one."""
        sessions = self._index.names.get(chunk.key, ())
        return any(self._rank(s) > rank for s in sessions if s != session)
