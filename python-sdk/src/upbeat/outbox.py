"""The queue of hints: which are sent next, and which have expired. Pure: times are arguments.

At most one hint of a kind waits for a session: a newer one replaces it. An invalidation also removes the waiting
advisory. Advisories are sent in batches, invalidations alone, in the order given.

Invariant: every hint that was put is waiting, in flight, or in exactly one of the counters `sent`, `dropped`, `failed`,
`merged`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from upbeat.hints import MAX_BATCH, Advisory, Invalidation


@dataclass(frozen=True)
class Waiting:
    """A hint and the time at which it was queued."""

    hint: Advisory | Invalidation
    since_s: float

    @property
    def key(self) -> tuple[str, str]:
        """(kind, id): a newer hint replaces a waiting one with the same key."""
        if isinstance(self.hint, Advisory):
            return "advise", self.hint.session_id
        return (
            ("invalidate", self.hint.session_id)
            if self.hint.session_id is not None
            else ("withdraw", self.hint.advisory_id or "")
        )


Batch = list[Waiting]


class Outbox:
    """The queue. limit: most hints that wait; above it the oldest is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: OrderedDict: removing the first entry is O(1), which a plain dict does not guarantee.
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        self._in_flight: Batch = []
        #: Batch size: halved by `found_wrong`, doubled by `arrived`; 1 to MAX_BATCH.
        self._at_once = MAX_BATCH
        self.put_in = self.sent = self.dropped = self.failed = self.merged = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    def put(self, hint: Advisory | Invalidation, now_s: float) -> None:
        """Queue a hint."""
        item = Waiting(hint, now_s)
        self.put_in += 1
        if (
            isinstance(hint, Invalidation)
            and hint.session_id is not None
            and ("advise", hint.session_id) in self._waiting
        ):
            del self._waiting[("advise", hint.session_id)]
            self.merged += 1
        if item.key in self._waiting:
            self.merged += 1
        self._waiting[item.key] = item
        self._make_room()

    def take(self, now_s: float) -> Batch:
        """The next batch, in flight until `arrived`, `refused`, `found_wrong` or `give_back`; empty if none waits.
        Drops expired advisories."""
        while self._waiting and len(self._in_flight) < self._at_once:
            item = next(iter(self._waiting.values()))
            alone = isinstance(item.hint, Invalidation)
            if alone and self._in_flight:
                break
            del self._waiting[item.key]
            if isinstance(item.hint, Advisory) and now_s - item.since_s > item.hint.lifetime_s:
                self.dropped += 1
                continue
            self._in_flight.append(item)
            if alone:
                break
        return list(self._in_flight)

    def arrived(self) -> None:
        """The server accepted the batch in flight."""
        self.sent += len(self._in_flight)
        self._in_flight = []
        self._at_once = min(MAX_BATCH, self._at_once * 2)

    def refused(self) -> None:
        """The server refused the batch in flight for good."""
        self.failed += len(self._in_flight)
        self._in_flight = []

    def found_wrong(self) -> None:
        """A hint of the batch in flight is invalid: retry in half batches, so that it does not fail the others."""
        if len(self._in_flight) <= 1:
            self.refused()
        else:
            self._at_once = len(self._in_flight) // 2
            self.give_back()

    def give_back(self) -> None:
        """The batch did not arrive: requeue it first, except hints that a newer one replaces."""
        again: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        for item in self._in_flight:
            kind, name = item.key
            if item.key in self._waiting or (kind == "advise" and ("invalidate", name) in self._waiting):
                self.merged += 1
            else:
                again[item.key] = item
        self._in_flight = []
        self._waiting = again | self._waiting
        self._make_room()

    def clear(self) -> None:
        """Drop all waiting hints."""
        self.dropped += len(self._waiting)
        self._waiting.clear()

    def drop(self) -> None:
        """Count a hint that is dropped at once."""
        self.put_in += 1
        self.dropped += 1

    def _make_room(self) -> None:
        while len(self._waiting) > self._limit:
            self._waiting.popitem(last=False)
            self.dropped += 1

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert len(self._waiting) <= self._limit
        assert all(key == item.key for key, item in self._waiting.items())
        assert len(self._in_flight) <= MAX_BATCH
        assert 1 <= self._at_once <= MAX_BATCH
        assert self.put_in == self.sent + self.dropped + self.failed + self.merged + len(self)
