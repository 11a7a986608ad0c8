"""Layers with a sliding window: which pages of its blocks a sequence reads.

A token of a layer with a window sees the last tokens only. So after `tokens` tokens a sequence reads no earlier page of
these layers than that of the oldest token in the window, and never will again. It has *passed* the blocks before. Their
pages of these layers need not be in HBM, and nobody loads them for it.

A sequence passes the first blocks of its list. A block that several sequences use can lose its pages of these layers
once all of them have passed it. Without layers with a window, nobody ever passes a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contracts.kv import KvShape
from contracts.memory.windows import longest_window, passed
from worker.core.block import NO_PAGE, Block


@dataclass(frozen=True, slots=True, eq=False)
class Windowed:
    """layers: bool `[layers]`, those with a window. tokens: how many tokens a token of these layers sees, itself
    included; the most, where windows differ; 0: no layer has one."""

    layers: npt.NDArray[np.bool_]
    tokens: int
    chunk_tokens: int

    @classmethod
    def of(cls, shape: KvShape) -> Windowed:
        """Of a model's KV."""
        layers = np.array([window > 0 for window in shape.windows] or [False] * shape.layers)
        return cls(layers, longest_window(shape.windows), shape.chunk_tokens)

    # ---- what a sequence has passed ----------------------------------------------------------------------------
    def passed(self, tokens: int) -> int:
        """Number of leading blocks that a sequence has passed after `tokens` tokens."""
        return passed(tokens, self.tokens, self.chunk_tokens)

    def passed_after(self, chunks: int) -> int:
        """Number of leading blocks that a sequence has passed after `chunks` full ones."""
        return self.passed(chunks * self.chunk_tokens)

    def steps(self, tokens: int, most: int) -> int:
        """Tokens to compute after `tokens` until one more block is passed, at most `most`."""
        if not self.tokens:
            return most
        return min((self.passed(tokens) + 1) * self.chunk_tokens + self.tokens - 1 - tokens, most)

    # ---- what it reads, in blocks of which it has passed the first `passed` ------------------------------------
    def of_block(self, passed: bool) -> list[int]:
        """The layers of a block that are read."""
        return np.flatnonzero(~self.layers).tolist() if passed else list(range(len(self.layers)))

    def pages(self, first: int, chunks: int, passed: int) -> int:
        """Number of pages of blocks `first` to `chunks` that are read."""
        every = (chunks - first) * len(self.layers)
        return every - (passed - first) * int(self.layers.sum()) if passed > first else every

    def gaps(self, blocks: Sequence[Block], passed: int) -> list[list[int]]:
        """For each block, the layers that are read and have no page."""
        if not blocks:
            return []
        missing = np.array([block.pages for block in blocks]) == NO_PAGE
        if passed:
            missing[:passed, self.layers] = False
        return [
            np.flatnonzero(row).tolist() if some else [] for row, some in zip(missing, missing.any(axis=1), strict=True)
        ]

    def unready(self, blocks: Sequence[Block], passed: int) -> npt.NDArray[np.bool_]:
        """bool `[blocks, layers]`, of at least one block: what is read, and not known to be filled."""
        found = ~np.array([block.ready for block in blocks])
        if passed > 0:
            found[:passed, self.layers] = False
        return found

    def whole(self, block: Block, passed: bool) -> bool:
        """Whether all of the block that is read is filled."""
        return block.complete or (passed and not self.unready([block], 1).any())

    def most_usable(self, blocks: Sequence[Block]) -> int:
        """The most leading blocks that a sequence can use as they are: all that it would read is filled."""
        if not blocks:
            return 0
        here = np.array([block.ready for block in blocks])
        whole = here[:, ~self.layers].all(axis=1)
        gaps = np.flatnonzero(~here[:, self.layers].all(axis=1))
        most = len(blocks) if whole.all() else int(np.argmin(whole))
        while most and (before := gaps[gaps < most]).size and before[-1] >= self.passed_after(most):
            most = int(before[-1])  # any number in between would read that gap as well
        return most

    def waited_for(self, block: Block, layers: list[int]) -> bool:
        """Whether a user of the block reads some of these layers."""
        return block.users > (block.passed if block.passed and self.layers[layers].all() else 0)


#: The default of a cache, which knows how many layers there are.
NO_WINDOWS = Windowed(np.zeros(0, bool), 0, 1)
