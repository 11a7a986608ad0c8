"""What a device would cost a turn, term by term: arrays in seconds over the eligible ones, for policies to add up.

Each term is an estimate of time that the turn would feel there, so that they can be compared and summed without weights.
"""

from __future__ import annotations

import numpy as np

from contracts.devices import node_of
from scheduler.core.models import Floats
from scheduler.core.snapshot import Rows, Snapshot, Turn

#: How much work that is less urgent counts: it gives way, but it shares the batch until it has.
LESS_URGENT = 0.1
#: How much of a load is felt although a hint leaves time for it: enough to decide between equals.
HIDDEN = 1e-3
#: How much of the work that is there now is done when the request of a hint comes that does not say when, in seconds.
LEAD_S = 5.0
#: A session leaves its cache for a node that has so many typical requests less to do, and so much less of what the node has that it
#: leaves; not for less.
STAYS_REQUESTS, STAYS_SHARE = 4.0, 0.5
#: The same of a turn that nobody announced: where its cache is not, it is computed again more often than loaded.
UNANNOUNCED_STAYS_REQUESTS = 16.0
#: A load that a turn waits for also costs others: the way it comes by, and the device where it is computed again.
MOVING = 8.0


def work_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Outstanding work that is computed before the turn or beside it (SYMPHONY, section 3.3); a little of what is less urgent (3.6). Of a
    hint: what will be left of it when the request comes, and `HIDDEN` of all of it."""
    found = _felt(snapshot, snapshot.work_s, turn, rows)
    if not turn.advised:
        return found
    return HIDDEN * found + np.maximum(found - min(turn.lead_s, LEAD_S), 0.0)


def arrivals_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Of a hint: the work that other hints promise, each weighted with the chance that it comes; a little of what is less urgent. A turn
    that is here now counts none of it: people type for longer than it runs, and it would leave an idle node for a busy one that expects
    less."""
    if not turn.advised:
        return np.zeros(len(rows))
    return _felt(snapshot, snapshot.expected, turn, rows) * snapshot.request_s


def _felt(snapshot: Snapshot, by_class: Floats, turn: Turn, rows: Rows) -> Floats:
    weights = [1.0 if urgency <= turn.urgency else LESS_URGENT for urgency in snapshot.classes]
    found: Floats = np.dot(weights, by_class)[rows]
    return found


def load_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Time for which the turn would wait for its cache, `MOVING` times: of a hint, what its lead leaves over (and `HIDDEN` of it all); of a
    request after a hint, on the hint's node, whichever device of it, what the time since then has left over; else all of `bring_s`."""
    seconds = bring_s(snapshot)
    if (place := snapshot.beside(turn.prefetched)) is not None:
        seconds[place.rows] = np.maximum(seconds[place.rows] - turn.prefetched_s, 0.0)
    if turn.advised:
        return (HIDDEN * seconds + MOVING * np.maximum(seconds - turn.lead_s, 0.0))[rows]
    return MOVING * seconds[rows]


def leaving_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """What it takes for a session to leave its cache: `STAYS_REQUESTS` typical requests, or `STAYS_SHARE` of the work on the node that has
    most of it (on its idlest device) where that is more; for the share of it that is neither there nor on its way there for a hint. Even
    where nobody waits for a load it takes memory, links and processors from others, and small differences in work are gone before the
    turn has run (docs/design/0021). A hint's cache is on its way to all devices of its node, but into the HBM of one: it leaves that for
    `HIDDEN` of it."""
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
    requests = STAYS_REQUESTS if turn.advised or turn.prefetched else UNANNOUNCED_STAYS_REQUESTS
    worth_s: float = max(requests * snapshot.request_s, STAYS_SHARE * min(work_s(snapshot, turn, home).tolist()))
    return worth_s * missing


def _same_node(snapshot: Snapshot, rows: Rows, number: int) -> Rows:
    """Those of `rows`, which ascend, that are devices of the node of `rows[number]`."""
    place = snapshot.places[node_of(snapshot.names[rows[number]])]
    match place.rows:
        case int():
            return rows[number : number + 1]
        case slice(start=first, stop=last):
            return rows[rows.searchsorted(first) : rows.searchsorted(last)]
        case scattered:
            return rows[np.isin(rows, scattered)]


def bring_s(snapshot: Snapshot) -> Floats:
    """Time until the session's cache is in the DRAM of each device's node (all rows): from where it is, by its size and the rate of that
    way; never more than computing it again takes."""
    cached = snapshot.cached
    if not cached.bytes:
        return np.zeros(len(snapshot.names))
    ssd, blob = snapshot.ssd_bytes_per_s, snapshot.blob_bytes_per_s
    link = np.maximum(snapshot.link_bytes_per_s, blob)  # a store reads from the soonest source
    # What a peer has comes over the link, the rest from the blob tier. The peer reads from its SSD what it does not have in DRAM, while
    # the link carries what it has read.
    best = max(cached.holders, key=lambda h: (h.bytes, h.dram_bytes), default=None)
    elsewhere, read_s = (best.bytes, (best.bytes - best.dram_bytes) / float(ssd[best.place.first])) if best is not None else (0.0, 0.0)
    seconds: Floats = np.maximum(elsewhere / link, read_s)
    for h in cached.holders:
        missing = elsewhere - h.bytes
        brought_s = max(missing / float(link[h.place.first]), read_s * missing / elsewhere) if missing else 0.0
        seconds[h.place.rows] = (h.bytes - h.dram_bytes) / float(ssd[h.place.first]) + brought_s
    rest = cached.bytes - elsewhere
    if rest > 0:
        seconds += rest / blob
    return np.minimum(seconds, cached.tokens * snapshot.prefill_token_s)


def pressure_s(snapshot: Snapshot, turn: Turn, rows: Rows) -> Floats:
    """Waiting for memory: the share of what its cache needs of the model's pages that is not free now, in requests that have to end
    first."""
    need = snapshot.cached.bytes
    if not need:
        return np.zeros(len(rows))
    lacking = np.maximum(1.0 - snapshot.kv_free_bytes[rows] / need, 0.0)
    lacking[snapshot.kv_total_bytes[rows] == 0] = 0.0
    return lacking * snapshot.request_s
