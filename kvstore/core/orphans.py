"""When orphans are deleted: chunks that no session names, after a crash before a turn's end or because a history was
cut.

A chunk is deleted from a tier when two sweeps, a grace time apart and each after a complete list of sessions, found no
session that names it. Erasures are in erasure.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence

from kvstore.core.index import Index
from kvstore.core.instructions import Counted, DeleteBlob, Instruction, TellErase
from kvstore.core.sessions import Sessions
from kvstore.core.state import CopyState

#: A turn that has neither saved nor ended for this long is over.
CLAIM_S = 3600.0
#: Most unnamed chunks of the blob tier remembered until the next sweep. Others wait for a later one.
_CANDIDATES = 1 << 20


class Orphans:
    """See the module. `remove_here(keys)` deletes chunks from this node."""

    def __init__(
        self, index: Index, sessions: Sessions, out: list[Instruction], remove_here: Callable[[Collection[bytes]], None]
    ) -> None:
        self._index = index
        self._sessions = sessions
        self._out = out
        self._remove_here = remove_here
        self._unnamed: set[bytes] = set()  #: chunks only in the arena that were unnamed at the last sweep
        #: Old chunks in the blob tier that were unnamed at the last sweep, and at this one.
        self._unnamed_blob: tuple[set[bytes], set[bytes]] = (set(), set())

    def sweep(self, now: float) -> None:
        """Begin a sweep: delete chunks on the SSD and in the arena that were unnamed at the last one too. All sessions
        must be known. Calls of `sweep_blob` until the next call belong to this sweep."""
        self._unnamed_blob = (self._unnamed_blob[1], set())
        for session in [s for s in self._index.claims if self._sessions.standing(s, now).last_use_s < now - CLAIM_S]:
            self._index.drop_claims(session)
        old = [key for key, sweeps in self._index.unnamed.items() if sweeps]
        for key in self._index.unnamed:
            self._index.unnamed[key] += 1
        self._count(len(old), "ssd")
        unnamed = {
            key for key in self._index.resident if key not in self._index.names and key not in self._index.unnamed
        }
        stale = [key for key in self._index.resident if key in unnamed and key in self._unnamed]
        self._count(len(stale), "dram")
        self._unnamed = unnamed.difference(stale)
        if old or stale:
            self._out.append(TellErase((*old, *stale)))
        self._remove_here(old + stale)

    def sweep_blob(self, fingerprint: bytes, keys: Sequence[bytes], named: Container[bytes] = ()) -> None:
        """Old chunks listed in the blob tier: delete those unnamed at the last sweep too, and note that blob has the
        named ones. named: chunks of sessions not kept in memory; may contain others.

        Age alone is not enough, because this node's clock or the tier's may be wrong.
        """
        removed, (before, seen) = 0, self._unnamed_blob
        for key in keys:
            chunk = self._index.chunks.get(key)
            if key in self._index.names:
                if chunk is not None:
                    chunk.backed = chunk.backed or 1
            elif key in named:
                continue
            elif key not in before:
                if len(seen) < _CANDIDATES:
                    seen.add(key)
            elif chunk is None or chunk.blob is not CopyState.WAITING:
                removed += 1
                if chunk is not None:
                    self._index.set_copy(chunk, "blob", CopyState.ABSENT)
                    chunk.backed = 0
                self._out.append(DeleteBlob(key, fingerprint))
        self._count(removed, "blob")

    def _count(self, number: int, tier: str) -> None:
        if number:
            self._out.append(Counted(f"orphans_removed_{tier}", number))
