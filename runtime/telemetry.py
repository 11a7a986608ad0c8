"""Logs (structlog, one JSON object a line) and metrics (prometheus-client) for every process."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Gauge, generate_latest

#: The process's registry, shown at `/metrics`.
REGISTRY = CollectorRegistry()
_TASKS = Gauge("upbeat_tasks", "asyncio tasks that have not ended", registry=REGISTRY)


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Makes the gauge count the tasks of `loop`, on the thread that reads the metrics."""
    _TASKS.set_function(lambda: float(len(asyncio.all_tasks(loop))))


def configure_logs(service: str, level: str = "info") -> None:
    """Sends logs to stderr as JSON lines with `service`, and the threads' stacks if native code crashes."""
    faulthandler.enable()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def logger(name: str) -> Any:
    """A structured logger: `log.info("what happened", key=value)`."""
    return structlog.get_logger(module=name)


def samples() -> dict[str, float]:
    """Counters and gauges by name and labels, as in `metrics_text`; histograms as count and sum."""
    found = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if not sample.name.endswith(("_created", "_bucket")):
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                found[sample.name + (f"{{{labels}}}" if labels else "")] = float(sample.value)
    return found


def metrics_text() -> bytes:
    """This process's metrics in Prometheus' text format."""
    return generate_latest(REGISTRY)
