"""A way that KV comes by (an SSD, a link, a bus): one job after the other, what a request waits for before what a hint wants."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from loadtest.simulate.events import Events

#: Urgency of jobs: class, priority, and of hints whether they are late (`kvstore.core.prefetch.is_late`); a lower one interrupts.
Key = tuple[int, ...]
_TAIL: Key = (0, 1 << 20)


@dataclass(slots=True, eq=False)
class Job:
    """So many seconds of a channel. done: called when they are over. Never again once `cancelled`."""

    left_s: float
    key: Key
    done: Callable[[], None]
    cancelled: bool = False
    finished: bool = False
    entry: int = field(default=0)


class Channel:
    """See the module. A job that is interrupted goes on later where it stopped."""

    def __init__(self, events: Events, bytes_per_s: float) -> None:
        self._events, self.bytes_per_s = events, bytes_per_s
        self._queue: list[tuple[Key, int, Job]] = []
        self._count = self._version = 0
        self._now: Job | None = None
        self._since = 0.0
        #: Bytes that have come or are coming.
        self.bytes = 0.0

    def send(self, bytes_: float, key: Key, done: Callable[[], None], hidden_s: float = 0.0) -> Job:
        """Bring so many bytes. The last `hidden_s` of it are not waited for: they come while earlier layers compute."""
        self.bytes += bytes_
        job = Job(bytes_ / self.bytes_per_s, key, done)
        if hidden_s > 0:
            self._hide(job, hidden_s)
        self._push(job)
        return job

    def promote(self, job: Job, key: Key, hidden_s: float) -> None:
        """A request waits for it now."""
        if job.finished or job.cancelled:
            return
        if job is self._now:
            self._pause()
        job.key = min(job.key, key)
        self._hide(job, hidden_s)
        self._push(job)

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more."""
        if job.finished or job.cancelled:
            return
        job.cancelled = True
        if job is self._now:
            self._pause(drop=True)
            self._next()

    def ahead_s(self, key: Key) -> float:
        """How long a job of this key would wait."""
        queued = sum(job.left_s for k, entry, job in self._queue if k <= key and job.entry == entry and not job.cancelled)
        running = self._now
        return queued + (max(running.left_s - (self._events.now - self._since), 0.0) if running and running.key <= key else 0.0)

    def _hide(self, job: Job, hidden_s: float) -> None:
        tail_s = min(hidden_s, job.left_s)
        job.left_s -= tail_s
        if tail_s > 0:
            self._push(Job(tail_s, _TAIL, _nothing))

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


def _nothing() -> None:
    """Nobody waits for a tail."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A session's cache on its way into DRAM. jobs: with their ways; sizes: of these in bytes; waits: what to do when it is here; rank: of
    the session then."""

    tokens: int
    rank: int
    sizes: list[tuple[Channel, float]] = field(default_factory=list)
    jobs: list[tuple[Channel, Job]] = field(default_factory=list)
    left: int = 0
    waits: list[Callable[[], None]] = field(default_factory=list)
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.cancelled = True
        for way, job in self.jobs:
            way.cancel(job)


def takes_s(parts: Iterable[tuple[Channel, float]], key: Key) -> float:
    """How long until so many bytes have come by each way, behind all that goes before `key`."""
    return max((way.ahead_s(key) + bytes_ / way.bytes_per_s for way, bytes_ in parts), default=0.0)
