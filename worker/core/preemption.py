"""Which sequence to preempt when pages run short, when to wait instead, and how much a newcomer leaves free.

A preempted sequence loses its place, not its KV: full chunks stay cached and have been written back, or are being
written. It recomputes only the tail. But pages that are still being saved are not free at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from worker.core.block import Block, SaveState
from worker.core.sequence import Sequence

#: A newcomer leaves at most 1 / this of the pool free for others to grow.
_MOST_SPARE = 8


@dataclass(frozen=True, slots=True)
class Holding:
    """Pages freed by preempting this sequence alone: now, or later, when saves under way have ended.

    Pages that the store refused count as now: the preemption offers or drops them.
    """

    sequence: Sequence
    now: int
    later: int


def holding(sequence: Sequence) -> Holding:
    """Pages that only `sequence` holds."""
    own = [block for block in sequence.blocks if block.users == 1]
    later = sum(block.bound for block in own if block.save is SaveState.WAITING)
    return Holding(sequence, sum(block.bound for block in own) - later, later)


def together(sequences: Iterable[Sequence]) -> int:
    """Pages that only these sequences hold, shared ones counted once."""
    used: Counter[Block] = Counter(block for s in sequences for block in s.blocks)
    return sum(block.bound for block, users in used.items() if block.users == users)


def victim(
    holdings: Collection[Holding], lacking: int, coming: int, beyond: Set[object] = frozenset()
) -> Sequence | None:
    """The candidate to preempt for a sequence that lacks `lacking` pages (0: a place); None: wait.

    The least urgent first, then one in `beyond` (over its tenant's share), then the latest to arrive, skipping those
    that free no page now. None if all together hold too few pages, if `coming` pages (freed when saves or loads end)
    suffice, or if the least urgent ones free nothing before they are saved.
    """
    if coming >= lacking > 0 or together(h.sequence for h in holdings) + coming < lacking:
        return None
    last = max((h.sequence.request.priority for h in holdings), default=0)
    least = [h for h in holdings if h.sequence.request.priority == last and (h.now or not lacking)]
    return max(least, key=lambda h: (h.sequence in beyond, h.sequence.arrival)).sequence if least else None


def spare_pages(others: int, layers: int, total: int) -> int:
    """Pages that a newcomer leaves free: a chunk for each of `others` to grow, so that it is not preempted at once."""
    return min(others * layers, total // _MOST_SPARE)
