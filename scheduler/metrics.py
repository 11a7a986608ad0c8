"""The scheduler's metrics (`upbeat_scheduler_*`), read from the core at each scrape.

Scrapes run on another thread, so each figure is a single read of the core's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import Counter as CountedMetric
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.config import Config
from runtime.places import PORTS_A_NODE, device_ports, node_ports
from runtime.telemetry import REGISTRY
from scheduler.core.control import Control

_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
DECISION = Histogram(
    "upbeat_scheduler_decision_seconds", "Choosing a node for a turn", buckets=_BUCKETS, registry=REGISTRY
)
REFUSED = CountedMetric("upbeat_scheduler_refused", "Turns for which there was no node", registry=REGISTRY)
#: Added to the gRPC port.
METRICS_PORT = 10
#: Ports that a node uses of its ten.
_NODE_PORTS = 5


def metrics_port(config: Config, port: int) -> int | None:
    """The metrics port of a scheduler on `port`; None: another service of this deployment has that port."""
    wanted, nodes = port + METRICS_PORT, config.nodes
    own = node_ports(nodes)
    of_node = (wanted in own and (wanted - own.start) % PORTS_A_NODE < _NODE_PORTS) or wanted in device_ports(nodes)
    taken = {config.gateway.port, *(int(address.rpartition(":")[2]) for address in config.scheduler_addresses)}
    return None if of_node or wanted in taken or wanted > 65_535 else wanted


class SchedulerMetrics(Collector):
    """The samples of one core."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        control = self._control
        decided = CounterMetricFamily("upbeat_scheduler_decisions", "Turns that were placed")
        decided.add_metric((), control.decisions)
        yield decided
        yield _counted(
            "upbeat_scheduler_hints",
            "Hints that came, done: full (prefetched), behind (prefetched after all others: little trust), noted "
            "(only remembered), known (nothing new), unusable (no node serves the model)",
            "done",
            control.hints,
        )
        ends = ("used", "missed", "expired", "invalidated", "dropped", "moved")
        ended = {end: control.advisories.outcomes[end] for end in ends}
        yield _counted(
            "upbeat_scheduler_hint_outcomes",
            "Hints by how they ended, outcome: used, missed (a turn without a hint), expired, invalidated, dropped "
            "(over 200,000 pending), moved",
            "outcome",
            ended,
        )
        waiting = GaugeMetricFamily("upbeat_scheduler_hints_pending", "Hints whose request has not come")
        waiting.add_metric((), len(control.advisories))
        yield waiting
        columns = control.fleet.columns
        expected = GaugeMetricFamily(
            "upbeat_scheduler_expected_arrivals", "Expected number of requests that hints announce"
        )
        expected.add_metric((), float(columns.expected[:, : columns.count].sum()))
        yield expected
        states = Counter(device.shown for device in control.fleet.current)
        nodes = GaugeMetricFamily(
            "upbeat_scheduler_nodes",
            "Devices by state: serving, suspect, draining, dead, starting, absent",
            labels=["state"],
        )
        for state in ("serving", "suspect", "draining", "dead", "starting", "absent"):
            nodes.add_metric((state,), states[state])
        yield nodes
        members = GaugeMetricFamily(
            "upbeat_scheduler_members",
            "Nodes that belong to the fleet, whether they are here or down, state: staying, leaving",
            labels=["state"],
        )
        leaving = len(control.membership.leaving)
        members.add_metric(("staying",), len(control.membership.members) - leaving)
        members.add_metric(("leaving",), leaving)
        yield members
        moves = control.model_moves
        yield _counted(
            "upbeat_scheduler_model_moves",
            "Models moved between devices, stage: begun, arrived, given_up",
            "stage",
            {"begun": moves.begun, "arrived": moves.arrived, "given_up": moves.given_up},
        )
        pressure = GaugeMetricFamily(
            "upbeat_scheduler_kv_pressure",
            "KVPR, of devices that several models share: demand for KV (tokens a second, times bytes of KV a token, "
            "over tpot_s or 50 ms) over the memory that weights leave; every 5 s",
            labels=["node"],
        )
        for name, ratio in moves.pressures.items():
            pressure.add_metric((name,), ratio)
        yield pressure
        known = GaugeMetricFamily("upbeat_scheduler_sessions", "Sessions that some node has reported")
        known.add_metric((), len(control.directory))
        yield known


def _counted(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in list(counts.items()):
        family.add_metric((value,), count)
    return family
