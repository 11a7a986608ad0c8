"""The order of a device's prefills when models have targets for the first token (Prism, section 6.2, Algorithm 2).

Moore-Hodgson over the requests of all models that have no token yet: in order of deadline (arrival plus target), each
takes what is left of its prompt at its model's pace and of its model's activation; when the newest would be late, the
longest leaves the schedule. So the fewest are late. Those that left follow the others, by due time (`batching.due_s`).
Past its deadline and its due time a request is never left behind again, so nobody waits for ever.

The deadline of a request without a target is its due time, and it never leaves; without any target the order is that of
`worker.core.batching`. Priorities, then shares of tenants, come before all of this.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from worker.core.batching import Computes, due_s
from worker.core.pace import Pace

#: (whether it left the schedule, deadline or due time): smaller goes first.
Rank = tuple[bool, float]
#: Time between two looks at all requests, in seconds: the least, and for each request.
LOOK_S, LOOK_EACH_S = 0.02, 1e-4


class Waits(Computes, Protocol):
    """The part of a sequence that its order needs."""

    @property
    def spoken(self) -> bool: ...
    @property
    def to_compute(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A request without a token. Smaller priorities first. deadline_s: None: it has no target. cost_s: time that the
    device needs for it."""

    key: Hashable
    priority: int
    deadline_s: float | None
    due_s: float
    cost_s: float

    def must(self, now: float) -> bool:
        """Whether it cannot leave the schedule."""
        return self.deadline_s is None or now >= max(self.deadline_s, self.due_s)

    def ends_s(self, now: float) -> float:
        """The time that it is ordered by in the schedule."""
        if self.deadline_s is None:
            return self.due_s
        return max(self.deadline_s, self.due_s) if self.must(now) else self.deadline_s


def late(jobs: Iterable[Job], now: float) -> set[Hashable]:
    """Keys of those that leave the schedule. Each priority takes the device after all more urgent ones."""
    left: set[Hashable] = set()
    busy_s = now
    ordered = sorted(jobs, key=lambda job: (job.priority, job.ends_s(now)))
    for _, same in itertools.groupby(ordered, key=lambda job: job.priority):
        may_leave: list[tuple[float, int, Job]] = []  # longest first
        for number, job in enumerate(same):
            busy_s += job.cost_s
            if job.must(now):
                continue
            heapq.heappush(may_leave, (-job.cost_s, number, job))
            while busy_s > job.ends_s(now) and may_leave and job.key not in left:
                _, _, longest = heapq.heappop(may_leave)
                left.add(longest.key)
                busy_s -= longest.cost_s
    return left


class Arbitration:
    """One device's order. Its engines join it."""

    def __init__(self) -> None:
        #: Requests that left the schedule, and a number that changes with them.
        self.late: set[Hashable] = set()
        self.version = 0
        self.now = 0.0
        self._jobs: list[Callable[[], Iterable[Job]]] = []
        self._due_s = -math.inf

    def join(self, jobs: Callable[[], Iterable[Job]]) -> int:
        """Add an engine, with its requests that have no token. Returns its number."""
        self._jobs.append(jobs)
        return len(self._jobs)

    def look(self, now: float) -> None:
        """Make the schedule again if that is due."""
        self.now = now
        if now < self._due_s:
            return
        jobs = [job for each in self._jobs for job in each()]
        found = late(jobs, now)
        self._due_s = now + max(LOOK_S, len(jobs) * LOOK_EACH_S)
        if found != self.late:
            self.late = found
            self.version += 1


class Order:
    """The order of one engine's sequences. Without arbitration no model has a target."""

    def __init__(self) -> None:
        self.arbitration: Arbitration | None = None
        self._target_s, self._number = 0.0, 0
        self._activation_s: Callable[[], float] = lambda: 0.0

    def arbitrate(
        self,
        arbitration: Arbitration,
        target_s: float,
        live: Callable[[], Iterable[Waits]],
        pace: Pace,
        activation_s: Callable[[], float],
    ) -> None:
        """Join a device's arbitration. target_s: of the model for the first token; 0: none. live: its sequences.
        activation_s: what is left of its activation."""
        self.arbitration, self._target_s, self._activation_s = arbitration, target_s, activation_s

        def jobs() -> Iterable[Job]:
            token_s, coming_s = pace.prefill_token_s, activation_s()
            return [self._job(s, coming_s + s.to_compute * token_s) for s in live() if not s.spoken]

        self._number = arbitration.join(jobs)

    def look(self, now: float) -> None:
        """See `Arbitration.look`."""
        if self.arbitration is not None:
            self.arbitration.look(now)

    @property
    def version(self) -> int:
        """Changes when sequences may rank differently."""
        return self.arbitration.version if self.arbitration else 0

    def rank(self, s: Waits, alone_s: float) -> Rank:
        """See `Rank`. alone_s: what its work takes alone."""
        if self.arbitration is None or not self._target_s or s.spoken:
            return False, due_s(s, alone_s)
        job = self._job(s, alone_s)
        return (True, job.due_s) if job.key in self.arbitration.late else (False, job.ends_s(self.arbitration.now))

    def memory_rank(self, s: Waits, alone_s: float) -> tuple[float, ...]:
        """The order in which requests of a device get memory and steps, over all models: smaller first."""
        if self.arbitration is None:
            return s.request.priority, s.arrival_s
        return s.request.priority, *self.rank(s, alone_s)

    def deadline(self, s: Waits, alone_s: float) -> tuple[float, ...]:
        """(priority, deadline): a target's, or without one the due time; where no model of the device has a target, the
        arrival. alone_s: what its work takes alone."""
        if self.arbitration is None:
            return s.request.priority, s.arrival_s
        return s.request.priority, s.arrival_s + self._target_s if self._target_s else due_s(s, alone_s)

    def _job(self, s: Waits, cost_s: float) -> Job:
        deadline_s = s.arrival_s + self._target_s if self._target_s else None
        return Job((self._number, s.arrival), s.request.priority, deadline_s, due_s(s, cost_s), cost_s)
