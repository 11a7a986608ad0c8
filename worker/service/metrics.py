"""The worker's metrics: read off the engine when they are asked for, so that nothing is counted twice.

Names and labels are those of the stores' metrics where both count the same thing; bytes, not pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.models import ModelState
from worker.core.sequence import Event
from worker.core.standings import Rank
from worker.engine.engine import Engine

_REASONS = {Rank.LOST_CAUSE: "unsaved", Rank.WITHDRAWN: "dropped", Rank.UNADVISED: "unadvised", Rank.ADVISED: "advised"}


class WorkerMetrics(Collector):
    """Samples of one engine. Collected on other threads: each figure is one read of one integer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        engine = self._engine
        cache, loader, prefetching = engine.device.cache, engine.device.loader, engine.core.prefetching
        page = engine.device.shape.piece_bytes
        state = GaugeMetricFamily(
            "upbeat_worker_model_state", "What a model is doing here: 1 cold, 2 loading, 3 active, 4 draining", labels=["model"]
        )
        state.add_metric([engine.model_name], ModelState.ACTIVE)
        yield state

        def by(family: Metric, amounts: dict[tuple[str, ...], int]) -> Metric:
            for labels, pages in amounts.items():
                family.add_metric(labels, pages * page)  # type: ignore[attr-defined]
            return family

        yield by(
            GaugeMetricFamily("upbeat_worker_used_bytes", "Bytes that a tier of this worker holds", labels=["tier"]),
            {("hbm",): cache.pool.total - cache.pool.free},
        )
        yield by(
            CounterMetricFamily("upbeat_worker_hit_bytes", "Bytes that requests found where they are used", labels=["tier"]),
            {("hbm",): cache.hits},
        )
        yield by(
            CounterMetricFamily(
                "upbeat_worker_evicted_bytes", "Bytes that left a tier to make room, by the reason that they ranked first",
                labels=["tier", "reason"],
            ),
            {("hbm", name): cache.purged[rank] for rank, name in _REASONS.items()},
        )  # fmt: skip
        yield by(
            CounterMetricFamily(
                "upbeat_worker_hint_bytes",
                "Bytes taken into HBM for hints: used, wasted; and not taken before the request came: late, no_room",
                labels=["outcome"],
            ),
            {
                ("used",): cache.hints_used,
                ("wasted",): cache.hints_wasted,
                ("late",): prefetching.late,
                ("no_room",): prefetching.no_room,
            },
        )
        yield by(
            CounterMetricFamily("upbeat_worker_loaded_bytes", "Bytes copied from DRAM to HBM, for a demand or a hint", labels=["for"]),
            {(what,): pages for what, pages in loader.loaded.items()},
        )
        yield by(CounterMetricFamily("upbeat_worker_saved_bytes", "Bytes copied from HBM to DRAM", labels=[]), {(): loader.saved})
        planned = CounterMetricFamily(
            "upbeat_worker_planned_tokens", "Cached tokens that were loaded, or computed again because that is sooner", labels=["choice"]
        )
        planned.add_metric(["loaded"], engine.core.admission.loaded_tokens)
        planned.add_metric(["recomputed"], engine.core.admission.recomputed_tokens)
        yield planned
        failed = CounterMetricFamily("upbeat_worker_failed_requests", "Requests that failed after they were accepted", labels=["code"])
        for code in ("generation_failed", "overloaded", "invalid_value"):
            failed.add_metric([code], engine.failed[code])
        yield failed
        scheduling = engine.core.scheduling
        yield CounterMetricFamily(
            "upbeat_worker_preemptions", "Sequences that gave their place and pages to others", scheduling.preemptions
        )
        again = CounterMetricFamily(
            "upbeat_worker_recomputed_tokens", "Tokens that were computed again, by what had taken their sequence off the device",
            labels=["after"],
        )  # fmt: skip
        for event in (Event.PREEMPTED, Event.LOST):
            again.add_metric([event.value], scheduling.recomputed_tokens[event])
        yield again
