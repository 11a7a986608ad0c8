"""Whether the vLLM server serves, and for how long it has made no progress.

States: *down* (nothing answers, or its engine is dead; also while it starts), *up* (it has answered, and what it serves
is known). A server that is up and answers nothing, as one that was stopped, stays up and is stalled: its requests may
go on. So does one whose engine does nothing for its requests.
"""

from __future__ import annotations

#: How long a server that is up may leave a question unanswered before it counts as stalled, in seconds: tokenising a
#: long prompt, or a busy machine, can keep it.
SILENT_S = 5.0
#: The same for an engine with requests whose figures and answers do not move: a kernel may be compiled. And how often
#: the time of computing the longest prompt it may take beside that.
STILL_S, STILL_TIMES = 30.0, 3.0


class ServerState:
    """See the module. Times are one clock's, in seconds."""

    def __init__(self) -> None:
        self.up = False
        #: Since when questions are not answered; None: the last one was.
        self._asked_s: float | None = None
        self._moved_s = 0.0

    def asks(self, now: float) -> None:
        """A question is sent."""
        if self._asked_s is None:
            self._asked_s = now

    def answered(self, now: float) -> None:
        """The server has sent something."""
        self._asked_s = None

    def rises(self, now: float) -> None:
        """It serves, and what it serves is known."""
        self.up, self._asked_s, self._moved_s = True, None, now

    def falls(self) -> None:
        """It is not there, or its engine is dead."""
        self.up, self._asked_s = False, None

    def moved(self, now: float) -> None:
        """The engine has done something, or has nothing to do."""
        self._moved_s = now

    def stalled_s(self, now: float, oldest_s: float | None, longest_prompt_s: float) -> float:
        """Seconds without progress beyond what is allowed. oldest_s: when the oldest request came, None: there is none.
        longest_prompt_s: estimated time of computing the longest prompt."""
        if not self.up:
            return 0.0
        silent = now - self._asked_s - SILENT_S if self._asked_s is not None else 0.0
        still = 0.0
        if oldest_s is not None:
            still = now - max(self._moved_s, oldest_s) - STILL_S - STILL_TIMES * longest_prompt_s
        return max(silent, still, 0.0)
