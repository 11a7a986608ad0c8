"""Decides whether a request whose worker was lost is retried, when, and which nodes it avoids.

A request that may have killed its workers gets at most `attempts`; `core.quarantine` finds most culprits at the second.
Not counted: no node being available (the only node of a small deployment restarts within seconds), and a worker killed
by another request. Retries end `total_s` after the first failure since the request's last token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """The limits, in seconds where they are times."""

    #: Attempts of a request, counting only those that may have killed a worker.
    attempts: int = 3
    #: From the first failure to the error.
    total_s: float = 25.0
    #: Between two placements.
    pause_s: float = 0.25
    #: How long a scheduler may take before the gateway asks the next one, or chooses a node itself.
    scheduler_s: float = 1.0
    #: How long a scheduler is skipped after that.
    scheduler_rest_s: float = 2.0
    #: How long a request waits for the stream to its worker.
    connect_s: float = 1.0
    #: How long a request waits for its worker to accept it, and then for its first token; 0: for ever.
    accept_s: float = 30.0
    first_token_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Again:
    """Retry after `pause_s`."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the request. reason: for a human."""

    reason: str


class Attempts:
    """The failures of one request. avoid: nodes that failed it, until `no_node` clears them."""

    def __init__(self, retry_limits: RetryLimits, pin: str = "") -> None:
        self.retry_limits, self.pin = retry_limits, pin
        self.avoid: list[str] = []
        self.failed = 0
        self._first_failure_s: float | None = None

    def lost(self, node: str, now_s: float, reason: str, *, ran: bool) -> Again | GiveUp:
        """`node` failed the request. ran: the request may have killed it; False when the node never got the request or
        said "not now"."""
        self.failed += ran
        if node != self.pin and node not in self.avoid:
            self.avoid.append(node)
        if self.failed >= self.retry_limits.attempts:
            return GiveUp(f"{reason} (attempt {self.failed} of {self.retry_limits.attempts})")
        return self._again(now_s, 0.0 if ran else self.retry_limits.pause_s, reason)

    @property
    def last(self) -> bool:
        """The next counted failure is the last one allowed."""
        return self.failed + 1 >= self.retry_limits.attempts

    @property
    def disturbed(self) -> bool:
        """An attempt failed since the last token."""
        return self._first_failure_s is not None

    def innocent(self, node: str, now_s: float, reason: str) -> Again | GiveUp:
        """`node` was lost, but not because of this request."""
        if node != self.pin and node not in self.avoid:
            self.avoid.append(node)
        return self._again(now_s, 0.0, reason)

    def progressed(self) -> None:
        """The request has a new token: earlier failures are forgotten, except the number of counted attempts."""
        self._first_failure_s = None

    def no_node(self, now_s: float, reason: str) -> Again | GiveUp:
        """No node can take the request now. Clears `avoid`, because those nodes may be back."""
        self.avoid.clear()
        return self._again(now_s, self.retry_limits.pause_s, reason)

    def _again(self, now_s: float, pause_s: float, reason: str) -> Again | GiveUp:
        if self._first_failure_s is None:
            self._first_failure_s = now_s
        waited = now_s - self._first_failure_s
        if waited >= self.retry_limits.total_s:
            return GiveUp(f"{reason} (waited {waited:.0f} s)")
        return Again(pause_s)
