"""What a rank's side needs of vLLM's KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Blocks(Protocol):
    """vLLM's KV on this rank: one contiguous run of bytes for each block of each layer."""

    #: This rank's share of a piece, in bytes, and where it begins in the piece.
    share_bytes: int
    share_at: int
    #: Whether this rank's share is saved: of ranks that hold the same KV one does.
    saves: bool
    #: Layers that it has, by number in the model.
    layers: range

    def adopt(self, arena: memoryview) -> None:
        """The arena that follows is this; an earlier one is used no more."""

    def computed(self) -> None:
        """A forward pass has been launched: what is saved from now on is what it leaves."""

    def load(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Copy (block, offset of the piece in the arena) into blocks; returns when the forward pass may read them."""

    def save(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
        """The other way; returns when the bytes are in the arena."""
