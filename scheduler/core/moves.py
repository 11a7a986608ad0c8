"""Decides which hints move to another device before their request arrives.

A hint moves when its device stops serving or has far more work than the best. It needs a minimum saving (hysteresis),
never moves back, moves at most `advisories.MOVES` times, and leaves a serving device only if its cache can still be in
time. Each call examines only `LOOKS` hints, so that turns do not wait. Hints left out lose little: their turns are
placed again.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from contracts.placement import LEAVES_CACHE_REQUESTS
from scheduler.core import terms
from scheduler.core.advisories import Advisories, Pending
from scheduler.core.fleet import Fleet
from scheduler.core.snapshot import PlacementRequest, Snapshot

#: Hints examined per call, and the time before one is examined again, in seconds.
LOOKS, _LOOK_AGAIN_S = 32, 2.0


def candidates(fleet: Fleet, advisories: Advisories, now: float) -> list[tuple[Pending, bool]]:
    """Hints to examine now, each with whether its device has stopped serving."""
    columns, n, request_s = fleet.columns, fleet.columns.count, fleet.request_s
    expected_s = columns.expected[:, :n].sum(axis=0) * request_s
    work = (columns.reported_s[:, :n] + columns.unconfirmed_s[:, :n]).sum(axis=0) + expected_s
    able = columns.serving[:n] & ~columns.suspect(now)
    if not able.any():
        return []
    bad = ~able | (work - work[able].min() > LEAVES_CACHE_REQUESTS * request_s)
    found: list[tuple[Pending, bool]] = []
    for row in np.flatnonzero(bad).tolist():
        due = (p for p in advisories.movable(columns.names[row]) if now - p.looked_s >= _LOOK_AGAIN_S)
        found += [(p, not able[row]) for p in islice(due, LOOKS - len(found))]
    return found


def turn_of(pending: Pending, now: float, *, gone: bool) -> PlacementRequest:
    """The placement request for a hint that may move. The snapshot must not include the hint itself."""
    hint, avoid = pending.hint, frozenset((pending.node, *pending.left) if gone else pending.left)
    return PlacementRequest(hint.model, advised=True, lead_s=hint.lead_s(now), urgency=pending.urgency, avoid=avoid)


def is_worth_it(view: Snapshot, turn: PlacementRequest, pending: Pending, node: str, *, gone: bool) -> bool:
    """Whether the hint should move to `node`."""
    if node == pending.node or node in pending.left:
        return False
    there, here = view.row(node), view.row(pending.node)
    assert there is not None and here is not None, "devices stay known"
    if gone:
        return True
    rows = np.array([there, here])
    work = terms.work_s(view, turn, rows) + terms.arrivals_s(view, turn, rows)
    return bool(
        work[1] - work[0] >= LEAVES_CACHE_REQUESTS / 2 * view.request_s and terms.bring_s(view)[there] <= turn.lead_s
    )
