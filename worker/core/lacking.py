"""How many pages a request lacks, told without using a block: one that waits for memory is looked at in every turn."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.block import Reach
from worker.core.hbm import HbmCache

#: What `HbmCache.obtainable` counts of blocks.
_OBTAINABLE = (Reach.NOW, Reach.LATER)


def lacking(cache: HbmCache, keys: Iterable[bytes], chunks: int) -> int:
    """Pages beyond the obtainable ones that a sequence of `chunks` chunks needs, whose leading chunks have these keys;
    negative: so many are left. For models without windows."""
    every, matched, pages, own = cache.pool.layers, 0, 0, 0
    for key in keys:
        if (block := cache.index.get(key)) is None:
            break
        matched += 1
        pages += every - block.held
        reach, reclaimable = block.counted
        own += reclaimable if reach in _OBTAINABLE else 0  # it would be in use
    return pages + (chunks - matched) * every - (cache.obtainable - own)
