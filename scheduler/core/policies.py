"""Placement policies: each says what every eligible node costs a turn, by term; the least sum wins.

A policy is a pure function of (snapshot, turn, rows, seed). Others are added as entry points of the group `upbeat.placement_policies`, by
name: see docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scheduler.core import terms
from scheduler.core.columns import Hashes
from scheduler.core.models import Floats
from scheduler.core.snapshot import Rows, Snapshot, Turn

#: By name of the term: what it costs on each of the rows, in seconds or what counts as such; lower is better.
Terms = dict[str, Floats]
Policy = Callable[[Snapshot, Turn, Rows, int], Terms]

#: The numbers of splitmix64's finalizer.
_30, _27, _31, _FIRST, _SECOND = map(np.uint64, (30, 27, 31, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: `cache-aware` forgets the cache where a node has so much more work than the idlest, in typical requests.
_IMBALANCE_REQUESTS = 4.0


def balanced(snapshot: Snapshot, turn: Turn, rows: Rows, seed: int) -> Terms:
    """Fewest outstanding work wherever the cache happens to be (SYMPHONY, section 3.3), as long as there is time to bring it and the
    difference is worth it.

    A turn that nobody announced also counts the time to load its cache, and goes to the node that has it, as a sticky router would, unless
    there is much more to do than elsewhere.
    """
    return {
        "work_s": terms.work_s(snapshot, turn, rows),
        "arrivals_s": terms.arrivals_s(snapshot, turn, rows),
        "load_s": terms.load_s(snapshot, turn, rows),
        "leaving_s": terms.leaving_s(snapshot, turn, rows),
        "pressure_s": terms.pressure_s(snapshot, turn, rows),
    }


def sticky(snapshot: Snapshot, turn: Turn, rows: Rows, seed: int) -> Terms:
    """The node that has most of the cache, whatever its load (as InferCept is used in SYMPHONY, section 4.1); else the least loaded."""
    held: Floats = np.zeros(len(snapshot.names))
    for holder in snapshot.cached.holders:
        held[holder.place.rows] = holder.tokens
    # A token held outweighs a quarter of an hour of work, and nothing holds less than a chunk of them.
    return {"held_tokens": -held[rows], "work_s": terms.work_s(snapshot, turn, rows) * terms.HIDDEN}


def cache_aware(snapshot: Snapshot, turn: Turn, rows: Rows, seed: int) -> Terms:
    """The node that has the cache, unless the fleet is out of balance, as routers do that know prefixes but cannot move them."""
    work = terms.work_s(snapshot, turn, rows)
    if work.max() - work.min() > _IMBALANCE_REQUESTS * snapshot.request_s:
        return {"work_s": work}
    return sticky(snapshot, turn, rows, seed)


def random(snapshot: Snapshot, turn: Turn, rows: Rows, seed: int) -> Terms:
    """Any node."""
    return {"drawn": np.ldexp(spread(snapshot, rows, seed ^ snapshot.decisions).astype(np.float64), -64)}


def round_robin(snapshot: Snapshot, turn: Turn, rows: Rows, seed: int) -> Terms:
    """One after the other."""
    return {"turns": ((np.arange(len(rows)) - snapshot.decisions) % len(rows)).astype(np.float64)}


def spread(snapshot: Snapshot, rows: Rows, seed: int) -> Hashes:
    """A number for each row that depends on node and seed only and is spread evenly (the finalizer of splitmix64)."""
    x = snapshot.hashes[rows] ^ np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> _30)) * _FIRST  # arrays wrap around without a warning
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


POLICIES: dict[str, Policy] = {
    "balanced": balanced,
    "sticky": sticky,
    "cache-aware": cache_aware,
    "random": random,
    "round-robin": round_robin,
}
