"""Spans on their way to the collector: a bounded queue, and a thread that sends from it.

`put` never waits: a full queue drops the span. The thread sends a batch at a time, and a batch that is not sent is
lost; nothing is kept for later. `upbeat_spans_total` counts all three.
"""

from __future__ import annotations

import threading
from collections import deque

from prometheus_client import Counter

from runtime import telemetry
from runtime.spans import Exporter, Span

log = telemetry.logger("runtime.span_queue")
#: Spans of one message, and seconds for which they are collected.
BATCH, EVERY_S = 256, 1.0
SPANS = Counter(
    "upbeat_spans_total",
    "Spans of traces. outcome: sent; dropped (the queue was full: telemetry.queue_spans); lost (the collector did not "
    "take them)",
    ["outcome"],
    registry=telemetry.REGISTRY,
)


class SpanQueue:
    """See the module. Invariant: at most `most` spans are queued, beside one batch that is being sent."""

    def __init__(self, exporter: Exporter, most: int) -> None:
        self._exporter, self._most = exporter, most
        self._spans: deque[Span] = deque()
        self._wanted = threading.Event()
        self._ending = False
        self._failing = False
        telemetry.from_zero(SPANS, "sent", "dropped", "lost")
        self._sent, self._dropped, self._lost = (SPANS.labels(outcome) for outcome in ("sent", "dropped", "lost"))
        self._thread = threading.Thread(target=self._send_forever, name="spans", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._spans)

    def put(self, span: Span) -> None:
        """Any thread. (Two at once may exceed the bound by one.)"""
        if len(self._spans) >= self._most or self._ending:
            self._dropped.inc()
            return
        self._spans.append(span)
        if len(self._spans) == BATCH:
            self._wanted.set()

    def stop(self, limit_s: float) -> None:
        """Send what is queued for at most `limit_s` seconds; what is left counts as dropped."""
        self._ending = True
        self._wanted.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._exporter.close()
            self._dropped.inc(len(self._spans))
            self._spans.clear()

    def _send_forever(self) -> None:
        while not self._ending:
            self._wanted.wait(EVERY_S)
            self._wanted.clear()
            while batch := self._next():
                self._send(batch)
        while batch := self._next():  # what came while `stop` was called
            self._send(batch)
        self._exporter.close()

    def _next(self) -> list[Span]:
        found: list[Span] = []
        while len(found) < BATCH:
            try:
                found.append(self._spans.popleft())
            except IndexError:
                break
        return found

    def _send(self, batch: list[Span]) -> None:
        try:
            sent, why = self._exporter.export(batch), "the collector did not take them"
        except Exception as e:
            sent, why = False, repr(e)
        (self._sent if sent else self._lost).inc(len(batch))
        if sent == self._failing:  # once for each time that it begins or ends to fail
            self._failing = not sent
            (log.info if sent else log.warning)(
                "spans are sent again" if sent else "spans are lost; upbeat_spans_total counts them",
                **({} if sent else {"reason": why[:200]}),
            )
