"""Placement policies: the cost of a turn on each eligible device, by term. The lowest sum wins.

A policy is a pure function of (snapshot, turn, rows, seed). Other distributions add policies as entry points of the
group `upbeat.placement_policies`: see docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from contracts.placement import LEAVES_CACHE_REQUESTS
from scheduler.core import terms
from scheduler.core.columns import Hashes
from scheduler.core.models import Floats
from scheduler.core.snapshot import PlacementRequest, Rows, Snapshot

#: Term to its cost on each row, in seconds or in units that compare like seconds; lower is better.
Terms = dict[str, Floats]
Policy = Callable[[Snapshot, PlacementRequest, Rows, int], Terms]

#: Constants of splitmix64's finalizer.
_30, _27, _31, _FIRST, _SECOND = map(np.uint64, (30, 27, 31, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def balanced(snapshot: Snapshot, turn: PlacementRequest, rows: Rows, seed: int) -> Terms:
    """Least outstanding work, wherever the cache is (SYMPHONY, section 3.3), if there is time to bring it and the
    difference is worth it.

    A turn without a hint also counts the time to load its cache. It goes to the node with the cache, as a sticky router
    would, unless that node has much more work.
    """
    return {
        "work_s": terms.work_s(snapshot, turn, rows),
        "arrivals_s": terms.arrivals_s(snapshot, turn, rows),
        "load_s": terms.load_s(snapshot, turn, rows),
        "leaving_s": terms.leaving_s(snapshot, turn, rows),
        "pressure_s": terms.pressure_s(snapshot, turn, rows),
        **({"activation_s": terms.activation_s(snapshot, turn, rows)} if snapshot.activation_s.any() else {}),
    }


def sticky(snapshot: Snapshot, turn: PlacementRequest, rows: Rows, seed: int) -> Terms:
    """The node with most of the cache, whatever its load (as InferCept in SYMPHONY, section 4.1); else the least
    loaded."""
    held: Floats = np.zeros(len(snapshot.names))
    for holder in snapshot.cached.holders:
        held[holder.place.rows] = holder.tokens
    # One token outweighs a quarter of an hour of work, and holders have at least a chunk.
    return {"held_tokens": -held[rows], "work_s": terms.work_s(snapshot, turn, rows) * terms.HIDDEN}


def cache_aware(snapshot: Snapshot, turn: PlacementRequest, rows: Rows, seed: int) -> Terms:
    """The node with the cache unless the fleet is out of balance, like routers that know prefixes but move no KV."""
    work = terms.work_s(snapshot, turn, rows)
    if work.max() - work.min() > LEAVES_CACHE_REQUESTS * snapshot.request_s:
        return {"work_s": work}
    return sticky(snapshot, turn, rows, seed)


def random(snapshot: Snapshot, turn: PlacementRequest, rows: Rows, seed: int) -> Terms:
    """Any node."""
    return {"drawn": np.ldexp(spread(snapshot, rows, seed ^ snapshot.decisions).astype(np.float64), -64)}


def round_robin(snapshot: Snapshot, turn: PlacementRequest, rows: Rows, seed: int) -> Terms:
    """The nodes in turn."""
    return {"turns": ((np.arange(len(rows)) - snapshot.decisions) % len(rows)).astype(np.float64)}


def spread(snapshot: Snapshot, rows: Rows, seed: int) -> Hashes:
    """An evenly distributed hash of device and seed for each row (splitmix64's finalizer)."""
    x = snapshot.hashes[rows] ^ np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> _30)) * _FIRST  # array arithmetic wraps without a warning
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


POLICIES: dict[str, Policy] = {
    "balanced": balanced,
    "sticky": sticky,
    "cache-aware": cache_aware,
    "random": random,
    "round-robin": round_robin,
}
