"""What a framework's hooks tell, turned into hints (SYMPHONY, section 3.1): who asks now, who may ask next, and when nothing more comes.

As soon as an agent asks, those that may follow it are advised, each with the time that it took them lately. When the run ends,
hints that did not come true are withdrawn. The server's own call graph does the same from requests alone (docs/agents.md); hooks
know handoffs, tools and branches before the first run was ever seen.
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

#: Runs that are remembered; the one that began first is forgotten.
MAX_RUNS = 1024
#: An agent with more possible successors than this says too little about each.
MAX_FOLLOWERS = 16


@dataclass
class _Run:
    """Hints that have not come true: by session, what they were expected after, and when they were given."""

    open: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)


class Workflow:
    """The hints of one workflow, for any number of runs at once, from any thread. Gives hints through `client`; never raises for a name."""

    def __init__(
        self, client: HintClient, name: str, *, priority: int = 0, model_id: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.client, self.name = client, name_of(name)
        self._priority, self._model_id, self._clock = priority, model_id, clock
        self._runs: dict[str, _Run] = {}
        self._pace = Pace()
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """A lock for this process. `lock` may guard small tables of the hooks too; nothing here is called with it held."""
        self.lock = threading.RLock()

    def hop(self, agent: str, run: str) -> Hop:
        """This agent in this run."""
        return Hop(self.name, str(agent), str(run))

    @contextmanager
    def run(self, run: str) -> Iterator[str]:
        """Everything inside is this run (`in_run`); at its end, hints that did not come true are withdrawn."""
        with in_run(run) as name:
            try:
                yield name
            finally:
                self.ends(name)

    def asks(self, hop: Hop, may_follow: Iterable[str] = ()) -> None:
        """This agent's request is being made; these agents may ask when it is done."""
        now = self._clock()
        with self.lock:
            came_true = self._of(hop.run).open.pop(hop.session_id, None)
            if came_true is not None:
                self._pace.note(came_true[0], now - came_true[1])
        for agent in list(dict.fromkeys(may_follow))[:MAX_FOLLOWERS]:
            self._hint(self.hop(agent, hop.run), (hop.agent, name_of(agent)), now)

    def asks_after(self, hop: Hop, step: str) -> None:
        """This agent will ask once this step (a tool, a retrieval) is done."""
        self._hint(hop, (hop.agent, "", step), self._clock())

    def follows(self, hop: Hop, after: str) -> None:
        """This agent is the next to ask, after that one."""
        self._hint(hop, (name_of(after), hop.agent), self._clock())

    def ends(self, run: str) -> None:
        """Nothing more comes of this run: hints that did not come true are withdrawn."""
        with self.lock:
            left = self._runs.pop(name_of(run), None)
        for session_id in left.open if left is not None else ():
            self.client.invalidate(session_id)

    def _hint(self, hop: Hop, after: tuple[str, ...], now: float) -> None:
        with self.lock:
            expected_s = self._pace.expected_s(after)
            self._of(hop.run).open[hop.session_id] = (after, now)
        self.client.advise(hop.session_id, model_id=self._model_id, expected_arrival=expected_s, priority=self._priority)

    def _of(self, run: str) -> _Run:
        known = self._runs.setdefault(run, _Run())
        if len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        return known
