"""The store's metrics: their names, labels and values in one place.

A `Counted` of the core with labels is a counter of its own (`_LABELLED`); every other is a value of `what` of
`upbeat_kvstore_events`. Gauges are read when scraped (`watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import Counter, Gauge

from kvstore.core.events import TierChannel
from runtime import telemetry

EVENTS = Counter(
    "upbeat_kvstore_events",
    "Other counts; what: the event, such as chunks_missed (wanted, found nowhere), saves_over_limit, peer_failures",
    ["what"],
    registry=telemetry.REGISTRY,
)
BYTES_READ = Counter(
    "upbeat_kvstore_read_bytes",
    "Bytes brought into the arena, source: ssd, peer, blob",
    ["source"],
    registry=telemetry.REGISTRY,
)
BYTES_WRITTEN = Counter(
    "upbeat_kvstore_written_bytes", "Bytes written behind, tier: ssd, blob", ["tier"], registry=telemetry.REGISTRY
)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"upbeat_kvstore_{name}", text, labels, registry=telemetry.REGISTRY)


_LABELLED = {
    "hit_bytes": _counter("hit_bytes", "Bytes that requests found, tier: dram, ssd, peer, blob", "tier"),
    "evicted_bytes": _counter(
        "evicted_bytes",
        "Bytes that left a tier to make room, reason: unsaved, dropped, unadvised, advised; SSD: also "
        "unnamed, only copy",
        "tier",
        "reason",
    ),
    "hint_bytes": _counter(
        "hint_bytes", "Bytes brought for hints: used, late (the request came first), wasted", "outcome"
    ),
    "checksum_failures": _counter("checksum_failures", "Pieces whose bytes were not what was written", "source"),
    "medium_errors": _counter("medium_errors", "Pieces that a device reported an error for", "source"),
    "erased_pieces": _counter(
        "erased_pieces", "Encrypted pieces whose session's key was erased, by where they were", "source"
    ),
    "locked_pieces": _counter(
        "locked_pieces", "Encrypted pieces whose session's key could not be read at the time, by source", "source"
    ),
    "missing_pieces": _counter("missing_pieces", "Pieces that were not where they were known to be", "source"),
}
_USED = Gauge(
    "upbeat_kvstore_used_bytes",
    "Bytes that a tier of this node holds, tier: dram, ssd, blob; blob: all nodes' objects, as last measured and "
    "counted since",
    ["tier"],
    registry=telemetry.REGISTRY,
)
_LIMIT = Gauge(
    "upbeat_kvstore_limit_bytes", "Bytes that a tier may hold; 0: no limit", ["tier"], registry=telemetry.REGISTRY
)
_FREE = Gauge(
    "upbeat_kvstore_disk_free_bytes",
    "Bytes that are free on a tier's disk, tier: ssd, blob; -1: it is no disk",
    ["tier"],
    registry=telemetry.REGISTRY,
)
_WAITING = Gauge(
    "upbeat_kvstore_write_back_waiting_bytes",
    "Bytes that are not durable yet in a slower tier: ssd, blob",
    ["tier"],
    registry=telemetry.REGISTRY,
)
_QUEUED = Gauge(
    "upbeat_kvstore_queued",
    "Reads that wait or run, what: ssd, peer, blob; and loads that have not ended (loads)",
    ["what"],
    registry=telemetry.REGISTRY,
)
_HELD = Gauge(
    "upbeat_kvstore_held",
    "What is held for transfers, what: reserved_slots, pinned_slots, asked_leases, lent_leases; 0 when idle",
    ["what"],
    registry=telemetry.REGISTRY,
)
HELD = ("reserved_slots", "pinned_slots", "asked_leases", "lent_leases")
_TIER_UP = Gauge(
    "upbeat_kvstore_tier_up",
    "1 while a tier is in use, 0 while it is left alone; tier: ssd_read, ssd_write, blob_read, blob_write",
    ["tier"],
    registry=telemetry.REGISTRY,
)
_COMPLETED = Gauge(
    "upbeat_kvstore_completed_timestamp_seconds",
    "Unix time at which background work last went through everything, what: sessions (their listing), expiry (of idle "
    "ones), orphans (a sweep); 0: not yet",
    ["what"],
    registry=telemetry.REGISTRY,
)
#: Its values of `what`.
COMPLETED = ("sessions", "expiry", "orphans")
QUEUES = ("ssd", "peer", "blob", "loads")
#: Events whose first occurrence is logged.
_LOGGED_ONCE = {
    "checksum_failures",
    "missing_pieces",
    "peer_failures",
    "ssd_write_failures",
    "blob_write_failures",
    "shape_mismatches",
}
#: Sources of pieces, and counts that an alert or a dashboard watches.
_SOURCES = ("ssd", "peer", "blob")
_WATCHED = ("chunks_missed", "saves_over_limit", "erasures_unfinished", "journal_failures", "peer_failures")
_RANKS = ("unsaved", "dropped", "unadvised", "advised")
telemetry.from_zero(EVENTS, *_WATCHED)
telemetry.from_zero(BYTES_READ, *_SOURCES)
telemetry.from_zero(BYTES_WRITTEN, "ssd", "blob")
telemetry.from_zero(_LABELLED["hit_bytes"], "dram", *_SOURCES)
telemetry.from_zero(_LABELLED["hint_bytes"], "used", "late", "wasted")
telemetry.from_zero(_LABELLED["evicted_bytes"], *(("dram", rank) for rank in _RANKS))
telemetry.from_zero(_LABELLED["evicted_bytes"], *(("ssd", reason) for reason in (*_RANKS[1:], "unnamed", "only copy")))
for _damage in ("checksum_failures", "medium_errors", "missing_pieces", "erased_pieces", "locked_pieces"):
    telemetry.from_zero(_LABELLED[_damage], *_SOURCES)
_seen: set[tuple[str, ...]] = set()
log = telemetry.logger("kvstore")


def count(what: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
    """Count an event; log the first of some kinds."""
    counter = _LABELLED.get(what)
    (counter.labels(*labels) if counter else EVENTS.labels(what)).inc(amount)
    if what in _LOGGED_ONCE and (what, *labels) not in _seen:
        _seen.add((what, *labels))
        log.warning("first of its kind; the metrics count how many follow", what=what, labels=list(labels))


def completed(what: str, wall_s: float) -> None:
    """Background work of COMPLETED has gone through everything, at this wall-clock time."""
    _COMPLETED.labels(what).set(wall_s)


def show_tiers(tiers: Iterable[TierChannel]) -> None:
    """Initialise every tier's gauge to 1."""
    for tier in tiers:
        _TIER_UP.labels(tier.name.lower()).set(1)
    for what in COMPLETED:
        _COMPLETED.labels(what).set(0)


def tier_changed(tier: TierChannel, up: bool, reason: str) -> None:
    """Log and show the change."""
    name = tier.name.lower()
    _TIER_UP.labels(name).set(up)
    if up:
        log.info("a tier is used again", tier=name, reason=reason)
    else:
        log.warning("a tier is left alone", tier=name, reason=reason)


def watch(
    used: Callable[[str], float],
    limit: Callable[[str], float],
    waiting: Callable[[str], float],
    free: Callable[[str], float],
    queued: Callable[[str], float],
) -> None:
    """Connect the gauges to this store. used, limit, waiting and free map a tier to bytes; queued maps a kind to a
    number. Called from another thread."""
    tiers, slow = ("dram", "ssd", "blob"), ("ssd", "blob")
    asked = (
        (_USED, used, tiers),
        (_LIMIT, limit, tiers),
        (_FREE, free, slow),
        (_WAITING, waiting, slow),
        (_QUEUED, queued, QUEUES),
    )
    for gauge, ask, labels in asked:
        for label in labels:
            gauge.labels(label).set_function(partial(ask, label))


def watch_held(held: Callable[[str], float]) -> None:
    """Like `watch`, for gauges that must be 0 while the store is idle."""
    for what in HELD:
        _HELD.labels(what).set_function(partial(held, what))
