"""The native engine's totals as `contract.Tallies`."""

from __future__ import annotations

from collections.abc import Mapping

from contracts.memory.victim_order import Rank
from worker.core.engine_core import EngineCore
from worker.core.sequence import Event
from worker.engine.contract import Tallies
from worker.link.kv_loader import KvLoader

#: Names of victims' ranks in metrics.
_REASONS = {Rank.UNSAVED: "unsaved", Rank.DROPPED: "dropped", Rank.UNADVISED: "unadvised", Rank.ADVISED: "advised"}
#: Error codes that are always reported, even with count 0.
_CODES = ("generation_failed", "overloaded", "invalid_value")


def tallies_of(core: EngineCore, loader: KvLoader, failed: Mapping[str, int]) -> Tallies:
    """The totals. Any thread. failed: requests by error code."""
    cache, prefetching, page = core.state.cache, core.prefetching, core.state.shape.piece_bytes
    pool, admission, again = cache.pool, core.admission, core.scheduling.recomputed_tokens
    hints = {
        "used": cache.hints_used,
        "wasted": cache.hints_wasted,
        "late": prefetching.late,
        "no_room": prefetching.no_room,
    }
    return Tallies(
        kv_bytes=pool.taken * page,
        kv_limit_bytes=pool.total * page,
        hit_bytes=cache.hits * page,
        evicted_bytes={reason: cache.purged[rank] * page for rank, reason in _REASONS.items()},
        hint_bytes={outcome: pages * page for outcome, pages in hints.items()},
        loaded_bytes={what: pages * page for what, pages in loader.loaded.items()},
        saved_bytes=loader.saved * page,
        planned_tokens={"loaded": admission.loaded_tokens, "recomputed": admission.recomputed_tokens},
        preemptions=core.scheduling.preemptions,
        recomputed_tokens={event.value: again[event] for event in (Event.PREEMPTED, Event.LOST)},
        failed={code: failed.get(code, 0) for code in _CODES},
    )
