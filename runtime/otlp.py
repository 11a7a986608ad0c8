"""Sends spans by OTLP (HTTP, protobuf) with OpenTelemetry's SDK and exporter. Imported only when traces are on.

The SDK is used as a library, by the one thread of `runtime.span_queue`: nothing global is set, and spans are made when
they have ended. A collector is not trusted: no redirect is followed, and no answer's body is read.

The exporter reads the standard variables: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS, _CERTIFICATE, _CLIENT_KEY,
_CLIENT_CERTIFICATE, _COMPRESSION and _TIMEOUT, each also with _TRACES_ before its last part; the SDK
OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from contracts.errors import ConfigError
from contracts.trace_context import TraceContext
from runtime.spans import Kind, Span
from runtime.version import version

#: Bounds of one span, whatever a service puts into it.
_LIMITS = SpanLimits(max_attributes=64, max_events=64, max_links=16, max_attribute_length=512, max_event_attributes=8)
_KINDS = {
    Kind.INTERNAL: trace.SpanKind.INTERNAL,
    Kind.SERVER: trace.SpanKind.SERVER,
    Kind.CLIENT: trace.SpanKind.CLIENT,
}
_CONNECT_S = 2.0


class OtlpExporter:
    """`runtime.tracing.Exporter`."""

    def __init__(self, endpoint: str, timeout_s: float, service: str, instance: str) -> None:
        """endpoint: the collector's URL; empty: as the environment says, else http://localhost:4318. Raises ConfigError
        when the environment's variables cannot be used."""
        # It logs every failure as plain text; `span_queue` logs when failing begins and ends.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        try:
            self._exporter = OTLPSpanExporter(endpoint=url, timeout=timeout_s, session=_Session())
        except Exception as e:
            raise ConfigError(f"the exporter of traces cannot be made: {e}; look at the OTEL_ variables") from None
        self._ids, self._ended = _Ids(), _Ended()
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"upbeat-{service}",
                "service.namespace": "upbeat",
                "service.instance.id": instance,
                "service.version": version(),
            }
        )
        provider = TracerProvider(ALWAYS_ON, resource, False, id_generator=self._ids, span_limits=_LIMITS)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("upbeat", version())

    def export(self, spans: Sequence[Span]) -> bool:
        """See `Exporter`."""
        offset_s = time.time() - time.monotonic()
        for span in spans:
            self._make(span, offset_s)
        made, self._ended.spans = self._ended.spans, []
        return bool(self._exporter.export(made) is SpanExportResult.SUCCESS)

    def close(self) -> None:
        """See `Exporter`."""
        self._exporter.shutdown()

    def _make(self, span: Span, offset_s: float) -> None:
        self._ids.trace_id, self._ids.span_id = int(span.context.trace_id, 16), int(span.context.span_id, 16)
        parent = None
        if span.parent_id:
            above = TraceContext(span.context.trace_id, span.parent_id, True, span.context.state)
            parent = trace.set_span_in_context(trace.NonRecordingSpan(_of(above)))
        made = self._tracer.start_span(
            span.name,
            parent if parent is not None else trace.set_span_in_context(trace.INVALID_SPAN),
            _KINDS[span.kind],
            span.attributes,
            [trace.Link(_of(link)) for link in span.links],
            _ns(span.began_s, offset_s),
            record_exception=False,
        )
        for name, at_s in span.events:
            made.add_event(name, timestamp=_ns(at_s, offset_s))
        if span.error:
            made.set_status(trace.StatusCode.ERROR, span.error)
        made.end(_ns(max(span.ended_s, span.began_s), offset_s))


class _Ids(IdGenerator):  # type: ignore[misc]
    """Gives each span the ids that it has already."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Ended(SpanProcessor):  # type: ignore[misc]
    """Collects what is to be sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class _Session(requests.Session):  # type: ignore[misc]
    """Reads no more of an answer than its head, and counts a redirect as a failure."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        timeout = options.pop("timeout", None)
        wait = (min(_CONNECT_S, timeout), timeout) if timeout else timeout
        response = super().request(*args, **options | {"stream": True, "allow_redirects": False, "timeout": wait})
        response.close()
        if 300 <= response.status_code < 400:
            raise requests.RequestException(f"the collector answered {response.status_code}, a redirect")
        return response


def _of(context: TraceContext) -> trace.SpanContext:
    state = trace.TraceState.from_header([context.state]) if context.state else None
    return trace.SpanContext(
        int(context.trace_id, 16), int(context.span_id, 16), True, trace.TraceFlags(trace.TraceFlags.SAMPLED), state
    )


def _ns(at_s: float, offset_s: float) -> int:
    return int((at_s + offset_s) * 1e9)
