"""A client-side balancer: chooses one of several equal endpoints for a request. Pure.

- round-robin: in turn.
- sticky: a session stays at the endpoint of its first request; first requests go in turn.
- sticky-least-busy: the same, but first requests go to the least busy endpoint.
- least-busy: the endpoint with the fewest requests in flight, the lowest number among equals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Balance = Literal["round-robin", "sticky", "sticky-least-busy", "least-busy"]


@dataclass(slots=True)
class Balancer:
    """Picks among `count` endpoints, numbered from 0. busy: requests in flight at each, counted by `pick` and
    `done`."""

    count: int
    balance: Balance = "round-robin"
    busy: list[int] = field(default_factory=list)
    _next: int = 0
    _home: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("a balancer needs an endpoint")
        self.busy = [0] * self.count

    def pick(self, session_id: str) -> int:
        """The endpoint for this session's next request; counts it as in flight."""
        if self.balance.startswith("sticky") and session_id in self._home:
            chosen = self._home[session_id]
        elif self.balance.endswith("least-busy"):
            chosen = self._home[session_id] = self.busy.index(min(self.busy))
        else:
            chosen = self._home[session_id] = self._next
            self._next = (self._next + 1) % self.count
        self.busy[chosen] += 1
        return chosen

    def done(self, endpoint: int) -> None:
        """A request to `endpoint` has ended."""
        self.busy[endpoint] -= 1
