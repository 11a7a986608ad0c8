"""Decides how long a connection may take to send a request's headers and to read what is written to it.

Not here: idle connections (`gateway.idle_s`) and bodies (`core.bodies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A peer that reads this much within `write_s` is slow but not stuck: about 1 KB a second.
PROGRESS_BYTES = 32 << 10
Late = Literal["headers", "write"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds to send a request's headers, and to read what is written."""

    header_s: float
    write_s: float


class Deadlines:
    """The deadlines of one connection. Times are seconds on the caller's clock."""

    __slots__ = ("_answering", "_head_since_s", "_limits", "_stuck_bytes", "_stuck_since_s")

    def __init__(self, limits: Limits, now_s: float) -> None:
        """The connection has opened; its first request's headers are due."""
        self._limits = limits
        self._answering = False
        #: Since when headers are due; None: the next request has not begun, or a request is being answered.
        self._head_since_s: float | None = now_s
        #: Since when the write buffer has made no progress, and its largest size since; None: it was empty at the last
        #: look.
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
        """The answer is complete."""
        self._answering = False

    def took(self) -> None:
        """The peer has read (nearly) everything that was written."""
        self._stuck_since_s = None

    def late(self, now_s: float, waiting_bytes: int) -> Late | None:
        """The deadline that has passed, or None. waiting_bytes: size of the write buffer."""
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
