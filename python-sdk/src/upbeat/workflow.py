"""Turns the events of framework hooks into hints (SYMPHONY, section 3.1).

When an agent calls its model, the agents that may follow are advised, each with its usual delay. When the run ends,
hints that did not come true are withdrawn. The server's call graph does the same from requests alone
(docs/agents.md); hooks know handoffs, tools and branches before the first run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from upbeat.client import HintClient
from upbeat.forking import renew_in_children
from upbeat.names import Hop, name_of
from upbeat.pace import Pace
from upbeat.speaking import in_run

#: Runs that are kept; above this the oldest is dropped.
MAX_RUNS = 1024
#: Successors that are hinted for one request; the rest are ignored.
MAX_FOLLOWERS = 16


@dataclass
class _Run:
    """Hints that have not come true: session id to (key of its delay, time of the hint)."""

    open: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)


class Workflow:
    """The hints of one workflow, for any number of concurrent runs, from any thread. Sends them through `client`; any
    text is accepted as a name."""

    def __init__(
        self,
        client: HintClient,
        name: str,
        *,
        priority: int = 0,
        model_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client, self.name = client, name_of(name)
        self._priority, self._model_id, self._clock = priority, model_id, clock
        self._runs: dict[str, _Run] = {}
        self._pace = Pace()
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Create this process's lock. Hooks may guard small tables of their own with `lock`; they call no method of
        this class while they hold it."""
        self.lock = threading.RLock()

    def hop(self, agent: str, run: str) -> Hop:
        """The hop of this agent in this run."""
        return Hop(self.name, str(agent), str(run))

    @contextmanager
    def run(self, run: str) -> Iterator[str]:
        """Code in the block belongs to this run (`in_run`); at its end, open hints are withdrawn."""
        with in_run(run) as name:
            try:
                yield name
            finally:
                self.ends(name)

    def asks(self, hop: Hop, may_follow: Iterable[str] = ()) -> None:
        """This agent calls its model now; the agents `may_follow` may do so afterwards."""
        now = self._clock()
        with self.lock:
            came_true = self._of(hop.run).open.pop(hop.session_id, None)
            if came_true is not None:
                self._pace.note(came_true[0], now - came_true[1])
        for agent in list(dict.fromkeys(may_follow))[:MAX_FOLLOWERS]:
            self._hint(self.hop(agent, hop.run), (hop.agent, name_of(agent)), now)

    def asks_after(self, hop: Hop, step: str) -> None:
        """This agent calls its model after this step (a tool, a retrieval)."""
        self._hint(hop, (hop.agent, "", step), self._clock())

    def follows(self, hop: Hop, after: str) -> None:
        """This agent calls its model next, after agent `after`."""
        self._hint(hop, (name_of(after), hop.agent), self._clock())

    def ends(self, run: str) -> None:
        """The run has ended: withdraw its open hints."""
        with self.lock:
            left = self._runs.pop(name_of(run), None)
        for session_id in left.open if left is not None else ():
            self.client.invalidate(session_id)

    def _hint(self, hop: Hop, after: tuple[str, ...], now: float) -> None:
        with self.lock:
            expected_s = self._pace.expected_s(after)
            self._of(hop.run).open[hop.session_id] = (after, now)
        self.client.advise(
            hop.session_id, model_id=self._model_id, expected_arrival=expected_s, priority=self._priority
        )

    def _of(self, run: str) -> _Run:
        known = self._runs.setdefault(run, _Run())
        if len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        return known
