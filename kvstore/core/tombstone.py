"""What the blob tier remembers of an erasure."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.ids import SessionKey


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A session that was erased at `erased_s` (wall clock), and the chunks of one model that only it named."""

    session: SessionKey
    fingerprint: bytes
    keys: tuple[bytes, ...]
    erased_s: float
