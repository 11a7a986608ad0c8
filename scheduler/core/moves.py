"""Which hints leave their node before their request comes, and whether another node is worth it.

A hint moves when its node serves no more, or has far more to do than the best: never while that wins little (hysteresis), never back, at
most `MOVES` times, and from a node that serves only as long as its cache can still be in time. A few are looked at each time, so that
turns do not wait for it; what is left for the next time loses nothing, as a turn is placed afresh when it comes.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from scheduler.core import terms
from scheduler.core.advisories import Advisories, Pending
from scheduler.core.fleet import Fleet
from scheduler.core.snapshot import Snapshot, Turn

#: A hint leaves a node that has so much more work than the best, in typical requests, for one that has half as much less.
_MOVE_REQUESTS = 4.0
#: Hints that are looked at each time, and how soon one is looked at again, in seconds.
LOOKS, _LOOK_AGAIN_S = 32, 2.0
#: A hint moves so often at most.
MOVES = 2


def candidates(fleet: Fleet, advisories: Advisories, now: float) -> list[tuple[Pending, bool]]:
    """Hints that may move now, and whether their node is gone."""
    columns, n, request_s = fleet.columns, fleet.columns.count, fleet.request_s
    expected_s = columns.expected[:, :n].sum(axis=0) * request_s
    work = (columns.reported_s[:, :n] + columns.young_s[:, :n]).sum(axis=0) + expected_s
    able = columns.serving[:n] & ~columns.suspect(now)
    if not able.any():
        return []
    bad = ~able | (work - work[able].min() > _MOVE_REQUESTS * request_s)
    found: list[tuple[Pending, bool]] = []
    for row in np.flatnonzero(bad).tolist():
        due = (p for p in advisories.of_node(columns.names[row]) if len(p.left) < MOVES and not p.hint.pin)
        due = (p for p in due if now - p.looked_s >= _LOOK_AGAIN_S)
        found += [(p, not able[row]) for p in islice(due, LOOKS - len(found))]
    return found


def turn_of(pending: Pending, now: float, *, gone: bool) -> Turn:
    """What is placed to find out where the hint would go now; `pending`'s own weight must not be in the snapshot."""
    hint, avoid = pending.hint, frozenset((pending.node, *pending.left) if gone else pending.left)
    return Turn(hint.model, advised=True, lead_s=hint.lead_s(now), urgency=pending.urgency, avoid=avoid)


def is_worth_it(view: Snapshot, turn: Turn, pending: Pending, node: str, *, gone: bool) -> bool:
    """The hint should go to `node`."""
    if node == pending.node or node in pending.left:
        return False
    there, here = view.row(node), view.row(pending.node)
    assert there is not None and here is not None, "nodes stay known"
    if gone:
        return True
    rows = np.array([there, here])
    work = terms.work_s(view, turn, rows) + terms.arrivals_s(view, turn, rows)
    return bool(work[1] - work[0] >= _MOVE_REQUESTS / 2 * view.request_s and terms.bring_s(view)[there] <= turn.lead_s)
