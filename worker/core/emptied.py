"""Which slabs of a cache to empty, so that another model gets their memory.

A slab can be emptied when all of its pages are victims (`worker.core.victims`). It ranks as the page in it that is
worth most: kept for its tenant or not, class, priority, band of layers, last use. Prism (section 5.2) frees pages that
no request uses; a cache of prefixes also has an order among them.

Only chooses; frees nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from contracts.memory.victim_order import Standing
from worker.core.block import NO_PAGE, Block
from worker.core.pages import PagePool
from worker.core.victims import Ranked


class Leaving(NamedTuple):
    """Layers of a block that leave."""

    of: Ranked
    layers: list[int]

    @property
    def block(self) -> Block:
        """The block."""
        return self.of.block


def slabs_to_empty(
    victims: Sequence[Ranked], pool: PagePool, count: int, *, by_layer: bool, under: Standing | None = None
) -> list[Leaving]:
    """The pages of at most `count` slabs, those of least worth first.

    victims: in ascending order of worth. under: only slabs all of whose pages rank under it and are not kept for their
    tenant. by_layer: of one class and priority, bands of later layers leave first. Takes time in proportion to the
    pages of `victims`.
    """
    if count <= 0 or not victims:
        return []
    pages = np.array([of.block.pages for of in victims])
    for row, of in zip(pages, victims, strict=True):
        if of.layers is not None:
            row[~of.layers] = NO_PAGE
    at, layers = np.nonzero(pages != NO_PAGE)
    slabs = pages[at, layers] // pool.pages_per_slab
    taken = pool.taken_by_slab()
    best = np.full(len(taken), -1)
    np.maximum.at(best, slabs, at)  # the place in `victims` of the page that is worth most
    able = np.flatnonzero((np.bincount(slabs, minlength=len(taken)) == taken) & (taken > 0))
    if under is not None:
        able = able[best[able] < _first_not_under(victims, under)]
    groups = np.array([(of.kept, of.standing.rank, of.standing.urgency) for of in victims], np.int64)[best[able]]
    bands = np.array([pool.band_of_slab(slab) if by_layer else 0 for slab in able.tolist()], np.int64)
    chosen = able[np.lexsort((best[able], -bands, *groups.T[::-1]))][:count]
    leaves = np.isin(slabs, chosen)
    found: dict[int, list[int]] = {}
    for place, layer in zip(at[leaves].tolist(), layers[leaves].tolist(), strict=True):
        found.setdefault(place, []).append(layer)
    return [Leaving(victims[place], going) for place, going in found.items()]


def _first_not_under(victims: Sequence[Ranked], under: Standing) -> int:
    """The place of the first victim that may not leave."""
    return next((place for place, of in enumerate(victims) if of.kept or of.standing >= under), len(victims))
