"""Logs (structlog, one JSON object a line) and metrics (prometheus-client) for every process."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog
from blake3 import blake3
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, generate_latest

# A series more for each counter, which no dashboard reads.
disable_created_metrics()  # type: ignore[no-untyped-call]
#: The process's registry, shown at `/metrics`.
REGISTRY = CollectorRegistry()
_TASKS = Gauge("upbeat_tasks", "asyncio tasks that have not ended", registry=REGISTRY)
#: `process_*`, as every Prometheus client shows them.
ProcessCollector(registry=REGISTRY)
#: Figures that a process shows under names of others too, and that say nothing new to a scheduler.
_TWICE = ("vllm:", "process_")


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Makes the gauge count the tasks of `loop`, on the thread that reads the metrics."""
    _TASKS.set_function(lambda: float(len(asyncio.all_tasks(loop))))


#: Fields that name a session or an end user.
_IDS = frozenset({"session", "user"})
#: Of a hash that stands for an id.
_HASH_BYTES = 8
#: Of a process that knows no key of its fleet; its hashes fit its own lines only.
ANY_KEY = os.urandom(32)


def hashed_id(key: bytes, text: str) -> str:
    """What stands in logs for an id, such as TENANT/SESSION_ID: the tenant stays readable. key: 32 bytes, see
    `contracts.cluster.log_key`."""
    tenant, slash, _ = text.rpartition("/")
    return f"{tenant}{slash}#{blake3(text.encode('utf-8', 'surrogatepass'), key=key).hexdigest(length=_HASH_BYTES)}"


def configure_logs(service: str, level: str = "info", key: Callable[[], bytes] = bytes) -> None:
    """Sends logs to stderr as JSON lines with `service`, and the threads' stacks if native code crashes. key: of the
    hashes that stand for ids of sessions and users, from level info on; empty while the process knows none."""

    def hash_ids(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if method != "debug":
            for name in _IDS & event.keys():
                hashed = hashed_id(key() or ANY_KEY, str(event[name]))
                event[name] = hashed if name == "session" else hashed.rpartition("/")[2]  # only sessions name a tenant
        return event

    def name_service(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service  # not bound to a context, which other threads would not have
        return event

    faulthandler.enable()
    structlog.configure(
        processors=[
            name_service,
            hash_ids,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def from_zero(metric: Any, *values: str | tuple[str, ...]) -> None:
    """Show these values of a metric's labels from the start, with 0: else `rate` and `increase` do not see the first
    event of its kind."""
    for each in values:
        metric.labels(*((each,) if isinstance(each, str) else each))


def logger(name: str) -> Any:
    """A structured logger: `log.info("what happened", key=value)`."""
    return structlog.get_logger(module=name)


def samples() -> dict[str, float]:
    """Counters and gauges of Upbeat by name and labels, as in `metrics_text`; histograms as count and sum."""
    found = {}
    for metric in REGISTRY.collect():
        if metric.name.startswith(_TWICE):
            continue
        for sample in metric.samples:
            if not sample.name.endswith("_bucket"):
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                found[sample.name + (f"{{{labels}}}" if labels else "")] = float(sample.value)
    return found


def metrics_text() -> bytes:
    """This process's metrics in Prometheus' text format."""
    return generate_latest(REGISTRY)
