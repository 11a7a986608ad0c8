"""What is on its way into HBM and out of it, shared between the engine and the threads that copy.

A load: opened by the engine -> `found` when the store has said what it can bring -> pieces arrive -> closed by the loader's
thread, after which it touches no page any more. Only then may the engine give the pages to somebody else.

A save: offered by the engine, perhaps before its chunks are computed -> granted by the store -> copied layer by layer as a step
computes them -> SaveCopied, exactly one for each offer. The engine alone says whether what was copied is good.
"""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contracts.v1 import kvstore_pb2
from worker.core.events import PiecesCame
from worker.core.pages import Pages


@dataclass(slots=True, eq=False)
class Transfer:
    """A load as the threads that copy see it. pages: int64 `[chunks, layers]`, where each piece goes, NO_PAGE where none is wanted; they do
    not change. ready: bool `[chunks, layers]`, the page holds the piece. hint: nobody waits for it. closed: nothing more is copied.

    The loader's threads write it, the engine's reads. Times are the device clock's: when pieces came first, and when the last was copied.
    """

    load_id: int
    pages: Pages
    hint: bool
    ready: npt.NDArray[np.bool_]
    closed: bool = False
    first_s: float = 0.0
    last_s: float = 0.0
    came: int = 0

    @classmethod
    def of(cls, load_id: int, pages: Pages, hint: bool) -> Transfer:
        """One of which nothing has come."""
        return cls(load_id, pages, hint, np.zeros(pages.shape, bool))


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


# What reaches the engine's inbox, beside events of the core.
@dataclass(frozen=True, slots=True)
class FromStore:
    """A message for the engine (everything but pieces and ends of loads)."""

    message: kvstore_pb2.StoreToWorker


class Wake:
    """Pieces that somebody may wait for have come."""


@dataclass(slots=True)
class LoadTable:
    """Loads by id, and the condition under which the loader marks progress and the engine waits for it.

    Only the engine adds and removes; the loader's thread looks up and marks `closed`. arrived: what has come since the engine looked.
    """

    open: dict[int, Transfer] = field(default_factory=dict)
    arrived: collections.deque[PiecesCame] = field(default_factory=collections.deque)
    progress: threading.Condition = field(default_factory=threading.Condition)
