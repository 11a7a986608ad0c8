"""Everything an engine's core is told: plain values, no behaviour. What it asks for in return is in instructions.py.

Times are monotonic seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contracts.ids import SessionKey
from storelink.core.load_plan import Source
from worker.core.sequence import Sequence


# ---- from clients
@dataclass(frozen=True, slots=True)
class Submitted:
    """A valid request, whose id no other has."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away."""

    request_id: str


# ---- from the device
@dataclass(frozen=True, slots=True)
class Stepped:
    """The step that was asked for has run.

    tokens: the next token of each sequence that was computed to its end and can go on. ended: those whose answer is complete with it.
    failed: those on which the step raised: nothing of them was computed. void: the same, as layers did not come. mute: computed, but no
    next token could be chosen. doubtful: the same, as their logits are no numbers.
    """

    batch: tuple[tuple[Sequence, int], ...]
    seconds: float
    tokens: Mapping[str, int] = field(default_factory=dict)
    ended: Set[str] = frozenset()
    failed: Set[str] = frozenset()
    void: Set[str] = frozenset()
    mute: Set[str] = frozenset()
    doubtful: Set[str] = frozenset()
    #: It ran in one piece: its time says how fast this worker is.
    telling: bool = True
    #: Of `seconds`: the wait for layers that were still coming.
    stalled_s: float = 0.0
    #: So many equal ones have run, each of `seconds`; more than one only as far as `EngineCore.quiet_steps` allows.
    steps: int = 1


@dataclass(frozen=True, slots=True)
class PiecesCame:
    """These pieces of a load are in their pages: int64 `[n]`, blocks of the load and layers."""

    load_id: int
    chunks: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoadClosed:
    """Nothing more is copied into this load's pages. came: pieces that were; when pieces came first, and when the last was copied."""

    load_id: int
    came: int
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class SaveCopied:
    """What became of an offer's blocks, by index: their bytes are in the arena (ok) or could not be copied there (failed); the store
    has them already (held), or will not take them now (refused)."""

    save_id: int
    ok: list[int]
    failed: list[int]
    held: list[int]
    refused: list[int]


# ---- from the store
@dataclass(frozen=True, slots=True)
class StoreUp:
    """The store is attached; loads and saves are possible."""


@dataclass(frozen=True, slots=True)
class StoreDown:
    """The store is gone: whatever was asked of it will not come."""


@dataclass(frozen=True, slots=True)
class Found:
    """The store can bring the first `chunks` of what a load asked for, from these sources, in order. due_s: when each of them, and all
    before it, will be in the arena, as the store reckons; empty: it did not say."""

    load_id: int
    chunks: int
    sources: tuple[Source, ...]
    due_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Offered:
    """A session is about to speak, in `arrival_s` seconds, and the store can bring these chunks of it. The hint ends after `expires_s`."""

    session: SessionKey
    keys: tuple[bytes, ...]
    priority: int
    arrival_s: float
    expires_s: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The session's hint is void."""

    session: SessionKey


@dataclass(frozen=True, slots=True)
class Erased:
    """These sessions, and these chunks, are to be forgotten."""

    sessions: Set[SessionKey]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Queried:
    """The store wants to know how much of these chunks is in HBM."""

    query_id: int
    keys: tuple[bytes, ...]


Event = (
    Submitted
    | Cancelled
    | Stepped
    | PiecesCame
    | LoadClosed
    | SaveCopied
    | StoreUp
    | StoreDown
    | Found
    | Offered
    | Withdrawn
    | Erased
    | Queried
)
