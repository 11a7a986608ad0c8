"""Who goes when pages run short, who waits instead, and what a newcomer leaves free.

A preempted sequence loses its place, not its KV: full chunks stay cached and are below already, or on their way (write-back), so it
comes back with the tail to compute. That makes it cheap, but pages whose saving is still under way are not to be had at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass

from worker.core.hbm import Block, Save
from worker.core.sequence import Sequence

#: A newcomer leaves at most one page in so many of the whole pool free for the growth of others.
_MOST_SPARE = 8


@dataclass(frozen=True, slots=True)
class Holding:
    """What a sequence's pages come to if it is preempted alone: now, or only once saves that are under way have ended.

    What a store refused is had now: the preemption decides whether to offer it once more or to drop it.
    """

    sequence: Sequence
    now: int
    later: int


def holding(sequence: Sequence) -> Holding:
    """What `sequence` holds and nobody else."""
    own = [block for block in sequence.blocks if block.users == 1]
    later = sum(block.held for block in own if block.save is Save.WAITING)
    return Holding(sequence, sum(block.held for block in own) - later, later)


def together(sequences: Iterable[Sequence]) -> int:
    """Pages that nobody but these sequences holds."""
    used: Counter[Block] = Counter(block for s in sequences for block in s.blocks)
    return sum(block.held for block, users in used.items() if block.users == users)


def victim(holdings: Collection[Holding], lacking: int, coming: int, beyond: Set[object] = frozenset()) -> Sequence | None:
    """The sequence to preempt for somebody who lacks so many pages, of those that may be; None: wait.

    The least urgent, then one that is `beyond` its tenant's share, then the youngest; among equally urgent ones those that free nothing
    at once are passed over. Nobody when all of them together hold too little, when pages that come by themselves (`coming`: left behind,
    saves or reads under way) suffice, or when the least urgent ones free nothing until they are saved.
    """
    if coming >= lacking > 0 or together(h.sequence for h in holdings) + coming < lacking:
        return None
    last = max((h.sequence.request.priority for h in holdings), default=0)
    least = [h for h in holdings if h.sequence.request.priority == last and (h.now or not lacking)]
    return max(least, key=lambda h: (h.sequence in beyond, h.sequence.arrival)).sequence if least else None


def spare_pages(others: int, layers: int, total: int) -> int:
    """What a newcomer leaves free beside so many others: a chunk for each to grow by, so that it is not preempted at once."""
    return min(others * layers, total // _MOST_SPARE)
