"""A scheduler's spans, and its log lines about single requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from contracts import trace_context
from contracts.v1 import scheduler_pb2
from runtime import telemetry, tracing
from runtime.spans import Kind, Span, Value
from scheduler.core.advisories import Hint
from scheduler.core.control import Placement

log = telemetry.logger("scheduler.placing")


def placed(request: scheduler_pb2.PlaceRequest, found: Placement, began_s: float, ended_s: float) -> None:
    """A turn was placed. Times: monotonic."""
    if log.is_enabled_for(logging.DEBUG):
        log.debug("placed", request=request.request_id, node=found.node, why=found.choice.why, advised=found.advised)
    tracer, context = tracing.tracer(), trace_context.from_wire(request.trace)
    if tracer is not None and context is not None:
        tracer.record(
            Span(
                "scheduler.place",
                tracer.child(context),
                context.span_id,
                began_s,
                ended_s,
                Kind.SERVER,
                {
                    "upbeat.node": found.node,
                    "upbeat.why": found.choice.why,
                    "upbeat.advised": found.advised,
                    "upbeat.taken": request.taken,
                    "upbeat.kept_tokens": found.kept,
                    "upbeat.source_nodes": list(found.sources),
                    "upbeat.request_id": request.request_id,
                },
            )
        )


def refused(request: scheduler_pb2.PlaceRequest, error: str) -> None:
    """A turn could not be placed."""
    log.debug("not placed", request=request.request_id, error=error)


def advised(hints: Iterable[Hint], nodes: Iterable[str], began_s: float, ended_s: float) -> None:
    """Hints were placed; a node is empty where none could take the hint. Times: monotonic."""
    tracer, says = tracing.tracer(), log.is_enabled_for(logging.DEBUG)
    if tracer is None and not says:
        return
    for hint, node in zip(hints, nodes, strict=True):
        if says:
            log.debug("hint placed", advisory=hint.advisory_id, node=node)
        context = trace_context.from_wire(hint.trace)
        if tracer is not None and context is not None:
            attributes: dict[str, Value] = {"upbeat.node": node, "upbeat.advisory_id": hint.advisory_id}
            child = tracer.child(context)
            tracer.record(
                Span("scheduler.place_hint", child, context.span_id, began_s, ended_s, Kind.SERVER, attributes)
            )
