"""Traces (OpenTelemetry): which requests are traced, and what services record of them.

Off (`telemetry.traces`), `tracer()` is None: one look, and OpenTelemetry is not imported. On, a traced request's spans
are plain records in a bounded queue (`runtime.span_queue`), which a thread sends by OTLP (`runtime.otlp`). So no
collector can hold up a request: spans are dropped and counted.

The gateway decides once for a request (`Tracer.root`). Services that it asks get a context only if it is traced.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Collection

from contracts.errors import ConfigError
from contracts.trace_context import TraceContext
from runtime import telemetry
from runtime.sections import TelemetrySection
from runtime.span_queue import SpanQueue
from runtime.spans import Exporter, Span

log = telemetry.logger("runtime.tracing")
#: Of traces begun, those that may come at once beyond `traces_per_s`.
_BURST_S = 2.0
#: Longest wait for the last spans when a process ends, in seconds.
_LAST_S = 1.0
#: The share of requests that is traced where nothing says otherwise.
_RATIO = 0.05


class Sampler:
    """Which requests are traced. Mutated by `takes`.

    A caller chooses its trace id and its sampled flag, so neither decides, except for tenants in `followed`: for them
    the flag does, both ways. For all others it is a draw of our own. `per_s` bounds both.
    """

    def __init__(self, ratio: float, followed: Collection[str], per_s: float) -> None:
        """ratio: 0 to 1. followed: names of tenants; `*`: all. per_s: traces begun a second; 0: no bound."""
        self._ratio, self._followed, self._per_s = ratio, frozenset(followed), per_s
        self._most = max(per_s * _BURST_S, 1.0)
        self._left, self._seen_s = self._most, 0.0

    def takes(self, parent: TraceContext | None, tenant: str, draw: float, now: float) -> bool:
        """Whether a request is traced. draw: random, from 0 up to 1."""
        if parent is not None and (tenant in self._followed or "*" in self._followed):
            wanted = parent.sampled
        else:
            wanted = draw < self._ratio
        return wanted and self.spend(now)

    def spend(self, now: float) -> bool:
        """Whether one more trace may begin."""
        if not self._per_s:
            return True
        self._left = min(self._most, self._left + (now - self._seen_s) * self._per_s)
        self._seen_s = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Tracer:
    """Begins traces and takes spans. Any thread."""

    def __init__(self, exporter: Exporter, sampler: Sampler, queue_spans: int, key: Callable[[], bytes]) -> None:
        """key: of the hashes that stand for ids of sessions, as in logs; empty while it is not known."""
        self._sampler, self._key = sampler, key
        self.queue = SpanQueue(exporter, queue_spans)

    def root(self, parent: TraceContext | None, tenant: str) -> TraceContext | None:
        """The context of a request's first span; None: the request is not traced. parent: the caller's."""
        if not self._sampler.takes(parent, tenant, random.random(), time.monotonic()):
            return None
        return self.child(parent) if parent is not None else self._fresh()

    def late_root(self, parent: TraceContext | None) -> TraceContext | None:
        """As `root`, for a request that is to be traced whatever was drawn, because its hint is; within the bound."""
        if not self._sampler.spend(time.monotonic()):
            return None
        return self.child(parent) if parent is not None else self._fresh()

    def child(self, parent: TraceContext) -> TraceContext:
        """A new span's context in the parent's trace."""
        return TraceContext(parent.trace_id, _id(8), True, parent.state)

    def _fresh(self) -> TraceContext:
        return TraceContext(_id(16), _id(8))

    def record(self, span: Span) -> None:
        """Take a span that has ended. Never waits."""
        self.queue.put(span)

    def session(self, session: object) -> str:
        """What stands for a session, TENANT/SESSION_ID, in spans: its hash, as in logs, without the tenant."""
        return telemetry.hashed_id(self._key() or telemetry.ANY_KEY, str(session)).rpartition("/")[2]

    def stop(self) -> None:
        """Send what is queued, for a moment at most, and end the thread."""
        self.queue.stop(_LAST_S)


_tracer: Tracer | None = None


def tracer() -> Tracer | None:
    """This process's; None: traces are off."""
    return _tracer


def use(made: Tracer | None) -> None:
    """Make it this process's tracer. What was made before keeps the one that it has."""
    global _tracer
    _tracer = made


def start(section: TelemetrySection, service: str, instance: str, key: Callable[[], bytes]) -> None:
    """Turn traces on if the configuration does. service: such as gateway; instance: such as gateway-1. Raises
    ConfigError where OpenTelemetry is missing, or an OTEL_ variable cannot be read."""
    if not section.traces or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    try:
        otlp = importlib.import_module("runtime.otlp")
    except ImportError as e:
        raise ConfigError(
            f"telemetry.traces needs OpenTelemetry ({e}): {sys.executable} -m pip install 'upbeat-server[otel]'; "
            "or set it to false"
        ) from None
    exporter: Exporter = otlp.OtlpExporter(section.endpoint, section.timeout_s, service, instance)
    sampler = Sampler(ratio_of(section), section.follow_tenants, section.traces_per_s)
    use(Tracer(exporter, sampler, section.queue_spans, key))


def ratio_of(section: TelemetrySection) -> float:
    """The share of requests that is traced. Raises ConfigError when the environment's cannot be read."""
    if section.ratio is not None:
        return section.ratio
    text = os.environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    try:
        ratio = float(text) if text else _RATIO
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG={text!r} must be a number from 0 to 1; or set telemetry.ratio")
    return ratio


def stop() -> None:
    """See `Tracer.stop`; nothing while traces are off."""
    if (found := _tracer) is not None:
        use(None)
        found.stop()


def _id(size: int) -> str:
    """A random id of `size` bytes, in hex, not zero."""
    while not any(made := os.urandom(size)):
        pass
    return made.hex()
