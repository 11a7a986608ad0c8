"""What is on its way into HBM and out of it, shared between the engine and the threads that copy.

A load: opened by the engine -> `found` when the store has said what it can bring -> pieces arrive -> closed by the loader's
thread, after which it touches no page any more. Only then may the engine give the pages to somebody else.

A save: offered by the engine, perhaps before its chunks are computed -> granted by the store -> copied layer by layer as a step
computes them -> SaveCopied, exactly one for each offer. The engine alone says whether what was copied is good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contracts.ids import SessionKey
from contracts.v1 import kvstore_pb2
from worker.core.hbm import Block
from worker.core.load_plan import Source
from worker.core.pages import Pages
from worker.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Load:
    """blocks[i] receives `layers[i]` of the request's chunk i. `hint`: nobody waits for it; else `sequence` does.

    pages: int64 `[blocks, layers]`, where each piece goes, NO_PAGE where none is wanted; as long as the load is open they do not change.
    upto: chunks of the sequence that can be used when all of it has come. sources: where the found chunks come from, in order.
    Times are the device clock's; the loader's thread sets `first_s` when pieces come first, `last_s` and `came` as it copies them.
    """

    load_id: int
    session: SessionKey
    blocks: list[Block]
    layers: list[list[int]]
    pages: Pages
    hint: bool = False
    sequence: Sequence | None = None
    upto: int = 0
    sources: list[Source] = field(default_factory=list)
    closed: bool = False
    cancelled: bool = False
    asked_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    came: int = 0


class StepProgress:
    """How many layers of the step that runs are computed. The engine's thread moves it, the saves' thread waits."""

    def __init__(self) -> None:
        self._computed = 0
        self._moved = threading.Condition()

    def reached(self, layers: int) -> None:
        """So many leading layers have all of this step's KV."""
        with self._moved:
            self._computed = layers
            self._moved.notify_all()

    def wait_for(self, layers: int) -> None:
        """Until that many are computed. A step always ends, so this does."""
        with self._moved:
            self._moved.wait_for(lambda: self._computed >= layers)


@dataclass(frozen=True, slots=True)
class Save:
    """Full chunks that are offered to the store: `pages` int64 `[chunks, layers]`. progress: of the step that computes them; None when
    they are computed."""

    save_id: int
    pages: Pages
    progress: StepProgress | None = None


# What reaches the loader with the store's messages, in their order.
@dataclass(frozen=True, slots=True)
class ArenaHere:
    """The messages that follow are about this arena."""

    arena: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ArenaGone:
    """No more messages about it follow. left: told once when loads, and once when saves, copy from and to it no more."""

    left: Callable[[], None]


# What reaches the engine's inbox.
@dataclass(frozen=True, slots=True)
class StoreUp:
    """The store is attached; loads and saves are possible."""


@dataclass(frozen=True, slots=True)
class StoreDown:
    """The store is gone: whatever was asked of it will not come."""


@dataclass(frozen=True, slots=True)
class FromStore:
    """A message for the engine (everything but pieces and ends of loads)."""

    message: kvstore_pb2.StoreToWorker


@dataclass(frozen=True, slots=True)
class PiecesCame:
    """Pieces of this load were copied; somebody may start."""

    load_id: int


@dataclass(frozen=True, slots=True)
class LoadClosed:
    """The loader will not touch this load's pages any more."""

    load: Load


@dataclass(frozen=True, slots=True)
class SaveCopied:
    """What became of an offer's blocks, by index: their bytes are in the arena (ok) or could not be copied there (failed); the store
    has them already (held), or will not take them now (refused)."""

    save_id: int
    ok: list[int]
    failed: list[int]
    held: list[int]
    refused: list[int]


@dataclass(slots=True)
class LoadTable:
    """Loads by id, and the condition under which the loader marks progress and the engine waits for it.

    Only the engine adds and removes; the loader's thread looks up and marks `closed`.
    """

    open: dict[int, Load] = field(default_factory=dict)
    progress: threading.Condition = field(default_factory=threading.Condition)
