"""How long one connection may take: to send a request's headers, and to take what is written to it.

A connection that rests between two requests, and a body, have deadlines elsewhere (`gateway.idle_s`, `gateway.intake`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Whoever has taken so much of what waits for him within `write_s` is slow, and has not stopped: about 1 KB a second.
PROGRESS_BYTES = 32 << 10
Late = Literal["headers", "write"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for a request's headers, and for taking what is written."""

    header_s: float
    write_s: float


class Deadlines:
    """One connection's. Times are seconds on the caller's clock."""

    __slots__ = ("_answering", "_head_since_s", "_limits", "_stuck_bytes", "_stuck_since_s")

    def __init__(self, limits: Limits, now_s: float) -> None:
        """The connection is open, and its first request's headers are awaited from now on."""
        self._limits = limits
        self._answering = False
        #: Since when headers are awaited; None: nothing of the next request has come yet, or a request is being answered.
        self._head_since_s: float | None = now_s
        #: Since when what is written waits, and how much it was at most since; None: nothing waited when it was last looked at.
        self._stuck_since_s: float | None = None
        self._stuck_bytes = 0

    def heard(self, now_s: float) -> None:
        """Bytes came."""
        if self._head_since_s is None and not self._answering:
            self._head_since_s = now_s

    def began(self) -> None:
        """Headers are complete, and their request is being answered."""
        self._answering, self._head_since_s = True, None

    def ended(self) -> None:
        """Its answer is made."""
        self._answering = False

    def took(self) -> None:
        """The peer has taken (nearly) all that was written."""
        self._stuck_since_s = None

    def late(self, now_s: float, waiting_bytes: int) -> Late | None:
        """Which deadline has passed; None: no one. waiting_bytes: what is written and could not be sent yet."""
        if self._head_since_s is not None and now_s - self._head_since_s > self._limits.header_s:
            return "headers"
        if not waiting_bytes:
            self._stuck_since_s = None
        elif self._stuck_since_s is None or waiting_bytes <= self._stuck_bytes - PROGRESS_BYTES:
            self._stuck_since_s, self._stuck_bytes = now_s, waiting_bytes
        elif now_s - self._stuck_since_s > self._limits.write_s:
            return "write"
        else:
            self._stuck_bytes = max(self._stuck_bytes, waiting_bytes)
        return None
