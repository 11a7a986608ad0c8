"""In which of vLLM's blocks chunks were last seen: for erasures, and to say what vLLM's own cache holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

#: Chunks that are remembered.
_MOST = 1 << 20


class KnownBlocks:
    """to_evict: blocks that vLLM's own cache must forget, because their chunks were erased."""

    def __init__(self) -> None:
        self.to_evict: set[int] = set()
        self._block_of: OrderedDict[bytes, int] = OrderedDict()

    def note(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """These chunks are in these blocks now; the longer of the two is cut."""
        for key, block in zip(keys, blocks, strict=False):
            self._block_of.pop(key, None)
            self._block_of[key] = block
        while len(self._block_of) > _MOST:
            self._block_of.popitem(last=False)

    def erase(self, keys: Iterable[bytes]) -> None:
        """Forget these chunks, and have vLLM forget their blocks."""
        self.to_evict.update(block for key in keys if (block := self._block_of.pop(key, None)) is not None)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of these chunks, from the first, vLLM was last seen to have."""
        return next((count for count, key in enumerate(keys) if key not in self._block_of), len(keys))
