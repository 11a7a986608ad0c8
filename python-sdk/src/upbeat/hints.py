"""The two hints: validation, by the server's rules so that no bad hint fails a batch, and JSON bodies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from upbeat.names import is_name

DEFAULT_TTL_S = 60.0
MAX_SECONDS = 86_400.0
MAX_PRIORITY = 1000
#: Advisories that the server accepts in one body.
MAX_BATCH = 256


class BadHint(ValueError):
    """A hint that the server would refuse. `argument`: the wrong argument."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument} {message}")
        self.argument = argument


@dataclass(frozen=True)
class Advisory:
    """This session is about to send a request. Raises BadHint if the server would refuse it.

    expected_arrival: seconds from now, or None if unknown. ttl_s: seconds after `expected_arrival` for which the hint
    counts. priority: lower is more urgent. ordered: this caller's hints come true in the order given.
    """

    session_id: str
    model_id: str | None = None
    expected_arrival: float | None = None
    ordered: bool = False
    priority: int = 0
    ttl_s: float = DEFAULT_TTL_S

    def __post_init__(self) -> None:
        _check_name("session_id", self.session_id)
        model_id = self.model_id
        if model_id is not None and not (
            isinstance(model_id, str) and 1 <= len(model_id) <= 256 and model_id.isprintable()
        ):
            raise BadHint("model_id", "must be a string of 1 to 256 printable characters or None")
        if self.expected_arrival is not None:
            _check_seconds("expected_arrival", self.expected_arrival)
        _check_seconds("ttl_s", self.ttl_s)
        if not isinstance(self.ordered, bool):
            raise BadHint("ordered", "must be True or False")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > MAX_PRIORITY:
            raise BadHint(
                "priority", f"must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY} (lower is more urgent)"
            )

    @property
    def lifetime_s(self) -> float:
        """Seconds after which the hint has expired."""
        return (self.expected_arrival or 0.0) + self.ttl_s

    def body(self, waited_s: float) -> dict[str, Any]:
        """The JSON body. waited_s: seconds in the queue, subtracted from `expected_arrival`, then from `ttl_s`."""
        body: dict[str, Any] = {"session_id": self.session_id}
        ttl_s = self.ttl_s
        if self.expected_arrival is not None:
            body["expected_arrival"] = max(0.0, self.expected_arrival - waited_s)
            waited_s = max(0.0, waited_s - self.expected_arrival)
        if (ttl_s := max(0.0, ttl_s - waited_s)) != DEFAULT_TTL_S:
            body["ttl_s"] = ttl_s
        if self.model_id is not None:
            body["model_id"] = self.model_id
        if self.ordered:
            body["ordered"] = True
        if self.priority:
            body["priority"] = self.priority
        return body


@dataclass(frozen=True)
class Invalidation:
    """Withdraws a session's advisories, or one advisory. Raises BadHint unless exactly one of the two is given."""

    session_id: str | None = None
    advisory_id: str | None = None

    def __post_init__(self) -> None:
        if (self.session_id is None) == (self.advisory_id is None):
            raise BadHint("session_id", "or advisory_id must be given, and not both")
        field, value = (
            ("session_id", self.session_id) if self.session_id is not None else ("advisory_id", self.advisory_id)
        )
        _check_name(field, value)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"session_id": self.session_id} if self.session_id is not None else {"advisory_id": self.advisory_id}


def _check_name(argument: str, value: object) -> None:
    if not is_name(value):
        raise BadHint(
            argument, f"must match [A-Za-z0-9._:-]{{1,128}} and not consist of dots alone; got {_shown(value)}"
        )


def _check_seconds(argument: str, value: object) -> None:
    good = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 <= value <= MAX_SECONDS
    )
    if not good:
        raise BadHint(argument, f"must be a number of seconds from 0 to {MAX_SECONDS:.0f}; got {_shown(value)}")


def _shown(value: object) -> str:
    """A wrong value for a message: at most 60 characters, and only the type of an object."""
    if isinstance(value, str):
        return repr(value[:60])
    return repr(value)[:60] if isinstance(value, (int, float)) else f"a {type(value).__name__}"
