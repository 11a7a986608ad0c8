"""Instructions of an engine's core: plain values, no behaviour. The shell (worker/engine) executes them in order.

A step is not an instruction: `EngineCore.turn` returns it, and it runs after all earlier instructions.
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
    """Ask the store for `layers[i]` of chunk `keys[i]`. hint: for a hint; no request waits.

    pages: int64 `[chunks, layers]`, the target of each piece, NO_PAGE where none is wanted; fixed while the load is
    open.
    """

    load_id: int
    session: SessionKey
    keys: list[bytes]
    layers: list[list[int]]
    pages: Pages
    hint: bool
    priority: int
    source_nodes: list[str]
    #: The request that waits.
    request_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class HaltLoad:
    """Abort the load: afterwards nothing is copied into its pages, which may be reused. No LoadClosed follows."""

    load_id: int


@dataclass(frozen=True, slots=True)
class CloseLoad:
    """End the load: its remaining pieces will not arrive. LoadClosed follows."""

    load_id: int


# ---- saves
@dataclass(frozen=True, slots=True)
class OfferSave:
    """Offer full chunks to the store and copy those it takes; SaveCopied follows. pages: int64 `[chunks, layers]`.

    ahead: the next step completes the chunks; each layer is copied when computed.
    """

    save_id: int
    session: SessionKey
    keys: list[bytes]
    pages: Pages
    ahead: bool
    #: The request that computed them.
    request_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class WithdrawSave:
    """Withdraw an offer that was not granted yet; it then counts as refused."""

    save_id: int


@dataclass(frozen=True, slots=True)
class WithdrawAllSaves:
    """Withdraw all offers: the store is gone."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Tell the store which of an offer's copies are valid (ok), by index, and which are not (aborted)."""

    save_id: int
    ok: list[int]
    aborted: list[int]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Send a session's manifest to the store. ended_s: when its turn ended; the manifest's own time is not set."""

    manifest: Manifest
    ended_s: float


# ---- the rest
@dataclass(frozen=True, slots=True)
class MovePages:
    """Copy pages within the device's memory, before the pages or slabs of `sources` are used again. Both int64 `[n]`;
    no page is in both."""

    sources: Pages
    targets: Pages


@dataclass(frozen=True, slots=True)
class MapSlabs:
    """Back these slabs with memory."""

    slabs: list[int]


@dataclass(frozen=True, slots=True)
class UnmapSlabs:
    """Release the memory of these slabs, none of whose pages is in use."""

    slabs: list[int]


@dataclass(frozen=True, slots=True)
class HbmHolds:
    """The answer to `events.Queried`. layer_chunks: number of chunks present, by layer. tokens: leading tokens present
    in every layer."""

    query_id: int
    layer_chunks: list[int]
    tokens: int
    bytes_: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a request with an error. full: the queue is full; otherwise its logits were not finite after recomputing all
    KV."""

    request_id: str
    full: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """From the next step on, steps hold only this request; empty: the trial is over."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Timed:
    """Attach to the request's last output where its time went: until the first token, or since then
    (`contracts.request.Output`)."""

    request_id: str
    times: Mapping[Phase, float]


@dataclass(frozen=True, slots=True)
class Note:
    """A log line. bad: log as a warning."""

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
    | MovePages
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
    """Layers of a block that are still being loaded, as row `row` of load `load_id`."""

    load_id: int
    row: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Step:
    """Compute the next `count` tokens of each (sequence, count); `events.Stepped` follows. Sequences and blocks do not
    change meanwhile.

    coming: by request id, layers to wait for before they are computed. expected_s: estimated time. ahead: an offered
    save waits for chunks that this step completes.
    """

    batch: tuple[tuple[Sequence, int], ...]
    coming: Mapping[str, list[Coming]]
    expected_s: float
    ahead: bool
