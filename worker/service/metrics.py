"""The worker's metrics: read off the engine when they are asked for, so that nothing is counted twice.

Names and labels are those of the stores' metrics where both count the same thing; bytes, not pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.models import ModelState
from worker.core.sequence import Event
from worker.core.standings import Rank
from worker.engine.engine import Engine

_REASONS = {Rank.LOST_CAUSE: "unsaved", Rank.WITHDRAWN: "dropped", Rank.UNADVISED: "unadvised", Rank.ADVISED: "advised"}


class WorkerMetrics(Collector):
    """Samples of a worker's engines: sums over its models, and by model what each is doing and holds. Collected on other threads: each
    figure is one read of one integer."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._by_model()
        yield from self._memory()
        yield from self._requests()

    def _by_model(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "upbeat_worker_model_state", "What a model is doing here: 1 cold, 2 loading, 3 active, 4 draining", labels=["model"]
        )
        used = GaugeMetricFamily("upbeat_worker_model_kv_bytes", "Bytes of HBM that a model's KV holds", labels=["model"])
        limit = GaugeMetricFamily("upbeat_worker_model_kv_limit_bytes", "Bytes of HBM that a model's KV may hold", labels=["model"])
        for engine in self._engines:
            pool, page = engine.device.cache.pool, engine.device.shape.piece_bytes
            state.add_metric([engine.model_name], ModelState.ACTIVE)
            used.add_metric([engine.model_name], (pool.total - pool.free) * page)
            limit.add_metric([engine.model_name], pool.total * page)
        yield from (state, used, limit)

    def _bytes(self, family: Metric, labels: tuple[str, ...], pages: Callable[[Engine], int]) -> None:
        """Add a sample: pages of all engines, in bytes."""
        family.add_metric(labels, sum(pages(engine) * engine.device.shape.piece_bytes for engine in self._engines))  # type: ignore[attr-defined]

    def _memory(self) -> Iterator[Metric]:
        used = GaugeMetricFamily("upbeat_worker_used_bytes", "Bytes that a tier of this worker holds", labels=["tier"])
        self._bytes(used, ("hbm",), lambda e: e.device.cache.pool.total - e.device.cache.pool.free)
        hit = CounterMetricFamily("upbeat_worker_hit_bytes", "Bytes that requests found where they are used", labels=["tier"])
        self._bytes(hit, ("hbm",), lambda e: e.device.cache.hits)
        evicted = CounterMetricFamily(
            "upbeat_worker_evicted_bytes", "Bytes that left a tier to make room, by the reason that they ranked first",
            labels=["tier", "reason"],
        )  # fmt: skip
        for rank, name in _REASONS.items():
            self._bytes(evicted, ("hbm", name), lambda e, rank=rank: e.device.cache.purged[rank])  # type: ignore[misc]
        hints = CounterMetricFamily(
            "upbeat_worker_hint_bytes",
            "Bytes taken into HBM for hints: used, wasted; and not taken before the request came: late, no_room",
            labels=["outcome"],
        )
        self._bytes(hints, ("used",), lambda e: e.device.cache.hints_used)
        self._bytes(hints, ("wasted",), lambda e: e.device.cache.hints_wasted)
        self._bytes(hints, ("late",), lambda e: e.core.prefetching.late)
        self._bytes(hints, ("no_room",), lambda e: e.core.prefetching.no_room)
        loaded = CounterMetricFamily("upbeat_worker_loaded_bytes", "Bytes copied from DRAM to HBM, for a demand or a hint", labels=["for"])
        for what in ("demand", "hint"):
            self._bytes(loaded, (what,), lambda e, what=what: e.device.loader.loaded[what])  # type: ignore[misc]
        saved = CounterMetricFamily("upbeat_worker_saved_bytes", "Bytes copied from HBM to DRAM", labels=[])
        self._bytes(saved, (), lambda e: e.device.loader.saved)
        yield from (used, hit, evicted, hints, loaded, saved)

    def _requests(self) -> Iterator[Metric]:
        engines = self._engines
        planned = CounterMetricFamily(
            "upbeat_worker_planned_tokens", "Cached tokens that were loaded, or computed again because that is sooner", labels=["choice"]
        )
        planned.add_metric(["loaded"], sum(e.core.admission.loaded_tokens for e in engines))
        planned.add_metric(["recomputed"], sum(e.core.admission.recomputed_tokens for e in engines))
        failed = CounterMetricFamily("upbeat_worker_failed_requests", "Requests that failed after they were accepted", labels=["code"])
        for code in ("generation_failed", "overloaded", "invalid_value"):
            failed.add_metric([code], sum(e.failed[code] for e in engines))
        preempted = CounterMetricFamily(
            "upbeat_worker_preemptions",
            "Sequences that gave their place and pages to others",
            sum(e.core.scheduling.preemptions for e in engines),
        )
        again = CounterMetricFamily(
            "upbeat_worker_recomputed_tokens", "Tokens that were computed again, by what had taken their sequence off the device",
            labels=["after"],
        )  # fmt: skip
        for event in (Event.PREEMPTED, Event.LOST):
            again.add_metric([event.value], sum(e.core.scheduling.recomputed_tokens[event] for e in engines))
        yield from (planned, failed, preempted, again)
