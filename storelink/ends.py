"""What a link tells the engine at its end, besides the store's own messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from contracts.kv import KvShape
from contracts.v1 import kvstore_pb2


@dataclass(frozen=True, slots=True)
class ArenaHere:
    """The messages that follow are about this arena: all of its bytes, writable."""

    arena: memoryview


@dataclass(frozen=True, slots=True)
class ArenaGone:
    """No more messages about it follow. left: told once when loads, and once when saves, copy from and to it no more."""

    left: Callable[[], None]


class End(NamedTuple):
    """One model's. All three are called on the link's event loop, in the order in which things happened.

    attached: called with whether there is a store, when that changes. hear: with every message that moves no bytes. move: with ArenaHere,
    then each LoadPieces, LoadEnd and SaveGrant, then ArenaGone.
    """

    shape: KvShape
    attached: Callable[[bool], None]
    hear: Callable[[kvstore_pb2.StoreToWorker], None]
    move: Callable[[object], None]
