"""A request's spans at the gateway: the first one of its trace, its way in, and its placements.

Everything is recorded when it has ended, from the times that the gateway has anyway. So a turn can still become traced
when its placement says that its hint was. `runtime.tracing` decides which requests are traced; while traces are off
there is no `TurnTrace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from contracts import trace_context
from contracts.ids import SessionKey
from contracts.request import Sampling
from contracts.trace_context import TraceContext
from gateway.core.routing import Route
from gateway.core.turn_times import TurnTimes
from runtime import tracing
from runtime.spans import Kind, Span, Value
from runtime.tracing import Tracer

#: Operations by route, in OpenTelemetry's words where it has one; others are chats.
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/messages/count_tokens": "count_tokens",
}
_MOST_EVENTS = 32


@dataclass(slots=True)
class Outcome:
    """How a turn ended. status: of the error that ended it; 0: none."""

    times: TurnTimes
    node: str
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)


class TurnTrace:
    """One request for text. context: of its first span; None: it is not traced, as far as is known."""

    def __init__(self, tracer: Tracer, request: web.Request, tenant: str, arrived_s: float) -> None:
        self._tracer, self._arrived_s, self._tenant = tracer, arrived_s, tenant
        self._parent = caller_context(request)
        self.context = tracer.root(self._parent, tenant)
        self._links: list[TraceContext] = []
        self._events: list[tuple[str, float]] = []
        self._admitted = False

    @property
    def wire(self) -> str:
        """For the worker; empty: not traced."""
        return self.context.to_wire() if self.context is not None else ""

    def placing(self, now: float) -> Placing:
        """A placement begins."""
        return Placing(self, self._tracer, now)

    def placed(self, placing: Placing, route: Route, now: float) -> None:
        """A placement has ended with a route. A turn whose hint is traced is linked to it, and traced, too."""
        hint = trace_context.from_wire(route.hint_trace)
        if hint is not None and hint not in self._links:
            self._links.append(hint)
            self.context = self.context or self._tracer.late_root(self._parent)
        if self.context is None:
            return
        if not self._admitted:
            self._admitted = True
            self._child("admit", self._tracer.child(self.context), self._arrived_s, placing.began_s, {})
        by = "hint" if route.from_hint else "scheduler" if route.decided_by else "gateway"
        attributes: dict[str, Value] = {
            "upbeat.node": route.node,
            "upbeat.placed_by": by,
            "upbeat.why": route.why,
            "upbeat.kept_tokens": route.kept_tokens,
            "upbeat.source_nodes": list(route.source_nodes),
        }
        self._child("place", placing.context or self._tracer.child(self.context), placing.began_s, now, attributes)

    def retried(self, cause: str, now: float) -> None:
        """An attempt was lost, and there is another."""
        if len(self._events) < _MOST_EVENTS:
            self._events.append((f"retry: {cause}", now))

    def end(
        self, request: web.Request, request_id: str, session: SessionKey, model: str, outcome: Outcome, now: float,
        sampling: Sampling | None = None,
    ) -> None:  # fmt: skip
        """The request has ended. sampling: as asked, where the gateway reads it."""
        if self.context is None:
            return
        route = request.match_info.route.resource
        path = route.canonical if route is not None else ""
        operation, times = _OPERATIONS.get(path, "chat"), outcome.times
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "upbeat",
            "gen_ai.request.model": model,
            "gen_ai.conversation.id": self._tracer.session(session),
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "http.request.method": request.method,
            "http.route": path,
            "upbeat.request_id": request_id,
            "upbeat.tenant": self._tenant,
            "upbeat.node": outcome.node,
        }
        if outcome.reasoning_tokens:
            attributes["gen_ai.usage.reasoning.output_tokens"] = outcome.reasoning_tokens
        if outcome.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = outcome.finish_reasons
        if sampling is not None:
            attributes["gen_ai.request.temperature"], attributes["gen_ai.request.top_p"] = (
                sampling.temperature,
                sampling.top_p,
            )
            if sampling.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if times.spoken:
            attributes["gen_ai.response.time_to_first_chunk"] = times.first_token_s
            self._events.append(("first token", self._arrived_s + times.first_token_s))
        for phase, seconds in times.whole().items():
            attributes[f"upbeat.time.{phase}"] = seconds
        if outcome.status:
            attributes["error.type"] = str(outcome.status)
        error = f"ended with status {outcome.status}" if outcome.status >= 500 else ""
        parent_id = self._parent.span_id if self._parent is not None else ""
        self._tracer.record(
            Span(
                f"{operation} {model}", self.context, parent_id, self._arrived_s, now, Kind.SERVER, attributes,
                self._events, self._links, error,
            )
        )  # fmt: skip

    def _child(
        self, name: str, context: TraceContext, began_s: float, ended_s: float, attributes: dict[str, Value]
    ) -> None:
        assert self.context is not None
        kind = Kind.CLIENT if name == "place" else Kind.INTERNAL
        self._tracer.record(Span(name, context, self.context.span_id, began_s, ended_s, kind, attributes))


class Placing:
    """A placement under way. context: of its span; None: not traced yet."""

    def __init__(self, turn: TurnTrace, tracer: Tracer, now: float) -> None:
        self._turn, self.began_s = turn, now
        self.context = tracer.child(turn.context) if turn.context is not None else None

    @property
    def wire(self) -> str:
        """For the scheduler; empty: not traced."""
        return self.context.to_wire() if self.context is not None else ""

    def ended(self, route: Route, now: float) -> None:
        """See `TurnTrace.placed`."""
        self._turn.placed(self, route, now)


_TRACE = web.RequestKey("trace", TurnTrace)


def turn_trace(request: web.Request, tenant: str, arrived_s: float) -> TurnTrace | None:
    """The request's trace; None while traces are off."""
    tracer = tracing.tracer()
    if tracer is None:
        return None
    if (made := request.get(_TRACE)) is None:  # a request with several prompts has one
        made = request[_TRACE] = TurnTrace(tracer, request, tenant, arrived_s)
    return made


def caller_context(request: web.Request) -> TraceContext | None:
    """The trace context of the caller, if it sent a valid one."""
    parents = request.headers.getall("traceparent", ())
    return trace_context.from_headers(parents, request.headers.getall("tracestate", ())) if parents else None


def trace_hints(request: web.Request, tenant: str, arrived_s: float) -> HintTrace | None:
    """The trace of a request with hints; None: it is not traced."""
    tracer = tracing.tracer()
    if tracer is None:
        return None
    parent = caller_context(request)
    context = tracer.root(parent, tenant)
    return None if context is None else HintTrace(tracer, context, parent, tenant, arrived_s)


@dataclass(frozen=True, slots=True)
class HintTrace:
    """A traced request with hints. The turns that use them are linked to it, and traced."""

    tracer: Tracer
    context: TraceContext
    parent: TraceContext | None
    tenant: str
    arrived_s: float

    def end(self, request_id: str, advisory_ids: list[str], sessions: list[SessionKey], now: float) -> None:
        """The hints are queued for the schedulers."""
        attributes: dict[str, Value] = {
            "gen_ai.provider.name": "upbeat",
            "gen_ai.conversation.id": self.tracer.session(sessions[0]),
            "upbeat.request_id": request_id,
            "upbeat.tenant": self.tenant,
            "upbeat.hints": len(sessions),
            "upbeat.advisory_ids": advisory_ids[:16],
        }
        parent_id = self.parent.span_id if self.parent is not None else ""
        self.tracer.record(Span("advise", self.context, parent_id, self.arrived_s, now, Kind.SERVER, attributes))
