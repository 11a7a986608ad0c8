"""Who leaves HBM first (DESIGN section 6; SYMPHONY, section 3.4): class, least urgent priority, highest layer, least recently used session,
latest chunk. What was not saved below goes before all of them and whole, because a part of it is worth nothing.

Ranks only: nothing is freed here. One pass looks at every block, not at every page; pages are ordered only where a purge ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from worker.core.standings import Rank, Standing, Standings

if TYPE_CHECKING:
    from contracts.ids import SessionKey
    from worker.core.hbm import Block

#: (class, -priority, -layer): victims that rank under it may go.
Limit = tuple[int, int, int]


@dataclass(slots=True)
class Victims:
    """What may leave now. unsaved: blocks that go whole. pages: of the others. by_layer: off, whole chunks leave."""

    by_layer: bool
    below: Limit | None
    unsaved: list[Block] = field(default_factory=list)
    pages: int = 0
    #: By (class, -priority): (last use, -index, block).
    _groups: dict[tuple[int, int], list[tuple[float, int, Block]]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Pages that could be freed."""
        return self.pages + sum(block.held for block in self.unsaved)

    def add(self, block: Block, standing: Standing) -> None:
        """A block that may lose pages, and how it stands."""
        rank, urgency, last_use_s = standing
        first = self._first_layer((rank, urgency))
        held = block.held if not first else int((block.pages[first:] >= 0).sum())
        if held:
            self.pages += held
            self._groups.setdefault((rank, urgency), []).append((last_use_s, -block.index, block))

    def first(self, count: int) -> list[tuple[Rank, Block, list[int]]]:
        """The first `count` pages in the order above, or all: blocks with their class and the layers that go."""
        chosen: list[tuple[Rank, Block, list[int]]] = []
        for group in sorted(self._groups):
            if count <= 0:
                break
            blocks = [block for _, _, block in sorted(self._groups[group], key=lambda v: v[:2])]
            here = np.array([block.pages for block in blocks]) >= 0
            here[:, : self._first_layer(group)] = False
            top = here.shape[1] - 1
            down = here[:, ::-1]  # highest layers first
            places = np.argwhere(down.T)[:count, ::-1] if self.by_layer else np.argwhere(down)[:count]
            count -= len(places)
            going: dict[int, list[int]] = {}
            for at, depth in places.tolist():
                going.setdefault(at, []).append(top - depth)
            chosen += [(Rank(group[0]), blocks[at], layers) for at, layers in going.items()]
        return chosen

    def _first_layer(self, group: tuple[int, int]) -> int:
        """The lowest layer that may go of blocks that stand so; beyond all layers: none may."""
        if self.below is None or group < self.below[:2]:
            return 0
        return 1 - self.below[2] if group == self.below[:2] else 1 << 30


def victims(
    blocks: Iterable[Block], standings: Standings, now: float, *, by_layer: bool, hold_hinted: bool, below: Limit | None
) -> Victims:
    """Those of `blocks` that may lose pages at `now`. below: only what ranks under it; what was not saved may always go.

    hold_hinted: nothing that was brought for a live hint and is not used yet.
    """
    found = Victims(by_layer, below)
    known: dict[SessionKey, Standing] = {}
    for block in blocks:
        if not block.purgeable:
            continue
        if block.unsaved:
            found.unsaved.append(block)
            continue
        standing: Standing | None = None
        for session in block.sessions:
            its = known.get(session)
            if its is None:
                its = known[session] = standings.of(session, now)
            if standing is None or its > standing:  # the one that protects it most
                standing = its
        assert standing is not None
        if hold_hinted and standing[0] is Rank.ADVISED and block.hinted.any():
            continue
        found.add(block, standing)
    return found
