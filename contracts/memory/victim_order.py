"""Which cached piece leaves memory first: the one order of HBM (worker) and DRAM (store).

In this order (SYMPHONY 3.3, layer-priority eviction, and 3.4):

1. unsaved chunks (no slower tier has or will get them), whole, as they will be recomputed anyway;
2. class: dropped, unadvised, advised;
3. least urgent priority;
4. highest layer;
5. least recently used session;
6. latest chunk of its session.

Without layer priority whole chunks leave: the layer is compared last. A chunk ranks as the session that protects it
most. This module only ranks. The caller skips pinned pieces and transfers, and may add rules above the order: HBM keeps
each tenant's share (docs/design/0022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class Rank(IntEnum):
    """Classes of victims, first to leave first."""

    #: A property of a chunk, not of a session: no slower tier has it.
    UNSAVED = 0
    #: The session's advisory was invalidated or has expired; also chunks without a session.
    DROPPED = 1
    UNADVISED = 2
    ADVISED = 3


class Standing(NamedTuple):
    """A session's rank among victims; the smallest leaves first. urgency: minus the priority; last_use_s: monotonic
    seconds."""

    rank: Rank
    urgency: int
    last_use_s: float


#: A piece's rank among victims; the smallest leaves first.
VictimKey = tuple[int, int, int, float, float, float]

#: Standing of chunks without a session.
NOBODY = Standing(Rank.DROPPED, -(1 << 20), -math.inf)


def standing(priority: int | None, live: bool, last_use_s: float) -> Standing:
    """A session's standing. priority: of its last advisory; None: no advisory. live: the advisory is still valid."""
    if priority is None:
        return Standing(Rank.UNADVISED, 0, last_use_s)
    return Standing(Rank.ADVISED if live else Rank.DROPPED, -priority, last_use_s)


def strongest(standings: Iterable[Standing]) -> Standing:
    """The standing of a chunk that these sessions share: the greatest."""
    return max(standings, default=NOBODY)


def victim_key(of: Standing, *, unsaved: bool, layer: int, position: int, by_layer: bool = True) -> VictimKey:
    """A piece's rank. position: index of its chunk in the session."""
    if unsaved or not by_layer:
        return (not unsaved, of.rank, of.urgency, of.last_use_s, -position, -layer)
    return (True, of.rank, of.urgency, -layer, of.last_use_s, -position)
