"""The record of one chunk, and its size on the SSD.

A node may know millions of chunks, so a record is small: checksums of slower copies are packed, and shared when equal;
those of a file that was only listed stay in its header; a chunk without pieces in the arena has no lists of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from contracts.kv import KvShape
from kvstore.core.state import CopyState, PieceState

#: The lists of a chunk without pieces in the arena. Shared: never mutated, only replaced.
NO_STATES: list[PieceState] = []
NO_NUMBERS: list[int] = []
#: In place of a checksum that the header of the SSD's file has.
UNREAD = -1
#: Files begin with a header of at least one block, and their pieces are aligned to blocks.
_BLOCK, _HEADER_FIXED, _HEADER_A_LAYER = 4096, 256, 20


def stored_bytes(shape: KvShape) -> int:
    """A chunk's maximum size on the SSD: header and aligned pieces, raw."""
    header = -(-(_HEADER_FIXED + _HEADER_A_LAYER * shape.layers) // _BLOCK)
    return (header + shape.layers * -(-shape.piece_bytes // _BLOCK)) * _BLOCK


def _pack(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def _unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


class Chunk:
    """Where one chunk is. `states`, `offsets` and `sums` are by layer, and empty while no piece is in the arena.

    saved_here: a worker of this node wrote it, so this node owes the slower tiers a copy.
    doomed: it was erased, and is deleted as soon as nothing uses it.
    leaving: it is being written to blob from the arena; its pieces stay until that has ended.
    backed: not 0: blob has it, by a write or the listing of that number; `blob` is PRESENT only once its header was
    read or written here.
    encoded_bytes: length of the SSD's file when a codec made it; 0: it is raw, or there is none.
    """

    __slots__ = (
        "_blob_sums",
        "_ssd_sums",
        "backed",
        "blob",
        "doomed",
        "encoded_bytes",
        "key",
        "leaving",
        "offsets",
        "position",
        "ready",
        "saved_here",
        "shape",
        "ssd",
        "states",
        "sums",
    )

    def __init__(self, key: bytes, shape: KvShape) -> None:
        self.key = key
        self.shape = shape
        self.position = 0
        self.states = NO_STATES
        self.offsets = NO_NUMBERS
        self.sums = NO_NUMBERS
        self.ready = 0
        self.ssd = CopyState.ABSENT
        self.blob = CopyState.ABSENT
        self._ssd_sums = b""
        self._blob_sums = b""
        self.saved_here = False
        self.doomed = False
        self.backed = 0
        self.leaving = False
        self.encoded_bytes = 0

    @property
    def ssd_stored_bytes(self) -> int:
        """The size of its file on the SSD, or the maximum while it is being written."""
        return self.encoded_bytes or stored_bytes(self.shape)

    @property
    def ssd_sums(self) -> tuple[int, ...]:
        """Checksums of the SSD's copy, one a layer; empty when there is none, or its header was not read."""
        return _unpack(self._ssd_sums)

    @property
    def ssd_expected(self) -> tuple[int, ...]:
        """What a read of the SSD's copy is verified with, one a layer: its checksums, or UNREAD."""
        return _unpack(self._ssd_sums) if self._ssd_sums else (UNREAD,) * self.shape.layers

    @property
    def blob_sums(self) -> tuple[int, ...]:
        """Checksums of the blob tier's copy, one a layer; empty when none is known."""
        return _unpack(self._blob_sums)

    def set_sums(self, tier: str, sums: Sequence[int]) -> None:
        """Set the checksums of the copy in "ssd" or "blob". Equal ones of both copies are shared."""
        packed = _pack(sums)
        other = self._blob_sums if tier == "ssd" else self._ssd_sums
        packed = other if packed == other else packed
        if tier == "ssd":
            self._ssd_sums = packed
        else:
            self._blob_sums = packed

    def state(self, layer: int) -> PieceState:
        """The state of the layer's piece."""
        return self.states[layer] if self.states else PieceState.ABSENT

    @property
    def complete(self) -> bool:
        """Whether every layer is READY."""
        return self.ready == self.shape.layers

    def has(self, layers: Sequence[int]) -> bool:
        """Whether these layers are READY; all of them, if `layers` is empty."""
        return self.complete or (bool(layers) and all(self.state(layer) is PieceState.READY for layer in layers))

    @property
    def held_here(self) -> bool:
        """Whether all of it can be read from this node's arena or SSD."""
        return self.complete or self.ssd is CopyState.PRESENT

    @property
    def idle(self) -> bool:
        """Whether every piece is ABSENT."""
        return not self.states
