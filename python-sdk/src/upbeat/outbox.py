"""What waits to be sent, what goes next, and what is not worth sending any more. Pure: times are arguments.

At most one hint of a kind waits for a session: a newer one takes its place. An invalidation also takes away the advisory
that waits. Advisories travel together, invalidations alone, all in the order in which they were given.

Invariant: every hint that was put is waiting, under way, or in exactly one of the counters `sent`, `dropped`, `failed`, `merged`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from upbeat.hints import MAX_BATCH, Advisory, Invalidation


@dataclass(frozen=True)
class Waiting:
    """A hint and when it was given."""

    hint: Advisory | Invalidation
    since_s: float

    @property
    def key(self) -> tuple[str, str]:
        """Two hints with the same key say the same of the same session."""
        if isinstance(self.hint, Advisory):
            return "advise", self.hint.session_id
        return ("invalidate", self.hint.session_id) if self.hint.session_id is not None else ("withdraw", self.hint.advisory_id or "")


Batch = list[Waiting]


class Outbox:
    """The queue. `limit`: how many hints wait at most; the oldest gives way."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: Ordered, and its first is found at once however many went before it, which a plain dict does not promise.
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        self._under_way: Batch = []
        #: How many advisories travel together, at least 1.
        self._at_once = MAX_BATCH
        self.put_in = self.sent = self.dropped = self.failed = self.merged = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def put(self, hint: Advisory | Invalidation, now_s: float) -> None:
        """Queue a hint."""
        item = Waiting(hint, now_s)
        self.put_in += 1
        if isinstance(hint, Invalidation) and hint.session_id is not None and ("advise", hint.session_id) in self._waiting:
            del self._waiting[("advise", hint.session_id)]
            self.merged += 1
        if item.key in self._waiting:
            self.merged += 1
        self._waiting[item.key] = item
        self._make_room()

    def take(self, now_s: float) -> Batch:
        """What goes next, under way until `arrived`, `refused` or `give_back`; empty when nothing waits. Drops what is stale."""
        while self._waiting and len(self._under_way) < self._at_once:
            item = next(iter(self._waiting.values()))
            alone = isinstance(item.hint, Invalidation)
            if alone and self._under_way:
                break
            del self._waiting[item.key]
            if isinstance(item.hint, Advisory) and now_s - item.since_s > item.hint.lifetime_s:
                self.dropped += 1
                continue
            self._under_way.append(item)
            if alone:
                break
        return list(self._under_way)

    def arrived(self) -> None:
        """The server has what was under way."""
        self.sent += len(self._under_way)
        self._under_way = []
        self._at_once = min(MAX_BATCH, self._at_once * 2)

    def refused(self) -> None:
        """The server does not want what was under way, now or later."""
        self.failed += len(self._under_way)
        self._under_way = []

    def found_wrong(self) -> None:
        """The server says that something in what was under way is wrong. One bad hint must not spoil others: they go again by halves."""
        if len(self._under_way) <= 1:
            self.refused()
        else:
            self._at_once = len(self._under_way) // 2
            self.give_back()

    def give_back(self) -> None:
        """It did not arrive: it waits again, before everything else, unless something newer says more."""
        again: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        for item in self._under_way:
            kind, name = item.key
            if item.key in self._waiting or (kind == "advise" and ("invalidate", name) in self._waiting):
                self.merged += 1
            else:
                again[item.key] = item
        self._under_way = []
        self._waiting = again | self._waiting
        self._make_room()

    def clear(self) -> None:
        """Nobody will send these any more."""
        self.dropped += len(self._waiting)
        self._waiting.clear()

    def drop(self) -> None:
        """A hint came that nobody will send."""
        self.put_in += 1
        self.dropped += 1

    def _make_room(self) -> None:
        while len(self._waiting) > self._limit:
            self._waiting.popitem(last=False)
            self.dropped += 1

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert len(self._waiting) <= self._limit
        assert all(key == item.key for key, item in self._waiting.items())
        assert len(self._under_way) <= MAX_BATCH
        assert 1 <= self._at_once <= MAX_BATCH
        assert self.put_in == self.sent + self.dropped + self.failed + self.merged + len(self)
