"""What a vLLM server is told of a request's trace."""

from __future__ import annotations

import pytest

from contracts.trace_context import TraceContext, from_headers
from contracts.v1 import worker_pb2 as pb
from runtime.spans import Kind
from sidecar.tracing import PassageTrace
from tests.traced import is_below, recording

ABOVE = TraceContext("1" * 32, "1" * 16, state="a=1")


def head(trace: str) -> pb.HttpRequest:
    return pb.HttpRequest(request_id="chatcmpl-1/mine", model="m", trace=trace)


def test_a_traced_request_takes_its_server_into_the_trace() -> None:
    with recording() as spans:
        trace = PassageTrace.of(head(ABOVE.to_wire()), 1.0)
        assert trace is not None
        trace.end("answered", 3.0)
        span = spans.one("sidecar.relay")
        sent = dict(trace.headers)
        assert from_headers([sent["traceparent"]], [sent["tracestate"]]) == span.context
        assert is_below(span, ABOVE) and span.kind is Kind.CLIENT and (span.began_s, span.ended_s) == (1.0, 3.0)
        assert span.attributes["upbeat.request_id"] == "chatcmpl-1/mine" and not span.error


@pytest.mark.parametrize("outcome", ["lost", "unreached"])
def test_a_lost_server_is_an_error(outcome: str) -> None:
    with recording() as spans:
        trace = PassageTrace.of(head(ABOVE.to_wire()), 1.0)
        assert trace is not None
        trace.end(outcome, 3.0)
        assert spans.one("sidecar.relay").error == outcome


@pytest.mark.parametrize("told", ["", "nonsense"])
def test_an_untraced_request_tells_its_server_not_to_trace(told: str) -> None:
    with recording() as spans:
        trace = PassageTrace.of(head(told), 1.0)
        assert trace is not None
        [(name, value)] = trace.headers
        sent = from_headers([value], [])
        assert name == "traceparent" and sent is not None and not sent.sampled
        trace.end("answered", 2.0)
        assert not spans.spans


def test_without_traces_a_server_is_told_nothing() -> None:
    assert PassageTrace.of(head(ABOVE.to_wire()), 1.0) is None
