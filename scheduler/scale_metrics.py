"""Metrics for autoscalers: the scheduler's last look (`scheduler.scaling`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.core.scale_policy import Recommendation
from scheduler.core.scale_signals import Signals


class ScaleMetrics(Collector):
    """The samples of the last look; none before the first. last: see `Scaling.last`."""

    def __init__(self, last: Callable[[], tuple[Signals, Recommendation | None] | None]) -> None:
        self._last = last

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        desired = GaugeMetricFamily(
            "upbeat_scheduler_desired_nodes",
            "Nodes that the fleet should have, by the policy of `autoscale`; not there in a scheduler's first minute",
        )
        utilisation = GaugeMetricFamily(
            "upbeat_scheduler_utilisation",
            "Demand a serving device: seconds of work that arrive a second and outstanding ones over drain_s, or the "
            "share of KV memory that running requests hold, whichever is more",
        )
        work = GaugeMetricFamily(
            "upbeat_scheduler_work_seconds",
            "Outstanding work, in seconds of a device, node: the device",
            labels=["node", "model"],
        )
        a_node = GaugeMetricFamily(
            "upbeat_scheduler_model_work_seconds",
            "Outstanding work of a model over the nodes that serve it, in seconds",
            labels=["model"],
        )
        arriving = GaugeMetricFamily(
            "upbeat_scheduler_arriving_work",
            "Seconds of work that arrive a second, of the last minute",
            labels=["model"],
        )
        needed = GaugeMetricFamily(
            "upbeat_scheduler_kv_needed",
            "Share of the fleet's memory for KV that is needed, tier: hbm (by running requests), dram (by sessions "
            "used in the last ten minutes; above 1: some are on SSD or blob)",
            labels=["tier"],
        )
        attained = GaugeMetricFamily(
            "upbeat_scheduler_slo_attainment",
            "Share of the answers of the last five minutes that kept to their model's target, target: ttft, tpot; "
            "without an answer: not there",
            labels=["model", "target"],
        )
        last = self._last()
        if last is not None:
            seen, said = last
            if said is not None:
                desired.add_metric((), said.nodes)
            if said is not None and said.utilisation is not None:
                utilisation.add_metric((), said.utilisation)
            for (device, model), seconds in seen.work_s_of.items():
                work.add_metric((device, model), seconds)
            for name, of in seen.models.items():
                a_node.add_metric((name,), of.work_s_a_node)
                for target, share in of.attainment.items():
                    attained.add_metric((name, target), share)
                arriving.add_metric((name,), of.arriving)
            needed.add_metric(("hbm",), seen.hbm_needed)
            needed.add_metric(("dram",), seen.dram_needed)
        yield from (desired, utilisation, work, a_node, arriving, needed, attained)
