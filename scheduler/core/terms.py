"""What a node would cost a turn, term by term: arrays in seconds over the eligible nodes, for policies to add up.

Each term is an estimate of time that the turn would feel there, so that they can be compared and summed without weights.
"""

from __future__ import annotations

import numpy as np

from scheduler.core.columns import Floats
from scheduler.core.snapshot import Rows, Snapshot, Turn

#: How much work that is less urgent counts: it gives way, but it shares the batch until it has.
LESS_URGENT = 0.1
#: How much of a load is felt that a hint leaves time for: enough to decide between equals.
HIDDEN = 1e-3


def work_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Outstanding work that is computed before the turn or beside it (SYMPHONY, section 3.3); a little of what is less urgent (3.6)."""
    before = snapshot.work_s[: turn.urgency + 1].sum(axis=0)
    after = snapshot.work_s[turn.urgency + 1 :].sum(axis=0)
    found: Floats = (before + LESS_URGENT * after)[rows]
    return found


def arrivals_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Work that hints promise, each weighted with the chance that it comes."""
    return snapshot.expected[rows] * snapshot.request_s


def load_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Time until the session's cache is in the node's DRAM: from where it is, by its size and the rate of that way.

    Never more than computing it again takes, where that is known; nothing on the node to which a hint has brought it; next to nothing as
    long as there is time to bring it.
    """
    cached = snapshot.cached
    if not cached.bytes:
        return np.zeros(len(rows))
    elsewhere = cached.node_bytes.max(initial=0.0)  # what a peer has comes over the link, the rest from the blob tier
    link, ssd, blob = snapshot.link_bytes_per_s, snapshot.ssd_bytes_per_s, snapshot.blob_bytes_per_s
    seconds = elsewhere / link + max(cached.bytes - elsewhere, 0.0) / blob
    at = cached.rows
    missing = np.maximum(elsewhere - cached.node_bytes, 0.0)
    seconds[at] = (cached.node_bytes - cached.dram_bytes) / ssd[at] + missing / link[at] + max(cached.bytes - elsewhere, 0.0) / blob[at]
    recompute = cached.tokens * snapshot.prefill_token_s
    seconds = np.where(recompute > 0, np.minimum(seconds, recompute), seconds)
    if (row := snapshot.row(turn.prefetched) if turn.prefetched else None) is not None:
        seconds[row] = 0.0
    found: Floats = seconds[rows] * (HIDDEN if turn.advised else 1.0)
    return found


def pressure_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Waiting for pages: the share of those it needs that are not free now, in requests that have to end first."""
    need = snapshot.cached.pages
    if not need:
        return np.zeros(len(rows))
    total, free = snapshot.pages_total[rows], snapshot.pages_free[rows]
    lacking = np.clip((need - free) / need, 0.0, 1.0)
    return np.where(total > 0, lacking, 0.0) * snapshot.request_s
