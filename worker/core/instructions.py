"""Everything an engine's core asks for: plain values, no behaviour. The shell (worker/engine) executes them in their order.

A step is no instruction: `EngineCore.turn` returns it, and it runs when all instructions before it have been executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.kv import Manifest
from contracts.turn_times import Phase
from worker.core.pages import Pages
from worker.core.sequence import Sequence


# ---- loads
@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Ask the store for `layers[i]` of chunk `keys[i]`. hint: nobody waits for it.

    pages: int64 `[chunks, layers]`, where each piece goes, NO_PAGE where none is wanted; they do not change while the load is open.
    """

    load_id: int
    session: SessionKey
    keys: list[bytes]
    layers: list[list[int]]
    pages: Pages
    hint: bool
    priority: int
    source_nodes: list[str]


@dataclass(frozen=True, slots=True)
class HaltLoad:
    """Its pages are somebody else's from now on: when this is done nothing is copied into them any more. No LoadClosed follows."""

    load_id: int


@dataclass(frozen=True, slots=True)
class CloseLoad:
    """Nobody will bring its remaining pieces; LoadClosed follows."""

    load_id: int


# ---- saves
@dataclass(frozen=True, slots=True)
class OfferSave:
    """Offer full chunks to the store, and copy those that it takes; SaveCopied follows. pages: int64 `[chunks, layers]`.

    ahead: the next step completes them; their layers are copied as it computes them."""

    save_id: int
    session: SessionKey
    keys: list[bytes]
    pages: Pages
    ahead: bool


@dataclass(frozen=True, slots=True)
class WithdrawSave:
    """An offer that was not granted so far is refused."""

    save_id: int


@dataclass(frozen=True, slots=True)
class WithdrawAllSaves:
    """The same of all: their store is gone."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Tell the store which of an offer's copies hold, by index, and which do not."""

    save_id: int
    ok: list[int]
    aborted: list[int]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Tell the store what a session's cache consists of now. ended_s: when its turn ended; the manifest's own time is not set."""

    manifest: Manifest
    ended_s: float


# ---- the rest
@dataclass(frozen=True, slots=True)
class MapSlabs:
    """Back these slabs with memory."""

    slabs: list[int]


@dataclass(frozen=True, slots=True)
class UnmapSlabs:
    """Give the memory of these slabs back: no page of theirs is in use."""

    slabs: list[int]


@dataclass(frozen=True, slots=True)
class HbmHolds:
    """The answer to `events.Queried`. layer_chunks: of each layer, how many chunks are there. tokens: leading, in every layer."""

    query_id: int
    layer_chunks: list[int]
    tokens: int
    bytes_: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """A request ends with an error. full: it cannot wait here. Else its logits are no numbers, although it computed everything itself."""

    request_id: str
    full: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """From the next step on, steps hold this request only; empty: no longer."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Timed:
    """Tell the caller with the request's last output where its time went: until its first token, or since (`contracts.request.Output`)."""

    request_id: str
    times: Mapping[Phase, float]


@dataclass(frozen=True, slots=True)
class Note:
    """For the log. bad: a warning."""

    text: str
    fields: Mapping[str, object] = field(default_factory=dict)
    bad: bool = False


Instruction = (
    OpenLoad
    | HaltLoad
    | CloseLoad
    | OfferSave
    | WithdrawSave
    | WithdrawAllSaves
    | Saved
    | TurnEnded
    | MapSlabs
    | UnmapSlabs
    | HbmHolds
    | Refuse
    | Trial
    | Timed
    | Note
)


@dataclass(frozen=True, slots=True)
class Coming:
    """Layers of a block that a load is still bringing: row `row` of load `load_id`."""

    load_id: int
    row: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Step:
    """Compute the next `count` tokens of each sequence; `events.Stepped` follows. The sequences and their blocks do not change meanwhile.

    coming: by request id, what its part has to wait for before the layer is computed. expected_s: what it should take. ahead: a save was
    offered whose chunks it completes.
    """

    batch: tuple[tuple[Sequence, int], ...]
    coming: Mapping[str, list[Coming]]
    expected_s: float
    ahead: bool
