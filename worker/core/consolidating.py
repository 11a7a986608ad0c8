"""Empties partly used slabs by moving their pages, so that weights or another model get their memory.

Sequences that end leave gaps: a slab whose other pages are in use cannot be given up. Chunks of sequences that ran
together lie in the same slabs, so after a peak a few sequences hold most of its memory. Moving a slab's pages costs a
copy of at most one slab within the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from worker.core.block import NO_PAGE, Block
from worker.core.hbm import HbmCache
from worker.core.instructions import MovePages
from worker.core.pages import PagePool, Pages


def consolidate(cache: HbmCache, used: Iterable[Block], slabs: int, now: float) -> MovePages | None:
    """Empty up to so many slabs, those with the fewest pages first. Returns what to copy, before any later instruction;
    None: nothing.

    used: the sequences' blocks. Cached pages leave, those of least worth first, where the other slabs have too few free
    ones. Pages with a transfer under way do not move. Changes `Block.pages`.
    """
    pool = cache.pool
    left = pool.used - slabs
    cache.shrink(pool.taken - left * pool.pages_per_slab, now)
    if pool.used <= left:
        return None
    known = {id(block): block for block in (*cache.index.values(), *used)}
    blocks = [block for block in known.values() if block.held and not block.moving]
    if not blocks:
        return None
    pages = np.array([block.pages for block in blocks])
    at, layers = np.nonzero(pages != NO_PAGE)
    chosen = _sparsest(pool, pages[at, layers], pool.used - left)
    leaving = np.isin(pages[at, layers] // pool.pages_per_slab, chosen)
    at, layers = at[leaving], layers[leaving]
    if not chosen:
        return None
    sources = pages[at, layers]
    moved = pool.move(chosen, dict(zip(sources.tolist(), layers.tolist(), strict=True)))
    for place, layer, page in zip(at.tolist(), layers.tolist(), sources.tolist(), strict=True):
        blocks[place].pages[layer] = moved[page]
    return MovePages(sources, np.array([moved[page] for page in sources.tolist()], np.int64))


def _sparsest(pool: PagePool, movable: Pages, most: int) -> list[int]:
    """Slabs with the fewest taken pages, all of them `movable`, as many as fit into the gaps of the others."""
    size, taken = pool.pages_per_slab, pool.taken_by_slab()
    taken[pool.to_map] = 0  # no page moves to or from a slab that is not mapped yet
    of_slab = np.bincount(movable // size, minlength=len(taken))
    able = np.flatnonzero((of_slab == taken) & (taken > 0))
    room, chosen = int((size - taken[taken > 0]).sum()), list[int]()
    leaving = 0
    for slab in able[np.argsort(taken[able], kind="stable")][:most].tolist():
        leaving += int(taken[slab])
        room -= size - int(taken[slab])
        if leaving > room:
            break
        chosen.append(slab)
    return chosen
