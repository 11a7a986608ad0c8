"""The values of a node's gauges, read from its parts when scraped, on another thread."""

from __future__ import annotations

from kvstore import metrics
from kvstore.host import StoreHost


def show(node: StoreHost) -> None:
    """Let this process's gauges show `node`."""
    saves, index, ledger = node.store.saves, node.store.index, node.store.ledger
    quotas, capacity = node.store.quotas, node.store.capacity

    def used(tier: str) -> float:
        return {"dram": ledger.used_bytes, "ssd": index.ssd_stored_bytes, "blob": quotas.held_bytes}[tier]

    def limit(tier: str) -> float:
        size = {"dram": ledger.arena_bytes, "ssd": capacity.limit_bytes, "blob": quotas.total_bytes}[tier]
        return 0.0 if size is None else max(1.0, float(size))

    def waiting(tier: str) -> float:
        return saves.ssd_waiting_bytes if tier == "ssd" else saves.blob_waiting_bytes

    def held(what: str) -> float:
        slots = {
            "reserved_slots": ledger.reserved_slots,
            "pinned_slots": ledger.pinned_slots,
            "lent_leases": node.leased.count,
        }
        return slots.get(what, node.store.leases.count)

    metrics.watch(used, limit, waiting, node.sizes.free_bytes, node.store.queued)
    metrics.watch_held(held)
