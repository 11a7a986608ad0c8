"""Traces in tests: a tracer that keeps its spans, and a receiver of OTLP that reads them from the wire."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from contracts.trace_context import TraceContext
from runtime import tracing
from runtime.spans import Span
from runtime.tracing import Sampler, Tracer

#: A caller's trace.
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"


class Nowhere:
    """An exporter that sends nothing."""

    def export(self, spans: Sequence[Span]) -> bool:
        return True

    def close(self) -> None:
        pass


class Recorder(Tracer):
    """Keeps what it is told. Any thread."""

    def __init__(self, ratio: float = 1.0, follow: Sequence[str] = (), per_s: float = 0.0) -> None:
        super().__init__(Nowhere(), Sampler(ratio, follow, per_s), 1, lambda: b"k" * 32)
        self.spans: list[Span] = []

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        [span] = self.named(name)
        return span


@contextlib.contextmanager
def recording(ratio: float = 1.0, follow: Sequence[str] = (), per_s: float = 0.0) -> Iterator[Recorder]:
    """Traces are on; what is made within it records here."""
    made = Recorder(ratio, follow, per_s)
    tracing.use(made)
    try:
        yield made
    finally:
        tracing.use(None)
        made.stop()


def is_below(span: Span, above: Span | TraceContext) -> bool:
    context = above.context if isinstance(above, Span) else above
    return span.parent_id == context.span_id and span.context.trace_id == context.trace_id


class Receiver:
    """An OTLP collector over HTTP. requests: what it got, decoded. answer: called with the handler instead of saying
    200."""

    def __init__(self, answer: Callable[[Any], None] | None = None) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        receiver = self
        self.requests: list[Any] = []
        self.heads: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                message = ExportTraceServiceRequest()
                message.ParseFromString(body)
                receiver.heads.append({name.lower(): value for name, value in self.headers.items()})
                receiver.requests.append(message)
                if answer is not None:
                    answer(self)
                    return
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *said: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # a caller that has gone away

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[tuple[str, Any]]:
        """(service, span), in the order in which they came."""
        return [
            (_named(resource.resource.attributes)["service.name"], span)
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _named(attributes: Any) -> dict[str, Any]:
    """Attributes of the wire as values by name."""
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def attributes_of(span: Any) -> dict[str, Any]:
    """A span's attributes."""
    return _named(span.attributes)
