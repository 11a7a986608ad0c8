"""Which requests are traced, and that no collector holds anything up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from contracts.errors import ConfigError
from contracts.trace_context import TraceContext, from_headers
from runtime import tracing
from runtime.sections import TelemetrySection
from runtime.span_queue import BATCH, SPANS, SpanQueue
from runtime.spans import Kind, Span
from runtime.tracing import Sampler, Tracer, ratio_of
from tests.traced import SAMPLED, SPAN_ID, TRACE_ID, UNSAMPLED, Nowhere, Receiver, attributes_of

YES, NO = from_headers([SAMPLED], []), from_headers([UNSAMPLED], [])


def span(name: str = "s", **more: Any) -> Span:
    now = time.monotonic()
    return Span(name, TraceContext(TRACE_ID, SPAN_ID), "", now - 1.0, now, **more)


def counted() -> dict[str, float]:
    return {s.labels["outcome"]: s.value for s in SPANS.collect()[0].samples if s.name.endswith("_total")}


def since(before: dict[str, float]) -> dict[str, float]:
    return {outcome: value - before.get(outcome, 0.0) for outcome, value in counted().items()}


def within(limit_s: float, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


# ---- which requests ----------------------------------------------------------------------------------------------
def test_a_callers_flag_decides_only_for_tenants_that_are_followed() -> None:
    sampler = Sampler(0.25, ["friend"], 0.0)
    assert [sampler.takes(YES, "other", draw, 0.0) for draw in (0.2, 0.3)] == [True, False]
    assert [sampler.takes(NO, "other", draw, 0.0) for draw in (0.2, 0.3)] == [True, False]
    assert [sampler.takes(parent, "friend", 0.9, 0.0) for parent in (YES, NO, None)] == [True, False, False]
    assert sampler.takes(NO, "friend", 0.0, 0.0) is False
    assert Sampler(0.0, ["*"], 0.0).takes(YES, "anybody", 0.9, 0.0)


def test_traces_begun_are_bounded_whoever_asks_for_them() -> None:
    sampler = Sampler(1.0, ["*"], 10.0)
    assert sum(sampler.takes(YES, "t", 0.0, 0.0) for _ in range(1000)) == 20  # the burst
    assert sum(sampler.takes(YES, "t", 0.0, 1.0) for _ in range(1000)) == 10


def test_a_request_joins_its_callers_trace_and_another_begins_one() -> None:
    tracer = Tracer(Nowhere(), Sampler(1.0, [], 0.0), 1, bytes)
    parent = from_headers([SAMPLED], ["a=1"])
    joined, own, other = tracer.root(parent, "t"), tracer.root(None, "t"), tracer.root(None, "t")
    assert joined is not None and own is not None and other is not None
    assert (joined.trace_id, joined.state) == (TRACE_ID, "a=1") and joined.span_id != SPAN_ID
    assert own.trace_id != other.trace_id and from_headers([own.traceparent], []) == own
    tracer.stop()


def test_the_ratio_comes_from_the_configuration_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ratio_of(TelemetrySection()) == 0.05
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    assert ratio_of(TelemetrySection()) == 0.5 and ratio_of(TelemetrySection(ratio=0.25)) == 0.25
    for wrong in ("often", "2", "nan"):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", wrong)
        with pytest.raises(ConfigError, match=r"OTEL_TRACES_SAMPLER_ARG.*from 0 to 1"):
            ratio_of(TelemetrySection())


# ---- off ---------------------------------------------------------------------------------------------------------
OFF = """
import sys
from runtime import tracing
from runtime.sections import TelemetrySection
import gateway.app, scheduler.server, kvstore.node, sidecar.service, worker.engine.engine, worker.service.server
tracing.start(TelemetrySection(), "gateway", "gateway", bytes)
assert tracing.tracer() is None
ours = [name for name in sys.modules if name.startswith(("opentelemetry", "runtime.otlp"))]
print(sorted(ours), [thread.name for thread in __import__("threading").enumerate() if thread.name == "spans"])
"""


def test_without_traces_no_process_imports_opentelemetry_or_has_a_thread_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, timeout=240)
    assert done.stdout == "[] []\n", done.stderr


def test_the_standard_switch_turns_traces_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing.start(TelemetrySection(traces=True), "gateway", "gateway", bytes)
    assert tracing.tracer() is None


def test_a_missing_library_stops_the_start_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opentelemetry", "runtime.otlp"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"telemetry\.traces needs OpenTelemetry.*upbeat-server\[otel\]"):
        tracing.start(TelemetrySection(traces=True), "gateway", "gateway", bytes)


# ---- the queue ---------------------------------------------------------------------------------------------------
class Stuck:
    """An exporter that hangs until it is let go."""

    def __init__(self) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.sent: list[Span] = []

    def export(self, spans: Sequence[Span]) -> bool:
        self.entered.set()
        self.go.wait(30)
        self.sent += spans
        return True

    def close(self) -> None:
        self.go.set()


def test_a_collector_that_hangs_costs_spans_and_no_time() -> None:
    before, stuck = counted(), Stuck()
    queue = SpanQueue(stuck, 300)
    for _ in range(BATCH):
        queue.put(span())
    assert stuck.entered.wait(5)
    began_s = time.monotonic()
    for _ in range(10_000):
        queue.put(span())
    assert time.monotonic() - began_s < 2.0 and len(queue) == 300
    assert since(before) == {"sent": 0, "dropped": 9_700, "lost": 0}
    stuck.go.set()
    queue.stop(5)
    assert len(stuck.sent) == BATCH + 300 and since(before)["sent"] == BATCH + 300


def test_a_process_ends_in_time_though_its_collector_hangs() -> None:
    before, stuck = counted(), Stuck()
    stuck.close = lambda: None  # type: ignore[method-assign]
    queue = SpanQueue(stuck, 1000)
    for _ in range(BATCH + 10):
        queue.put(span())
    assert stuck.entered.wait(5)
    began_s = time.monotonic()
    queue.stop(0.1)
    assert time.monotonic() - began_s < 2.0 and since(before)["dropped"] == 10
    queue.put(span())
    assert since(before)["dropped"] == 11
    stuck.go.set()


def test_an_exporter_that_raises_loses_its_batch_only() -> None:
    class Raises(Nowhere):
        fails = True

        def export(self, spans: Sequence[Span]) -> bool:
            if self.fails:
                raise OSError("no")
            return True

    before, exporter = counted(), Raises()
    queue = SpanQueue(exporter, 10)
    queue.put(span())
    within(5, lambda: since(before)["lost"] == 1)
    exporter.fails = False
    queue.put(span())
    queue.stop(5)
    assert since(before) == {"sent": 1, "dropped": 0, "lost": 1}


# ---- over the wire -----------------------------------------------------------------------------------------------
def exporter(url: str, timeout_s: float = 2.0) -> Any:
    from runtime.otlp import OtlpExporter

    return OtlpExporter(url, timeout_s, "gateway", "gateway-1")


def test_a_span_arrives_as_it_was_recorded_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    now, wall_s, link = time.monotonic(), time.time(), TraceContext("1" * 32, "2" * 16)
    context = TraceContext(TRACE_ID, "3" * 16, state="a=1")
    many = {f"a{i}": i for i in range(100)}
    first = Span(
        "chat m", context, SPAN_ID, now - 2.0, now - 1.0, Kind.SERVER, {**many, "text": "x" * 5000, "list": ["stop"]},
        [("first token", now - 1.5)], [link], "ended with status 503",
    )  # fmt: skip
    with Receiver() as receiver:
        sender = exporter(receiver.url)
        assert sender.export([first, Span("alone", TraceContext("4" * 32, "5" * 16), "", now, now)])
        sender.close()
    [(service, got), (_, alone)] = receiver.spans()
    assert service == "upbeat-gateway" and receiver.heads[0]["x-key"] == "secret"
    assert (got.trace_id.hex(), got.span_id.hex(), got.parent_span_id.hex()) == (TRACE_ID, "3" * 16, SPAN_ID)
    assert (alone.trace_id.hex(), alone.parent_span_id) == ("4" * 32, b"")
    assert (got.name, got.kind, got.trace_state, got.status.message) == ("chat m", 2, "a=1", "ended with status 503")
    assert abs(got.start_time_unix_nano / 1e9 - (wall_s - 2.0)) < 1.0
    assert got.end_time_unix_nano - got.start_time_unix_nano == pytest.approx(1e9, rel=1e-3)
    assert [event.name for event in got.events] == ["first token"]
    assert [(x.trace_id.hex(), x.span_id.hex()) for x in got.links] == [("1" * 32, "2" * 16)]
    told = attributes_of(got)
    assert len(told) == 64 and max(len(str(value)) for value in told.values()) == 512
    resource = receiver.requests[0].resource_spans[0].resource
    by_name = {a.key: a.value.string_value for a in resource.attributes}
    assert by_name["service.instance.id"] == "gateway-1" and by_name["deployment.environment"] == "test"


def _redirects(handler: Any) -> None:
    handler.send_response(302)
    handler.send_header("location", handler.server.elsewhere)
    handler.send_header("content-length", "0")
    handler.end_headers()


def _refuses(handler: Any) -> None:
    handler.send_response(400)
    handler.send_header("content-length", "0")
    handler.end_headers()


def _says_later(handler: Any) -> None:
    handler.send_response(503)
    handler.send_header("retry-after", "1000000")
    handler.send_header("content-length", "0")
    handler.end_headers()


def _hangs(handler: Any) -> None:
    time.sleep(3)


@pytest.mark.parametrize("answer", [_refuses, _says_later, _hangs])
def test_a_bad_collector_loses_spans_within_the_time_limit(answer: Callable[[Any], None]) -> None:
    with Receiver(answer) as receiver:
        sender, began_s = exporter(receiver.url, 0.5), time.monotonic()
        assert not sender.export([span()])
        assert time.monotonic() - began_s < 2.5


def test_no_collector_at_all_loses_spans_within_the_time_limit(free_ports: Callable[[int], int]) -> None:
    began_s = time.monotonic()
    assert not exporter(f"http://127.0.0.1:{free_ports(1)}", 0.5).export([span()])
    assert time.monotonic() - began_s < 3.0


def test_spans_are_not_sent_where_a_collector_redirects_to() -> None:
    with Receiver() as elsewhere, Receiver(_redirects) as receiver:
        receiver._server.elsewhere = elsewhere.url  # type: ignore[attr-defined]
        assert not exporter(receiver.url).export([span()])
        assert len(receiver.requests) == 1 and not elsewhere.requests


def test_an_endless_answer_is_not_read() -> None:
    written = [0]

    def endless(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        piece = b"x" * 65_536
        for _ in range(16_384):  # a GiB
            handler.wfile.write(piece)
            written[0] += len(piece)

    with Receiver(endless) as receiver:
        began_s = time.monotonic()
        assert exporter(receiver.url).export([span()])
        assert time.monotonic() - began_s < 2.0
    assert written[0] < 64 << 20
