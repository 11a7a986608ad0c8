"""The record of an erasure, in the journal of each node that was told of it and in blob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.ids import SessionKey


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The session's lives before `number` have ended (graves.py). chunks: key -> fingerprint, of chunks that no other
    session named."""

    session: SessionKey
    number: int
    chunks: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenErasure:
    """An erasure that a tier of this node has not confirmed. blind: the session's manifest could not be read yet."""

    tombstone: Tombstone
    blind: bool = False
