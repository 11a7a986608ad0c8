"""Messages between a worker and its trainer, over a Unix stream socket: a length, then JSON.

A `Grant` is followed by the handles of its granules (`worker.memory.exports`).
"""

from __future__ import annotations

import json
import math
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

from worker.memory.exports import exactly

_LENGTH = struct.Struct("<I")
#: A longer message is none.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Begin:
    """To the trainer, first. job: `contracts.finetune.Job`, as a dictionary. model: its directory. digests: cache of
    weights' digests. dtype: torch's name of the type in which it computes. lanes: threads."""

    job: dict[str, Any]
    model: str
    digests: str
    dtype: str
    lanes: int


@dataclass(frozen=True, slots=True)
class Needs:
    """From the trainer: what it needs before it can train. Bytes: of the weights outside the layers, of a frozen layer
    (the largest), and of all else, in its own memory."""

    layers: int
    top_bytes: int
    layer_bytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """To the trainer: granules for a frozen layer; slot -1: for the weights outside the layers. Handles follow."""

    slot: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """To the trainer: give so many slots back, those whose layers it uses latest."""

    count: int


@dataclass(frozen=True, slots=True)
class Returned:
    """From the trainer: it no longer uses these slots, and has unmapped them."""

    slots: list[int]


@dataclass(frozen=True, slots=True)
class Wake:
    """To the trainer: look at the words."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """From the trainer, after a step of the optimizer, a validation or a checkpoint. None: not known yet. own_bytes: as
    measured so far."""

    step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    tokens: int
    checkpoints: list[int]
    own_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """From the trainer, last. how: succeeded, stopped, or failed. error: why. ours: the job or its data are at fault,
    so that it would fail anywhere."""

    how: str
    error: str = ""
    ours: bool = False


Message = Begin | Needs | Grant | Revoke | Returned | Wake | Stepped | Ended
_KINDS = {kind.__name__: kind for kind in (Begin, Needs, Grant, Revoke, Returned, Wake, Stepped, Ended)}


def send(to: socket.socket, message: Message) -> None:
    """Raises OSError; TimeoutError where the socket has a limit."""
    body = json.dumps([type(message).__name__, asdict(message)]).encode()
    to.sendall(_LENGTH.pack(len(body)) + body)


def receive(source: socket.socket) -> Message:
    """The next message. Raises OSError; ConnectionError at the end; ValueError for anything else."""
    (length,) = _LENGTH.unpack(exactly(source, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    kind, fields = json.loads(exactly(source, length))
    return _KINDS[kind](**fields)


def known(value: float) -> float | None:
    """A number for the wire; None for NaN."""
    return None if math.isnan(value) else value


def number(value: float | None) -> float:
    """A number from the wire; NaN for None."""
    return math.nan if value is None else value
