"""The store's metrics, one place for their names. A counter's `what` is a word of core.events.Counted, or the shell's own."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from runtime import telemetry

EVENTS = Counter("upbeat_kvstore_events", "Things that happened to chunks, pieces, loads and peers", ["what"], registry=telemetry.REGISTRY)
BYTES_READ = Counter("upbeat_kvstore_read_bytes", "Bytes brought into the arena", ["source"], registry=telemetry.REGISTRY)
BYTES_WRITTEN = Counter("upbeat_kvstore_written_bytes", "Bytes written behind", ["tier"], registry=telemetry.REGISTRY)
ARENA_USED = Gauge("upbeat_kvstore_arena_used_bytes", "Arena in use", registry=telemetry.REGISTRY)
SSD_USED = Gauge("upbeat_kvstore_ssd_used_bytes", "Chunks on the SSD", registry=telemetry.REGISTRY)
WAITING = Gauge("upbeat_kvstore_write_back_waiting_bytes", "Bytes that wait for slower tiers", registry=telemetry.REGISTRY)

_LOGGED_ONCE = {"pieces_corrupt", "pieces_missing", "peer_failures", "ssd_write_failures", "blob_write_failures", "shape_mismatches"}
_seen: set[str] = set()
log = telemetry.logger("kvstore")


def count(what: str, amount: int = 1) -> None:
    """Count an event; the first of each kind that needs an operator's eye is logged."""
    EVENTS.labels(what).inc(amount)
    if what in _LOGGED_ONCE and what not in _seen:
        _seen.add(what)
        log.warning("first of its kind; see upbeat_kvstore_events for how many follow", what=what)
