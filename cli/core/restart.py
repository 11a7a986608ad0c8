"""When a service that died is restarted, and when the launcher gives up.

The delay doubles from FIRST_DELAY_S to LONGEST_DELAY_S, and starts over once a service has run for STABLE_S. After
REPEATS ends at once in a row with the same error, or the first with status 2 (wrong usage or configuration), its log is
shown. The launcher then gives up if the stack has never served. Else it goes on trying: others still serve, and a lost
peer, disk or model may come back. A service that asks to be started again (status START_AGAIN) has not failed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from contracts.exits import START_AGAIN, WRONG_USAGE

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
STABLE_S = 30.0
#: A service of ours that ran for less "ended at once"; importing its libraries takes a few seconds.
AT_ONCE_S = 15.0
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows an exit. delay_s: until the restart; None: give up."""

    delay_s: float | None
    show_log: bool = False


class RestartPolicy:
    """One service's history. Invariant: FIRST_DELAY_S <= the next delay <= LONGEST_DELAY_S."""

    def __init__(self, at_once_s: float = AT_ONCE_S) -> None:
        """at_once_s: a service that ran for less ended at once."""
        self._at_once_s = at_once_s
        self._next_delay_s = FIRST_DELAY_S
        self._last_error: tuple[int, str] | None = None
        self._repeats = 0

    def exited(self, *, alive_s: float, status: int, last_line: str, has_served: bool) -> Verdict:
        """The verdict on an unrequested exit.

        status: `Popen.returncode`, negative for a signal. last_line: of the service's log; its numbers are ignored, as
        times differ. has_served: the stack has been ready before.
        """
        if alive_s >= STABLE_S:
            self._next_delay_s = FIRST_DELAY_S
        if status == START_AGAIN:
            self._last_error, self._repeats = None, 0
            return Verdict(self._delay_s())
        error = (status, re.sub(r"[0-9]+", "#", last_line))
        self._repeats = self._repeats + 1 if alive_s < self._at_once_s and error == self._last_error else 1
        self._last_error = error if alive_s < self._at_once_s else None
        hopeless = 1 if status == WRONG_USAGE else REPEATS
        if self._repeats >= hopeless and alive_s < self._at_once_s and not has_served:
            return Verdict(None, show_log=True)
        return Verdict(self._delay_s(), show_log=self._repeats == hopeless and alive_s < self._at_once_s)

    def _delay_s(self) -> float:
        delay_s = self._next_delay_s
        self._next_delay_s = min(LONGEST_DELAY_S, 2 * delay_s)
        return delay_s

    def validate(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        assert FIRST_DELAY_S <= self._next_delay_s <= LONGEST_DELAY_S
