"""A channel that carries KV (an SSD, a link, a bus): one job at a time; demand interrupts prefetches."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from loadtest.simulate.events import Events

#: Urgency of a job: (class, priority); a lower key interrupts.
Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class Job:
    """A transfer that takes `left_s` more seconds. done: called at its end, unless cancelled."""

    left_s: float
    key: Key
    done: Callable[[], None]
    cancelled: bool = False
    finished: bool = False
    entry: int = 0


class Channel:
    """See the module. An interrupted job continues later where it stopped."""

    def __init__(self, events: Events, bytes_per_s: float) -> None:
        self._events, self.bytes_per_s = events, bytes_per_s
        self._queue: list[tuple[Key, int, Job]] = []
        self._count = self._version = 0
        self._now: Job | None = None
        self._since = 0.0
        #: Bytes sent so far, cancelled jobs included.
        self.bytes = 0.0

    def send(self, bytes_: float, key: Key, done: Callable[[], None]) -> Job:
        """Queue a transfer."""
        self.bytes += bytes_
        job = Job(bytes_ / self.bytes_per_s, key, done)
        self._push(job)
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a job, unless it has finished."""
        if job.finished or job.cancelled:
            return
        job.cancelled = True
        if job is self._now:
            self._pause(drop=True)
            self._next()

    def _push(self, job: Job) -> None:
        self._count += 1
        job.entry = self._count
        heapq.heappush(self._queue, (job.key, job.entry, job))
        if self._now is not None and job.key < self._now.key:
            self._pause()
        if self._now is None:
            self._next()

    def _pause(self, drop: bool = False) -> None:
        job = self._now
        assert job is not None
        job.left_s = max(job.left_s - (self._events.now - self._since), 0.0)
        self._now = None
        self._version += 1
        if not drop:
            heapq.heappush(self._queue, (job.key, job.entry, job))

    def _next(self) -> None:
        while self._queue:
            _, entry, job = heapq.heappop(self._queue)
            if job.entry == entry and not job.cancelled and not job.finished:
                self._now, self._since = job, self._events.now
                self._version += 1
                self._events.at(self._events.now + job.left_s, partial(self._over, self._version))
                return

    def _over(self, version: int) -> None:
        if version != self._version or self._now is None:
            return
        job, self._now = self._now, None
        job.finished = True
        self._next()
        job.done()
