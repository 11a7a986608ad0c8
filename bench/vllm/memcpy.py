"""The pace at which this machine copies KV from an arena into a server's blocks: numpy, a layer at a time, a piece at a
time, as the connector does (vllm-plugin, torch_blocks.py)."""

from __future__ import annotations

import time

import numpy as np

#: The source is so many times the copied bytes, and each copy reads another part, so that no cache holds it.
_PARTS = 4


class Copier:
    """Copies `layers` x `chunks` pieces. Its memory is touched beforehand."""

    def __init__(self, layers: int, chunks: int, piece_bytes: int) -> None:
        self.bytes = layers * chunks * piece_bytes
        self._arena = np.ones((_PARTS, layers, chunks, piece_bytes), dtype=np.uint8)
        self._blocks = np.ones((_PARTS, layers, chunks, piece_bytes), dtype=np.uint8)
        self._next = 0

    def seconds(self) -> float:
        """Seconds of one copy."""
        part, self._next = self._next, (self._next + 1) % _PARTS
        began_s = time.perf_counter()
        for into, out_of in zip(self._blocks[part], self._arena[part], strict=True):
            for block, piece in zip(into, out_of, strict=True):
                np.copyto(block, piece)
        return time.perf_counter() - began_s
