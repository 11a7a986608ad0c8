"""The terms of placement. Each estimates the delay that a turn would have on each eligible device, in seconds.

A term is an array with one value per row. Terms need no weights; policies sum them (docs/design/0013-placement.md).
"""

from __future__ import annotations

import numpy as np

from contracts.devices import node_of
from contracts.placement import LEAVES_CACHE_REQUESTS, LEAVES_CACHE_UNHINTED_REQUESTS
from scheduler.core.models import Floats
from scheduler.core.snapshot import PlacementRequest, Rows, Snapshot

#: Weight of less urgent work: it gives way, but shares the batch until it has.
LESS_URGENT = 0.1
#: Weight of a load, or of work, that a hint's lead time hides: breaks ties only.
HIDDEN = 1e-3
#: The most work that is counted as done before a hint's request arrives; also for hints that give no time, in seconds.
LEAD_S = 5.0
#: A session leaves its cache only for a node that has `LEAVES_CACHE_REQUESTS` less to do, and less work by at least
#: this share of the work on its own node.
STAYS_SHARE = 0.5
#: A further copy of a model takes memory from other models, and makes them take turns: it must save so many seconds.
COPY_S = 10.0
#: Weight of a load that a turn waits for: it also takes links, memory, and the device where it is recomputed.
MOVING = 8.0


def work_s(snapshot: Snapshot, turn: PlacementRequest, rows: Rows) -> Floats:
    """Outstanding work (SYMPHONY, section 3.3); less urgent work counts `LESS_URGENT` (3.6).

    For a hint: what will be left when its request arrives, plus `HIDDEN` of the total.
    """
    found = _weighted_by_urgency(snapshot, snapshot.work_s, turn, rows)
    if not turn.advised:
        return found
    return HIDDEN * found + np.maximum(found - min(turn.lead_s, LEAD_S), 0.0)


def arrivals_s(snapshot: Snapshot, turn: PlacementRequest, rows: Rows) -> Floats:
    """For a hint: the work that other hints announce, each weighted by its probability; less urgent ones count
    `LESS_URGENT`.

    A turn that has arrived counts none: most of that work comes after it has ended, and it would leave an idle node for
    a busy one that expects less.
    """
    if not turn.advised:
        return np.zeros(len(rows))
    return _weighted_by_urgency(snapshot, snapshot.expected, turn, rows) * snapshot.request_s


def _weighted_by_urgency(snapshot: Snapshot, by_class: Floats, turn: PlacementRequest, rows: Rows) -> Floats:
    weights = [1.0 if urgency <= turn.urgency else LESS_URGENT for urgency in snapshot.classes]
    found: Floats = np.dot(weights, by_class)[rows]
    return found


def load_s(snapshot: Snapshot, turn: PlacementRequest, rows: Rows) -> Floats:
    """Time that the turn waits for its cache (`bring_s`), times `MOVING`.

    For a hint: what its lead time does not cover, plus `HIDDEN` of the total. For a request, on all devices of its
    hint's node: what is left after the time since the hint.
    """
    seconds = bring_s(snapshot)
    if (place := snapshot.beside(turn.prefetched)) is not None:
        seconds[place.rows] = np.maximum(seconds[place.rows] - turn.prefetched_s, 0.0)
    if turn.advised:
        return (HIDDEN * seconds + MOVING * np.maximum(seconds - turn.lead_s, 0.0))[rows]
    return MOVING * seconds[rows]


def activation_s(snapshot: Snapshot, turn: PlacementRequest, rows: Rows) -> Floats:
    """Time until the model's weights are on the device; and for a copy that is not the first `COPY_S`, or `STAYS_SHARE`
    of the work on the idlest device that has the model, whichever is more. For a hint: of the time what its lead does
    not cover, plus `HIDDEN` of the total."""
    seconds: Floats = snapshot.activation_s[rows]
    if turn.advised:
        seconds = HIDDEN * seconds + np.maximum(seconds - turn.lead_s, 0.0)
    here = snapshot.here[rows]
    if not here.any():
        return seconds
    copy_s: float = max(COPY_S, STAYS_SHARE * min(work_s(snapshot, turn, rows[here]).tolist()))
    found: Floats = seconds + copy_s * ~here
    return found


def leaving_s(snapshot: Snapshot, turn: PlacementRequest, rows: Rows) -> Floats:
    """The cost of leaving the session's cache, times the share of the cache that a node lacks (docs/design/0021).

    The cost is `LEAVES_CACHE_REQUESTS` typical requests (without a hint `LEAVES_CACHE_UNHINTED_REQUESTS`), or
    `STAYS_SHARE` of the work on the idlest device of the node with most of the cache, whichever is more. A cache
    that a hint is bringing counts as present. It goes into the HBM of one device; the node's others cost `HIDDEN`.
    """
    cached = snapshot.cached
    if not cached.bytes:
        return np.zeros(len(rows))
    lacking = np.ones(len(snapshot.names))
    for holder in cached.holders:
        lacking[holder.place.rows] = max(1.0 - holder.bytes / cached.bytes, 0.0)
    if (place := snapshot.beside(turn.prefetched)) is not None:
        lacking[place.rows] = HIDDEN
        lacking[snapshot.rows[turn.prefetched]] = 0.0
    missing: Floats = lacking[rows]
    home = _same_node(snapshot, rows, int(np.argmin(missing)))
    requests = LEAVES_CACHE_REQUESTS if turn.advised or turn.prefetched else LEAVES_CACHE_UNHINTED_REQUESTS
    worth_s: float = max(requests * snapshot.request_s, STAYS_SHARE * min(work_s(snapshot, turn, home).tolist()))
    return worth_s * missing


def _same_node(snapshot: Snapshot, rows: Rows, number: int) -> Rows:
    """The part of `rows` (ascending) on the same node as `rows[number]`."""
    place = snapshot.places[node_of(snapshot.names[rows[number]])]
    match place.rows:
        case int():
            return rows[number : number + 1]
        case slice(start=first, stop=last):
            return rows[rows.searchsorted(first) : rows.searchsorted(last)]
        case scattered:
            return rows[np.isin(rows, scattered)]


def bring_s(snapshot: Snapshot) -> Floats:
    """Time to bring the session's cache into the DRAM of each device's node, for all rows of the snapshot.

    From where the cache is, by size and measured rate; never more than recomputing it takes.
    """
    cached = snapshot.cached
    if not cached.bytes:
        return np.zeros(len(snapshot.names))
    ssd, blob = snapshot.ssd_bytes_per_s, snapshot.blob_bytes_per_s
    link = np.maximum(snapshot.link_bytes_per_s, blob)  # a store reads from the fastest source
    # What a peer has comes over the link, the rest from the blob tier. The peer reads from its SSD what it does not
    # have in DRAM; reading and sending overlap.
    best = max(cached.holders, key=lambda h: (h.bytes, h.dram_bytes), default=None)
    elsewhere, read_s = (
        (best.bytes, (best.bytes - best.dram_bytes) / float(ssd[best.place.first])) if best is not None else (0.0, 0.0)
    )
    seconds: Floats = np.maximum(elsewhere / link, read_s)
    for h in cached.holders:
        missing = elsewhere - h.bytes
        brought_s = max(missing / float(link[h.place.first]), read_s * missing / elsewhere) if missing else 0.0
        seconds[h.place.rows] = (h.bytes - h.dram_bytes) / float(ssd[h.place.first]) + brought_s
    rest = cached.bytes - elsewhere
    if rest > 0:
        seconds += rest / blob
    return np.minimum(seconds, cached.tokens * snapshot.prefill_token_s)


def pressure_s(snapshot: Snapshot, turn: PlacementRequest, rows: Rows) -> Floats:
    """Wait for HBM: a typical request times the share of the cache's bytes that the model's free pages cannot hold."""
    need = snapshot.cached.bytes
    if not need:
        return np.zeros(len(rows))
    lacking = np.maximum(1.0 - snapshot.kv_free_bytes[rows] / need, 0.0)
    lacking[snapshot.kv_total_bytes[rows] == 0] = 0.0
    return lacking * snapshot.request_s
