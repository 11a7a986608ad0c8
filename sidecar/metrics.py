"""The sidecar's metrics: what it has passed on, and the server's main figures under the names of a worker's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.models import ModelState
from sidecar.core.flights import Flights, pages
from sidecar.engine import ServedModel
from sidecar.tally import Tally
from sidecar.warming import Warming
from sidecar.watching import Watching


class SidecarMetrics(Collector):
    """Collected on another thread; each figure is read at once."""

    def __init__(
        self, model: ServedModel, watching: Watching, flights: Flights, tally: Tally, warming: Warming
    ) -> None:
        self._model, self._watching, self._flights, self._tally = model, watching, flights, tally
        self._warming = warming

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._own()
        yield from self._servers()

    def _own(self) -> Iterator[Metric]:
        tally = self._tally
        ended = CounterMetricFamily(
            "upbeat_sidecar_requests",
            "Requests by how they ended: answered, refused before the server had them, unreached, lost, cancelled",
            labels=["outcome"],
        )
        for outcome, count in dict(tally.outcomes).items():
            ended.add_metric([outcome], count)
        bytes_ = CounterMetricFamily(
            "upbeat_sidecar_bytes", "Bytes of bodies (up) and of answers (down)", labels=["way"]
        )
        bytes_.add_metric(["up"], tally.up_bytes)
        bytes_.add_metric(["down"], tally.down_bytes)
        yield ended
        yield bytes_
        yield GaugeMetricFamily("upbeat_sidecar_in_flight", "Requests on the server", len(self._flights))
        yield GaugeMetricFamily(
            "upbeat_sidecar_held_bytes", "Bytes of bodies that the server does not have yet", tally.held_bytes
        )
        yield GaugeMetricFamily("upbeat_sidecar_server_up", "Whether the vLLM server serves", int(self._watching.up))
        yield GaugeMetricFamily(
            "upbeat_sidecar_connector", "Whether the server has Upbeat's connector", int(self._watching.transfers)
        )
        yield CounterMetricFamily(
            "upbeat_sidecar_wakes", "Tokens computed to wake an idle engine for an erasure", self._watching.wakes
        )
        yield CounterMetricFamily(
            "upbeat_sidecar_warm_ups", "Hinted sessions brought into the server's own cache", self._warming.warmed
        )

    def _servers(self) -> Iterator[Metric]:
        name, shape, sample = self._model.model_name, self._model.shape, self._watching.sample
        state = GaugeMetricFamily(
            "upbeat_worker_model_state",
            "What a model is doing here: 1 cold, 2 loading, 3 active, 4 draining",
            labels=["model"],
        )
        state.add_metric([name], ModelState.ACTIVE if self._watching.up else ModelState.LOADING)
        yield state
        if sample is None:
            return
        total, free, _ = pages(sample, shape)
        used = GaugeMetricFamily(
            "upbeat_worker_model_kv_bytes", "Bytes of HBM that a model's KV holds", labels=["model"]
        )
        used.add_metric([name], (total - free) * shape.piece_bytes)
        limit = GaugeMetricFamily(
            "upbeat_worker_model_kv_limit_bytes", "Bytes of HBM that a model's KV may hold", labels=["model"]
        )
        limit.add_metric([name], total * shape.piece_bytes)
        requests = GaugeMetricFamily(
            "upbeat_worker_requests",
            "Requests by state: running (in steps), loading (their KV comes), waiting (for their turn or memory)",
            labels=["model", "state"],
        )
        requests.add_metric([name, "running"], sample.running)
        requests.add_metric([name, "waiting"], sample.waiting)
        tier = GaugeMetricFamily("upbeat_worker_used_bytes", "Bytes that a tier of this worker holds", labels=["tier"])
        tier.add_metric(["hbm"], (total - free) * shape.piece_bytes)
        hit = CounterMetricFamily(
            "upbeat_worker_hit_bytes", "Bytes that requests found where they are used", labels=["tier"]
        )
        hit.add_metric(["hbm"], sample.cache_hits * shape.token_bytes)
        loaded = CounterMetricFamily(
            "upbeat_worker_loaded_bytes", "Bytes copied from DRAM to HBM, for: demand, hint", labels=["for"]
        )
        loaded.add_metric(["demand"], sample.external_hits * shape.token_bytes)
        preempted = CounterMetricFamily(
            "upbeat_worker_preemptions", "Requests that gave their place and pages to others", sample.preemptions
        )
        yield from (used, limit, requests, tier, hit, loaded, preempted)
