"""A load: the pieces of some blocks on their way into HBM, shared between the engine and the loader's thread.

Life: opened by the engine -> `found` when the store has said what it can bring -> pieces arrive -> closed by the loader's
thread, after which it touches no page any more. Only then may the engine give the pages to somebody else.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.v1 import kvstore_pb2
from worker.core.hbm import Block
from worker.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Load:
    """blocks[i] receives `layers[i]` of the request's chunk i. `hint`: nobody waits for it; else `sequence` does."""

    load_id: int
    session: SessionKey
    blocks: list[Block]
    layers: list[list[int]]
    hint: bool = False
    sequence: Sequence | None = None
    closed: bool = False
    cancelled: bool = False


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
    """Granted blocks' bytes are in the arena (ok), or could not be copied."""

    save_id: int
    ok: list[int]
    failed: list[int]


@dataclass(slots=True)
class LoadTable:
    """Loads by id, and the condition under which the loader marks progress and the engine waits for it.

    Only the engine adds and removes; the loader's thread looks up and marks `closed`.
    """

    open: dict[int, Load] = field(default_factory=dict)
    progress: threading.Condition = field(default_factory=threading.Condition)
