"""A traced request's span in the sidecar, and what the vLLM server is told of its trace.

The server joins a trace by the standard headers, if it is started with `--otlp-traces-endpoint`. While traces are on
here, a request that is not traced tells it so: else it would trace every request by itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from contracts import trace_context
from contracts.trace_context import TraceContext
from contracts.v1 import worker_pb2 as pb
from runtime import tracing
from runtime.spans import Kind, Span
from runtime.tracing import Tracer


@dataclass(frozen=True, slots=True)
class PassageTrace:
    """One request. headers: for the server. parent: of its span; None: it is not traced."""

    tracer: Tracer
    context: TraceContext
    parent: TraceContext | None
    request_id: str
    model: str
    began_s: float

    @classmethod
    def of(cls, head: pb.HttpRequest, now: float) -> PassageTrace | None:
        """The trace of a request; None while traces are off. now: monotonic, as every time here."""
        tracer = tracing.tracer()
        if tracer is None:
            return None
        parent = trace_context.from_wire(head.trace)
        if parent is not None:
            context = tracer.child(parent)
        else:
            context = TraceContext(os.urandom(16).hex(), os.urandom(8).hex(), sampled=False)
        return cls(tracer, context, parent, head.request_id, head.model, now)

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers for the server."""
        return self.context.headers

    def end(self, outcome: str, now: float) -> None:
        """The request has ended."""
        if self.parent is None:
            return
        self.tracer.record(
            Span(
                "sidecar.relay",
                self.context,
                self.parent.span_id,
                self.began_s,
                now,
                Kind.CLIENT,
                {
                    "gen_ai.request.model": self.model,
                    "upbeat.request_id": self.request_id,
                    "upbeat.outcome": outcome,
                },
                error="" if outcome in ("answered", "cancelled", "refused") else outcome,
            )
        )
