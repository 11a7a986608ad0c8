"""Events of the core about erasures; events.py exports them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from contracts.ids import SessionKey
from kvstore.core.tombstone import OpenErasure, Tombstone


@dataclass(frozen=True, slots=True)
class SessionErased:
    """Erase a session. number: of a repeated erasure (Tombstone); 0 for a new one. blind: the session is unknown here,
    and blob did not answer.

    expired: erased because it was idle or over a quota. Every node finds that out by itself, so nothing is journaled.
    kept: chunks that sessions name that are not in memory.
    """

    session: SessionKey
    now: float
    number: int = 0
    blind: bool = False
    expired: bool = False
    kept: Container[bytes] = ()


@dataclass(frozen=True, slots=True)
class EraseHeard:
    """The worker has acted on every TellErase up to this notice."""

    worker: str
    notice: int
    now: float


@dataclass(frozen=True, slots=True)
class ErasureSeen:
    """Blob has answered whether it has a manifest of this erased session. If so, ManifestFetched came before."""

    session: SessionKey
    now: float


@dataclass(frozen=True, slots=True)
class ErasureEnded:
    """No tier of this node, nor blob, holds anything of the erased session any more, and blob has the tombstone."""

    session: SessionKey
    now: float


@dataclass(frozen=True, slots=True)
class ErasuresReplayed:
    """The journal was read at the start. floor: the highest number of an erasure that this node has known."""

    open: Sequence[OpenErasure]
    floor: int
    now: float


@dataclass(frozen=True, slots=True)
class TombstonesListed:
    """Tombstones in blob. complete: with `earlier` ones, whose events came before, these are all."""

    tombstones: Sequence[Tombstone]
    now: float
    complete: bool = False
    earlier: Sequence[Tombstone] = ()


@dataclass(frozen=True, slots=True)
class OrphansSought:
    """Start a sweep for orphans. A complete list of sessions came just before."""

    now: float


@dataclass(frozen=True, slots=True)
class OldChunksListed:
    """Chunks in blob older than the grace time; follows OrphansSought. fingerprint: at least its first half."""

    fingerprint: bytes
    keys: Sequence[bytes]
    now: float
    named: Container[bytes] = ()  #: chunks of sessions that the index does not keep; may contain others
