"""The worker's metrics, read from its engines and its device on each request.

Names and labels match those of the stores' metrics where both count the same thing. Memory is in bytes, not pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.models import ModelState
from worker.core.residency import Residency
from worker.engine.contract import Engine, Tallies
from worker.models.circulating import Circulation


class WorkerMetrics(Collector):
    """Samples of a worker's engines: sums over its models, and state and memory by model. usage: see
    `DeviceMemory.usage`. residency: of models whose weights come and go. circulations: of layers that take turns, by
    model. Collected on other threads."""

    def __init__(
        self,
        engines: Sequence[Engine],
        usage: Callable[[], Mapping[tuple[str, str, str], int]] = dict,
        residency: Residency | None = None,
        circulations: Mapping[str, Circulation] = MappingProxyType({}),
    ) -> None:
        self._engines, self._usage, self._residency = tuple(engines), usage, residency
        self._circulations = circulations

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        tallies = [engine.tallies() for engine in self._engines]
        yield from self._by_model(tallies)
        if self._residency is not None:
            yield from _residency(self._residency)
            yield from _lending(self._residency, self._circulations)
        yield self._device()
        yield from _memory(tallies)
        yield from _requests(tallies)

    def _by_model(self, tallies: Sequence[Tallies]) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "upbeat_worker_model_state",
            "What a model is doing here: 1 cold, 2 loading, 3 active, 4 draining",
            labels=["model"],
        )
        used = GaugeMetricFamily(
            "upbeat_worker_model_kv_bytes", "Bytes of HBM that a model's KV holds", labels=["model"]
        )
        limit = GaugeMetricFamily(
            "upbeat_worker_model_kv_limit_bytes", "Bytes of HBM that a model's KV may hold", labels=["model"]
        )
        for engine, told in zip(self._engines, tallies, strict=True):
            residents = self._residency.models if self._residency is not None else {}
            there = residents.get(engine.model_name)
            state.add_metric([engine.model_name], there.state if there is not None else ModelState.ACTIVE)
            used.add_metric([engine.model_name], told.kv_bytes)
            limit.add_metric([engine.model_name], told.kv_limit_bytes)
        yield from (state, used, limit)
        requests = GaugeMetricFamily(
            "upbeat_worker_requests",
            "Requests by state: running (in steps), loading (their KV comes), waiting (for their turn or memory)",
            labels=["model", "state"],
        )
        for engine in self._engines:
            now = engine.counts
            requests.add_metric([engine.model_name, "running"], now.running)
            requests.add_metric([engine.model_name, "loading"], now.loading)
            requests.add_metric([engine.model_name, "waiting"], now.waiting - now.loading)
        yield requests

    def _device(self) -> Metric:
        family = GaugeMetricFamily(
            "upbeat_worker_device_bytes",
            "The device's memory by owner: use (weights, kv, ...; empty: nobody's), name (of the model) and state: "
            "free, warm, held, mapped, or memory beside granules",
            labels=["use", "name", "state"],
        )
        for labels, bytes_ in self._usage().items():
            family.add_metric(labels, bytes_)
        return family


def _residency(residency: Residency) -> Iterator[Metric]:
    seconds = CounterMetricFamily(
        "upbeat_worker_activation_seconds", "Time that a model's weights took to come, in all", labels=["model"]
    )
    activations = CounterMetricFamily(
        "upbeat_worker_activations", "Weights that came to the device, times", labels=["model"]
    )
    evictions = CounterMetricFamily("upbeat_worker_evictions", "Weights that left the device, times", labels=["model"])
    for name, resident in residency.models.items():
        seconds.add_metric([name], resident.loading_s)
        activations.add_metric([name], resident.activations)
        evictions.add_metric([name], resident.evictions)
    yield from (seconds, activations, evictions)


def _lending(residency: Residency, circulations: Mapping[str, Circulation]) -> Iterator[Metric]:
    """Of models that may lend layers."""
    lent = GaugeMetricFamily(
        "upbeat_worker_layers_lent",
        "Layers whose memory KV has (worker.remap); of models that may lend",
        labels=["model"],
    )
    moved = CounterMetricFamily(
        "upbeat_worker_layers_moved",
        "Layers lent to KV, way: lent, back (they have their memory again, or the model left)",
        labels=["model", "way"],
    )
    copies = CounterMetricFamily("upbeat_worker_layer_copies", "Copies of layers that take turns", labels=["model"])
    copying = CounterMetricFamily(
        "upbeat_worker_layer_copy_seconds", "Time that copies of layers took", labels=["model"]
    )
    waited = CounterMetricFamily(
        "upbeat_worker_layer_wait_seconds", "Time that steps waited for copies of layers", labels=["model"]
    )
    for name, resident in residency.models.items():
        if (lending := resident.lending) is None:
            continue
        circulation = circulations.get(name)
        lent.add_metric([name], lending.lent)
        moved.add_metric([name, "lent"], lending.lendings)
        moved.add_metric([name, "back"], lending.returns)
        copies.add_metric([name], circulation.copies if circulation is not None else 0)
        copying.add_metric([name], circulation.copying_s if circulation is not None else 0.0)
        waited.add_metric([name], circulation.waited_s if circulation is not None else 0.0)
    yield from (lent, moved, copies, copying, waited)


def _memory(tallies: Sequence[Tallies]) -> Iterator[Metric]:
    used = GaugeMetricFamily("upbeat_worker_used_bytes", "Bytes that a tier of this worker holds", labels=["tier"])
    used.add_metric(["hbm"], sum(t.kv_bytes for t in tallies))
    hit = CounterMetricFamily(
        "upbeat_worker_hit_bytes", "Bytes that requests found where they are used", labels=["tier"]
    )
    hit.add_metric(["hbm"], sum(t.hit_bytes for t in tallies))
    evicted = CounterMetricFamily(
        "upbeat_worker_evicted_bytes",
        "Bytes that left a tier to make room, reason: unsaved, dropped, unadvised, advised",
        labels=["tier", "reason"],
    )
    for reason, bytes_ in _sums(t.evicted_bytes for t in tallies).items():
        evicted.add_metric(["hbm", reason], bytes_)
    hints = CounterMetricFamily(
        "upbeat_worker_hint_bytes",
        "Bytes taken into HBM for hints, outcome: used, wasted; and not taken before the request came: late, no_room",
        labels=["outcome"],
    )
    for outcome, bytes_ in _sums(t.hint_bytes for t in tallies).items():
        hints.add_metric([outcome], bytes_)
    loaded = CounterMetricFamily(
        "upbeat_worker_loaded_bytes", "Bytes copied from DRAM to HBM, for: demand, hint", labels=["for"]
    )
    for what, bytes_ in _sums(t.loaded_bytes for t in tallies).items():
        loaded.add_metric([what], bytes_)
    saved = CounterMetricFamily(
        "upbeat_worker_saved_bytes", "Bytes copied from HBM to DRAM", sum(t.saved_bytes for t in tallies)
    )
    yield from (used, hit, evicted, hints, loaded, saved)


def _requests(tallies: Sequence[Tallies]) -> Iterator[Metric]:
    planned = CounterMetricFamily(
        "upbeat_worker_planned_tokens",
        "Cached tokens that were not in HBM, choice: loaded, recomputed (it is sooner; not with kv.load_plan: false)",
        labels=["choice"],
    )
    for choice, tokens in _sums(t.planned_tokens for t in tallies).items():
        planned.add_metric([choice], tokens)
    failed = CounterMetricFamily(
        "upbeat_worker_failed_requests",
        "Accepted requests that failed, code: generation_failed, overloaded (lost their place in a full queue), "
        "invalid_value (grammar)",
        labels=["code"],
    )
    for code, count in _sums(t.failed for t in tallies).items():
        failed.add_metric([code], count)
    preempted = CounterMetricFamily(
        "upbeat_worker_preemptions",
        "Requests that gave their place and pages to others",
        sum(t.preemptions for t in tallies),
    )
    again = CounterMetricFamily(
        "upbeat_worker_recomputed_tokens",
        "Tokens computed twice here, after: preempted, lost",
        labels=["after"],
    )
    for event, tokens in _sums(t.recomputed_tokens for t in tallies).items():
        again.add_metric([event], tokens)
    yield from (planned, failed, preempted, again)


def _sums(each: Iterator[Mapping[str, int]] | Sequence[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for counts in each:
        for name, count in counts.items():
            found[name] = found.get(name, 0) + count
    return found
