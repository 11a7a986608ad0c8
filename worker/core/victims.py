"""Which pages leave HBM first, in the order of `contracts.memory.victim_order` (SYMPHONY, section
3.4): rank, least urgent priority, highest layer, least recently used session, latest chunk. Unsaved blocks leave before
all others, and whole. Pages of layers with a window (`worker.core.windowed`) stand as nobody's where all sessions have
passed the block. A block in use loses them only, and only if all sequences that use it have passed it.

Of several tenants that use their caches, each has a share of the pages by weight. Recently used blocks of a tenant
within its share leave last (docs/design/0022).

Only ranks; frees nothing. One pass looks at every block, not every page; pages are ordered only in the groups that a
purge needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from contracts.memory.victim_order import NOBODY, Rank, Standing
from worker.core.block import Block, SaveState
from worker.core.standings import Standings
from worker.core.windowed import Windowed

if TYPE_CHECKING:
    from contracts.ids import SessionKey

#: (rank, -priority, -layer): victims that rank under it may leave.
Limit = tuple[int, int, int]
#: bool `[layers]`: those of a block that may leave; None: all.
Layers = npt.NDArray[np.bool_] | None
#: How long after its last use a cache counts as in use, in seconds: a pause in a conversation.
KEPT_S = 300.0


class Ranked(NamedTuple):
    """A block that may lose pages of `layers`. kept: for its tenant; such blocks leave last. Unsaved ones stand as
    NOBODY."""

    kept: bool
    standing: Standing
    block: Block
    layers: Layers = None


@dataclass(slots=True)
class Victims:
    """Blocks that may lose pages now. unsaved: blocks that leave whole. pages: number of pages of the others. by_layer:
    off, whole chunks leave."""

    by_layer: bool
    below: Limit | None
    unsaved: list[Block] = field(default_factory=list)
    pages: int = 0
    #: (last use, -index, block, layers), by (kept for its tenant, rank, -priority).
    _groups: dict[tuple[bool, int, int], list[tuple[float, int, Block, Layers]]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of pages that could be freed."""
        return self.pages + sum(block.held for block in self.unsaved)

    def add(self, block: Block, standing: Standing, *, kept: bool, layers: Layers = None) -> None:
        """Add a block that may lose pages of `layers`. kept: whether it is kept for its tenant."""
        rank, urgency, last_use_s = standing
        first = self._first_layer((rank, urgency))
        if layers is None:
            held = block.held if not first else int((block.pages[first:] >= 0).sum())
        else:
            held = int((block.pages >= 0)[first:][layers[first:]].sum())
        if held:
            self.pages += held
            self._groups.setdefault((kept, rank, urgency), []).append((last_use_s, -block.index, block, layers))

    def first(self, count: int) -> list[tuple[Rank, Block, list[int]]]:
        """The first `count` pages in the module's order, or all: (rank, block, layers that leave)."""
        chosen: list[tuple[Rank, Block, list[int]]] = []
        for group in sorted(self._groups):
            if count <= 0:
                break
            found = sorted(self._groups[group], key=lambda v: v[:2])
            blocks = [block for _, _, block, _ in found]
            here = np.array([block.pages for block in blocks]) >= 0
            for row, (_, _, _, of) in zip(here, found, strict=True):
                if of is not None:
                    row &= of
            here[:, : self._first_layer(group[1:])] = False
            top = here.shape[1] - 1
            down = here[:, ::-1]  # highest layers first
            places = np.argwhere(down.T)[:count, ::-1] if self.by_layer else np.argwhere(down)[:count]
            count -= len(places)
            going: dict[int, list[int]] = {}
            for at, depth in places.tolist():
                going.setdefault(at, []).append(top - depth)
            chosen += [(Rank(group[1]), blocks[at], layers) for at, layers in going.items()]
        return chosen

    def ranked(self) -> list[Ranked]:
        """All of them, in ascending order of worth, without regard to layers."""
        saved = [
            Ranked(kept, Standing(Rank(rank), urgency, last_use_s), block, layers)
            for kept, rank, urgency in sorted(self._groups)
            for last_use_s, _, block, layers in sorted(self._groups[kept, rank, urgency], key=lambda v: v[:2])
        ]
        return [Ranked(False, NOBODY, block) for block in self.unsaved] + saved

    def coldest(self) -> Standing | None:
        """Standing of what leaves first, apart from layers; None: nothing may leave."""
        if self.unsaved:
            return NOBODY
        if not self._groups:
            return None
        first = min(self._groups)
        return Standing(Rank(first[1]), first[2], min(last_use_s for last_use_s, *_ in self._groups[first]))

    def _first_layer(self, group: tuple[int, int]) -> int:
        """The lowest layer that may leave in a group of (rank, -priority); larger than any layer if none may."""
        if self.below is None or group < self.below[:2]:
            return 0
        return 1 - self.below[2] if group == self.below[:2] else 1 << 30


def within_parts(
    blocks: Collection[Block], standings: Standings, now: float, pages: int, weight: Callable[[str], float]
) -> frozenset[str]:
    """Tenants that use their caches and hold at most their share of `pages`; empty if fewer than two use theirs."""
    if len({next(reversed(block.sessions)).tenant for block in blocks}) < 2:
        return frozenset()
    held: Counter[str] = Counter()
    using: set[str] = set()
    for block in blocks:
        session = next(reversed(block.sessions))
        held[session.tenant] += block.held
        if session.tenant not in using and now - standings.last_use(session) <= KEPT_S:
            using.add(session.tenant)
    if len(using) < 2:
        return frozenset()
    each = pages / sum(map(weight, using))
    return frozenset(tenant for tenant in using if held[tenant] <= each * weight(tenant))


def victims(
    blocks: Iterable[Block],
    standings: Standings,
    now: float,
    *,
    by_layer: bool,
    hold_hinted: bool,
    below: Limit | None,
    within: frozenset[str] = frozenset(),
    spare: bool = False,
    windowed: Windowed | None = None,
) -> Victims:
    """The victims among `blocks` at `now`. below: only pages that rank under it; unsaved blocks may always leave.

    hold_hinted: exclude unused pages of live hints. within: see `within_parts`. spare: exclude blocks kept for their
    tenant.
    """
    found = Victims(by_layer, below)
    windows = windowed.layers if windowed is not None and windowed.tokens else None
    known: dict[SessionKey, Standing] = {}
    for block in blocks:
        outside = windows is not None and block.outside and block.save is SaveState.BELOW and not block.moving
        if not (block.purgeable or outside):
            continue
        if block.unsaved:
            found.unsaved.append(block)
            continue
        standing: Standing | None = None
        for session in block.sessions:
            its = known.get(session)
            if its is None:
                its = known[session] = standings.of(session, now)
            if standing is None or its > standing:  # the session that protects the block most
                standing = its
        assert standing is not None
        if hold_hinted and standing[0] is Rank.ADVISED and block.hinted.any():
            continue
        layers = windows if outside else None
        if windows is not None and all(standings.passed(each) > block.index for each in block.sessions):
            found.add(block, NOBODY._replace(last_use_s=standing.last_use_s), kept=False, layers=windows)
            if outside:
                continue
            layers = ~windows
        kept = session.tenant in within and now - standing[2] <= KEPT_S
        if not (kept and spare):
            found.add(block, standing, kept=kept, layers=layers)
    return found
