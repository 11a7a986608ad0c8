"""Loads and saves under way, shared between the engine and the copy threads.

A load: opened by the engine -> the store answers (`events.Found`) -> pieces arrive -> closed by the loader's thread,
which then no longer writes its pages. Only then may the engine reuse them.

A save: offered by the engine, perhaps before its chunks are computed -> granted by the store -> copied layer by layer
as a step computes them -> SaveCopied, exactly one per offer. The engine decides whether the copies are valid.
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
    """A load as the copy threads see it. pages: int64 `[chunks, layers]`, the target of each piece, NO_PAGE where none
    is wanted; fixed. ready: bool `[chunks, layers]`, the page holds the piece. hint: no request waits. closed: nothing
    more is copied. came: pieces copied; first_s, last_s: when the first arrived and the last was copied.

    Written by the loader's threads, read by the engine's. Times are the device clock's.
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
        """A transfer without any piece yet."""
        return cls(load_id, pages, hint, np.zeros(pages.shape, bool))


class StepProgress:
    """Number of computed layers of the running step. The engine's thread advances it, the save thread waits."""

    def __init__(self) -> None:
        self._computed = 0
        self._moved = threading.Condition()

    def reached(self, layers: int) -> None:
        """The KV of this step is written in the first `layers` layers."""
        with self._moved:
            self._computed = layers
            self._moved.notify_all()

    def wait_for(self, layers: int) -> None:
        """Block until that many layers are computed. A step always ends, so this returns."""
        with self._moved:
            self._moved.wait_for(lambda: self._computed >= layers)


@dataclass(frozen=True, slots=True)
class SaveOffer:
    """Full chunks offered to the store. pages: int64 `[chunks, layers]`. progress: of the step that computes them; None
    if they are computed."""

    save_id: int
    pages: Pages
    progress: StepProgress | None = None


# Entries of the engine's inbox other than events of the core.
@dataclass(frozen=True, slots=True)
class FromStore:
    """A message for the engine (all but pieces, ends of loads and grants)."""

    message: kvstore_pb2.StoreToWorker


class Wake:
    """Pieces of a request's load have arrived: wakes the engine."""


@dataclass(slots=True)
class LoadTable:
    """Loads by id, and the condition that the loader notifies and the engine waits on.

    Only the engine adds and removes; the loader's threads look up and set `closed`. arrived: pieces that the engine has
    not taken yet.
    """

    open: dict[int, Transfer] = field(default_factory=dict)
    arrived: collections.deque[PiecesCame] = field(default_factory=collections.deque)
    progress: threading.Condition = field(default_factory=threading.Condition)
