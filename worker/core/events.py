"""Events of an engine's core: plain values, no behaviour. Its instructions are in instructions.py.

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
    """A valid request with a unique id."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away."""

    request_id: str


# ---- from the device
@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a step.

    tokens: the next token of each sequence whose tokens are all computed. ended: answers that this token completes. The
    other sets are request ids without a next token. failed: the step raised on them; void: layers did not arrive
    (nothing was computed in either case). mute: computed, but choosing a token failed. doubtful: computed, but the
    logits were not finite.
    """

    batch: tuple[tuple[Sequence, int], ...]
    seconds: float
    tokens: Mapping[str, int] = field(default_factory=dict)
    ended: Set[str] = frozenset()
    failed: Set[str] = frozenset()
    void: Set[str] = frozenset()
    mute: Set[str] = frozenset()
    doubtful: Set[str] = frozenset()
    #: Ran in one attempt, so its time can be learned from.
    timed: bool = True
    #: Part of `seconds` spent waiting for layers.
    stalled_s: float = 0.0
    #: Number of identical steps that ran, each of `seconds`; more than one only as `EngineCore.quiet_steps` allows.
    steps: int = 1


@dataclass(frozen=True, slots=True)
class PiecesCame:
    """Pieces of a load are in their pages. chunks, layers: int64 `[n]`; chunks index the load's blocks."""

    load_id: int
    chunks: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoadClosed:
    """Nothing more is copied into this load's pages. came: number of copied pieces; first_s, last_s: when the first
    arrived and the last was copied."""

    load_id: int
    came: int
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class SaveCopied:
    """Result of an offer, by block index. ok: copied into the arena. failed: not copied. held: the store had them
    already. refused: the store does not take them now."""

    save_id: int
    ok: list[int]
    failed: list[int]
    held: list[int]
    refused: list[int]


# ---- from the store
@dataclass(frozen=True, slots=True)
class StoreUp:
    """The store is attached."""


@dataclass(frozen=True, slots=True)
class StoreDown:
    """The store is gone; pending loads and saves will not be answered."""


@dataclass(frozen=True, slots=True)
class Found:
    """The store can bring the first `chunks` of a load, from these sources, in order. due_s: the store's estimate of
    when each chunk, and all before it, will be in the arena; empty: none given."""

    load_id: int
    chunks: int
    sources: tuple[Source, ...]
    due_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Offered:
    """A hinted session's request is expected in `arrival_s` seconds, and the store can bring these chunks. The hint
    ends after `expires_s` seconds."""

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
    """Forget these sessions and these chunks."""

    sessions: Set[SessionKey]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Queried:
    """The store asks how much of these chunks is in HBM."""

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
