"""Chunks that nobody names, for another reason than an erasure: a crash before a turn's end, a history that was cut. They leave each
tier when they were seen so at two sweeps, a grace time apart, after a complete list of sessions each.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from kvstore.core.index import Index
from kvstore.core.instructions import Counted, DeleteBlob, Instruction, TellErase
from kvstore.core.sessions import Sessions
from kvstore.core.state import CopyState

#: A turn that has neither saved nor ended for so long will not.
CLAIM_S = 3600.0
#: How many of the blob tier's chunks that nobody names are remembered until the next sweep. More wait for a later one.
_CANDIDATES = 1 << 20


class Orphans:
    """See the module. `remove_here(keys)` makes chunks leave this node."""

    def __init__(self, index: Index, sessions: Sessions, out: list[Instruction], remove_here: Callable[[Iterable[bytes]], None]) -> None:
        self._index = index
        self._sessions = sessions
        self._out = out
        self._remove_here = remove_here
        self._nobodys: set[bytes] = set()  #: in the arena and named by nobody at the last sweep
        #: In the blob tier for long and named by nobody at the last sweep, and at this one.
        self._nobodys_blob: tuple[set[bytes], set[bytes]] = (set(), set())

    def sweep(self, now: float) -> None:
        """Remove what is on the SSD or in the arena and was nobody's at the last call already. All sessions must be known. What
        `sweep_blob` is given until the next call belongs to this sweep."""
        self._nobodys_blob = (self._nobodys_blob[1], set())
        for session in [s for s in self._index.claims if self._sessions.standing(s, now).last_use < now - CLAIM_S]:
            self._index.drop_claims(session)
        old = [key for key, sweeps in self._index.unnamed.items() if sweeps]
        for key in self._index.unnamed:
            self._index.unnamed[key] += 1
        self._count(len(old), "ssd")
        nobodys = {key for key in self._index.resident if key not in self._index.names and key not in self._index.unnamed}
        stale = [key for key in self._index.resident if key in nobodys and key in self._nobodys]
        self._count(len(stale), "dram")
        self._nobodys = nobodys.difference(stale)
        if old or stale:
            self._out.append(TellErase((*old, *stale)))
        self._remove_here(old + stale)

    def sweep_blob(self, fingerprint: bytes, keys: Sequence[bytes], named: Container[bytes] = ()) -> None:
        """Remove those that nobody names from the blob tier, where they have been for long; note that it has the others. named: chunks of
        sessions that this node does not keep in memory; it may hold others too.

        "For long" was told by comparing this node's clock with the tier's. As either may be wrong, they were nobody's at the last
        sweep already.
        """
        removed, (before, seen) = 0, self._nobodys_blob
        for key in keys:
            chunk = self._index.chunks.get(key)
            if key in self._index.names:
                if chunk is not None:
                    chunk.backed = True
            elif key in named:
                continue
            elif key not in before:
                if len(seen) < _CANDIDATES:
                    seen.add(key)
            elif chunk is None or chunk.blob is not CopyState.WAITING:
                removed += 1
                if chunk is not None:
                    self._index.set_copy(chunk, "blob", CopyState.ABSENT)
                    chunk.backed = False
                self._out.append(DeleteBlob(key, fingerprint))
        self._count(removed, "blob")

    def _count(self, number: int, tier: str) -> None:
        if number:
            self._out.append(Counted(f"orphans_removed_{tier}", number))
