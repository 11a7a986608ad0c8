"""What is remembered of an erasure, in the journal of each node that was told of it and in the blob tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.ids import SessionKey


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The session's lives before `number` are over (graves.py). chunks: key -> fingerprint of those that only it named."""

    session: SessionKey
    number: int
    chunks: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenErasure:
    """An erasure that some tier of this node has not confirmed. blind: what the session held could not be read yet."""

    tombstone: Tombstone
    blind: bool = False
