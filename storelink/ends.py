"""What an engine supplies to a link (`End`), and the events it gets besides the store's messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from contracts.kv import KvShape
from contracts.v1 import kvstore_pb2


@dataclass(frozen=True, slots=True)
class ArenaHere:
    """The messages that follow refer to this arena (all of its bytes, writable)."""

    arena: memoryview
    #: The arena's file. Its lock is this attachment's for as long as any process has the descriptor.
    file: int = -1


@dataclass(frozen=True, slots=True)
class ArenaGone:
    """No more messages about this arena follow. left: call it once after the last load's copy and once after the last
    save's."""

    left: Callable[[], None]


class End(NamedTuple):
    """One model's end of a link. The link calls all three functions on its event loop, in order of arrival.

    attached: whether a store is attached, on each change. hear: every message that moves no bytes. move: ArenaHere,
    then each LoadPieces, LoadEnd and SaveGrant, then ArenaGone.
    """

    shape: KvShape
    attached: Callable[[bool], None]
    hear: Callable[[kvstore_pb2.StoreToWorker], None]
    move: Callable[[object], None]
