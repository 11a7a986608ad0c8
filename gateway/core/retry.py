"""Whether a request whose worker was lost is tried again, when, and which nodes it keeps away from.

A request that may have killed its worker does so `attempts` times in all, so that it does not kill them all; `core.quarantine` finds most
of them at the second time. Being told that no node is there is not such an attempt: the only node of a small deployment restarts within
seconds, and waiting for it is right. Nor is the death of a worker that another request is to blame for. All of it ends after `total_s`,
counted from the first failure since the request last had a token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits, in seconds where they are times."""

    #: How often a request may be given to a worker.
    attempts: int = 3
    #: From the first failure to the error.
    total_s: float = 25.0
    #: Between two askings for a node.
    pause_s: float = 0.25
    #: How long the scheduler may take before the gateway chooses by itself.
    scheduler_s: float = 1.0
    #: How long it is not asked again after that.
    scheduler_rest_s: float = 2.0
    #: How long a request waits for the stream to its worker.
    connect_s: float = 1.0
    #: How long a request waits for its worker's word that it is valid and will run, and from then on for its first token; 0: for ever.
    accept_s: float = 30.0
    first_token_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after `pause_s`."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the caller. `reason` is for a human."""

    reason: str


class Attempts:
    """The failures of one request so far. `avoid` names the nodes that failed it last and were not forgiven."""

    def __init__(self, patience: Patience, pin: str = "") -> None:
        self.patience, self.pin = patience, pin
        self.avoid: list[str] = []
        self.failed = 0
        self._first_failure_s: float | None = None

    def lost(self, node: str, now_s: float, reason: str, *, ran: bool) -> Again | GiveUp:
        """`node` failed the request. ran: it may have died of it; False when it never got it or only said "not now"."""
        self.failed += ran
        if node != self.pin and node not in self.avoid:
            self.avoid.append(node)
        if self.failed >= self.patience.attempts:
            return GiveUp(f"{reason} (attempt {self.failed} of {self.patience.attempts})")
        return self._again(now_s, 0.0 if ran else self.patience.pause_s, reason)

    @property
    def last(self) -> bool:
        """One more attempt that it may have died of, and there is no other."""
        return self.failed + 1 >= self.patience.attempts

    def innocent(self, node: str, now_s: float, reason: str) -> Again | GiveUp:
        """`node` was lost, but not by this request."""
        if node != self.pin and node not in self.avoid:
            self.avoid.append(node)
        return self._again(now_s, 0.0, reason)

    def progressed(self) -> None:
        """It has a token: what failed before is over, but for how often it may have killed a worker."""
        self._first_failure_s = None

    def no_node(self, now_s: float, reason: str) -> Again | GiveUp:
        """Nobody can take it at the moment. Forgives the avoided nodes: they may be back."""
        self.avoid.clear()
        return self._again(now_s, self.patience.pause_s, reason)

    def _again(self, now_s: float, pause_s: float, reason: str) -> Again | GiveUp:
        if self._first_failure_s is None:
            self._first_failure_s = now_s
        waited = now_s - self._first_failure_s
        if waited >= self.patience.total_s:
            return GiveUp(f"{reason} (waited {waited:.0f} s)")
        return Again(pause_s)
