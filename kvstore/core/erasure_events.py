"""What happens around erasures, as events of the core (events.py has them all)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.ids import SessionKey
from kvstore.core.tombstone import OpenErasure, Tombstone


@dataclass(frozen=True, slots=True)
class SessionErased:
    """Erase a session. number: of an erasure that is told again (Tombstone), 0 for a new one. blind: nobody here knows the session, and
    the blob tier did not say whether it does.

    expired: it was idle for too long, or its tenant has no room for it, which every node finds out by itself: nothing is noted.
    """

    session: SessionKey
    now: float
    number: int = 0
    blind: bool = False
    expired: bool = False


@dataclass(frozen=True, slots=True)
class EraseHeard:
    """The worker has acted on every TellErase up to this telling."""

    worker: str
    telling: int
    now: float


@dataclass(frozen=True, slots=True)
class ErasureSeen:
    """The blob tier has said whether it has a manifest of this erased session; one that it has was told by ManifestFetched."""

    session: SessionKey
    now: float


@dataclass(frozen=True, slots=True)
class ErasureEnded:
    """Every tier of this node has nothing of the erased session any more, and the blob tier has neither that nor lacks the tombstone."""

    session: SessionKey
    now: float


@dataclass(frozen=True, slots=True)
class ErasuresReplayed:
    """What the journal says at the start. floor: the highest number of an erasure that this node has known of."""

    open: Sequence[OpenErasure]
    floor: int
    now: float


@dataclass(frozen=True, slots=True)
class TombstonesListed:
    """Erasures that the blob tier remembers. complete: all of them."""

    tombstones: Sequence[Tombstone]
    now: float
    complete: bool = False
