"""A span as services record it, and what sends it (`runtime.tracing`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from contracts.trace_context import TraceContext

Value = str | bool | int | float | Sequence[str]


class Kind(Enum):
    """OpenTelemetry's kinds of spans that are used here."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(slots=True)
class Span:
    """A span that has ended. began_s, ended_s, and the events' times: monotonic. parent_id: empty for the first of a
    trace. error: why it failed; empty: it did not. Nothing here may hold a prompt's or an answer's text."""

    name: str
    context: TraceContext
    parent_id: str
    began_s: float
    ended_s: float
    kind: Kind = Kind.INTERNAL
    attributes: dict[str, Value] = field(default_factory=dict)
    events: Sequence[tuple[str, float]] = ()
    links: Sequence[TraceContext] = ()
    error: str = ""


class Exporter(Protocol):
    """Sends spans; used by one thread."""

    def export(self, spans: Sequence[Span]) -> bool:
        """Whether they were sent. May take long."""
        ...

    def close(self) -> None:
        """Interrupt `export`, from another thread."""
        ...
