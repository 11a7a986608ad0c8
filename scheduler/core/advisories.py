"""Pending hints: their request has not come. At most one per session, with its device and what its store was told.

A hint's life: placed -> used (its request came) | invalidated | expired | dropped. A false hint costs only prefetch.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from contracts.ids import SessionKey
from scheduler.core.columns import urgency_class

_Sessions = TypeVar("_Sessions", bound=dict[SessionKey, None])
MAX_PENDING = 200_000
#: Moves of one hint at most.
MOVES = 2
#: The store is not told of an arrival that is earlier by less than this, in seconds.
_SOONER_S = 1.0


@dataclass(frozen=True, slots=True)
class Hint:
    """A caller says that this session is about to send a request. Times are on the scheduler's clock.

    arrival_s: expected arrival; None: unknown. expires_s: when the hint ends. pin: the node or device it must go to.
    address: digest of the caller's, for trust. chance: the probability that the hint itself states. caller: the record
    of trust it counts for; empty: the tenant's. trace: passed on; empty: it is not traced.
    """

    session: SessionKey
    advisory_id: str
    model: str = ""
    arrival_s: float | None = None
    expires_s: float = 0.0
    priority: int = 0
    pin: str = ""
    address: str = ""
    chance: float = 1.0
    caller: str = ""
    trace: str = ""

    @property
    def on_trust_of(self) -> str:
        """The record of trust that decides how it is treated and on which its end counts."""
        return self.caller or self.session.tenant

    def lead_s(self, now: float) -> float:
        """Seconds until its request is expected; infinity: unknown."""
        return math.inf if self.arrival_s is None else max(self.arrival_s - now, 0.0)


@dataclass(frozen=True, slots=True)
class Sent:
    """What the store was last told of a hint. at_s: when first told. priority: with the penalty for low trust."""

    at_s: float
    priority: int
    arrival_s: float | None
    expires_s: float

    def is_outdated(self, hint: Hint, priority: int, now: float) -> bool:
        """Whether the store must be told again: another priority, an earlier arrival, or more than twice the life left.

        A later arrival does not matter: the cache is there by then.
        """
        told_s = self.arrival_s if self.arrival_s is not None else -math.inf  # without a time the store begins at once
        sooner = hint.arrival_s is not None and hint.arrival_s < told_s - _SOONER_S
        return priority != self.priority or sooner or hint.expires_s - now > 2.0 * (self.expires_s - now)


@dataclass(frozen=True, slots=True)
class Pending:
    """A hint whose request has not come.

    node: the device chosen for its turn. placed_s: when it was placed, or last counted as false for being renewed.
    chance: the weight with which it counts as expected work. sent: what the store was told; None: nothing, as it was
    not prefetched. left: devices it has moved away from. looked_s: when a move was last considered.
    """

    hint: Hint
    node: str
    placed_s: float
    chance: float = 1.0
    sent: Sent | None = None
    left: tuple[str, ...] = ()
    looked_s: float = -math.inf

    @property
    def session(self) -> SessionKey:
        """The hint's session."""
        return self.hint.session

    @property
    def may_move(self) -> bool:
        """Whether it may move to another device, now or later."""
        return not self.hint.pin and len(self.left) < MOVES

    @property
    def urgency(self) -> int:
        """The hint's urgency class (`columns.urgency_class`)."""
        return urgency_class(self.hint.priority)


def in_order(hints: Iterable[Hint], now: float) -> list[Hint]:
    """The order in which hints of one list are placed: most urgent first, then earliest expected arrival."""
    return sorted(hints, key=lambda h: (h.priority, now if h.arrival_s is None else h.arrival_s))


def merged(old: Hint, new: Hint, now: float) -> Hint:
    """Two hints of one session as one: the earliest arrival still ahead, the most urgent priority, the latest expiry,
    the newer id."""
    coming = [a for a in (old.arrival_s, new.arrival_s) if a is not None and a >= now]
    return replace(
        new,
        model=new.model or old.model,
        arrival_s=min(coming, default=new.arrival_s),
        expires_s=max(old.expires_s, new.expires_s),
        priority=min(old.priority, new.priority),
        pin=new.pin or old.pin,
        chance=max(old.chance, new.chance),
        trace=new.trace or old.trace,
    )


class Advisories:
    """The pending hints, and counts of how hints ended (`outcomes`).

    expect: called with device, urgency class and change in expected requests. most: hints kept; beyond that the tenant
    with most loses its oldest.
    """

    def __init__(
        self, expect: Callable[[str, int, float], None] = lambda node, urgency, requests: None, most: int = MAX_PENDING
    ) -> None:
        self._most = most
        self._pending: dict[SessionKey, Pending] = {}
        # Ordered: the oldest is found at once, however many before it have gone.
        self._per_tenant: dict[str, OrderedDict[SessionKey, None]] = {}
        self._ids: dict[tuple[str, str], SessionKey] = {}
        self._per_node: dict[str, dict[SessionKey, None]] = {}
        self._movable: dict[str, OrderedDict[SessionKey, None]] = {}  #: by node
        self._ends: list[tuple[float, SessionKey]] = []
        self._expect = expect
        self.outcomes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, session: SessionKey) -> Pending | None:
        """The session's pending hint."""
        return self._pending.get(session)

    def on_node(self, node: str) -> int:
        """Number of hints pending on this device."""
        return len(self._per_node.get(node, ()))

    def of_node(self, node: str) -> Iterator[Pending]:
        """The hints pending on this device, in the order of their placement. Do not place hints while iterating."""
        return (self._pending[session] for session in self._per_node.get(node, ()))

    def movable(self, node: str) -> Iterator[Pending]:
        """Those of them that may move, in the same order."""
        return (self._pending[session] for session in self._movable.get(node, ()))

    def place(self, pending: Pending) -> list[Pending]:
        """Keep a placed hint; it replaces the session's older one. Returns the hints that are dropped for it."""
        self._drop(pending.session)
        dropped: list[Pending] = []
        while len(self._pending) >= self._most:
            most = max(self._per_tenant, key=lambda tenant: len(self._per_tenant[tenant]))
            oldest = self._drop(next(iter(self._per_tenant[most])))
            dropped += [oldest] if oldest else []
            self.outcomes["dropped"] += 1
        session, hint = pending.session, pending.hint
        self._pending[session] = pending
        self._ids[(session.tenant, hint.advisory_id)] = session
        self._per_node.setdefault(pending.node, {})[session] = None
        self._per_tenant.setdefault(session.tenant, OrderedDict())[session] = None
        if pending.may_move:
            self._movable.setdefault(pending.node, OrderedDict())[session] = None
        self._expect(pending.node, pending.urgency, pending.chance)
        heapq.heappush(self._ends, (hint.expires_s, session))
        if len(self._ends) > 2 * len(self._pending) + 64:
            self._ends = [(p.hint.expires_s, s) for s, p in self._pending.items()]
            heapq.heapify(self._ends)
        return dropped

    def use(self, session: SessionKey) -> Pending | None:
        """The session's request came: remove and return its hint."""
        pending = self._drop(session)
        if pending:
            self.outcomes["used"] += 1
        return pending

    def invalidate(self, session: SessionKey | None, tenant: str, advisory_id: str) -> Pending | None:
        """Remove and return a withdrawn hint, named by its session or by its id within the tenant."""
        key = session if session is not None else self._ids.get((tenant, advisory_id))
        pending = self._drop(key) if key is not None else None
        if pending:
            self.outcomes["invalidated"] += 1
        return pending

    def late(self, now: float) -> bool:
        """Whether there are expired hints."""
        return bool(self._ends) and self._ends[0][0] <= now

    def expire(self, now: float, most: int = MAX_PENDING) -> list[Pending]:
        """Remove and return the expired hints, at most so many."""
        late: list[Pending] = []
        while len(late) < most and self.late(now):
            expires_s, session = heapq.heappop(self._ends)
            pending = self._pending.get(session)
            if pending is not None and pending.hint.expires_s == expires_s:
                self._drop(session)
                late.append(pending)
        self.outcomes["expired"] += len(late)
        return late

    def forget(self, sessions: Iterable[SessionKey]) -> None:
        """Remove these sessions' hints without counting an outcome."""
        for session in list(sessions):
            self._drop(session)

    def _drop(self, session: SessionKey) -> Pending | None:
        pending = self._pending.pop(session, None)
        if pending:
            self._ids.pop((session.tenant, pending.hint.advisory_id), None)
            _remove(self._per_node, pending.node, session)
            _remove(self._per_tenant, session.tenant, session)
            if pending.may_move:
                _remove(self._movable, pending.node, session)
            self._expect(pending.node, pending.urgency, -pending.chance)
        return pending

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        assert Counter(p.node for p in self._pending.values()) == Counter(
            {n: len(s) for n, s in self._per_node.items()}
        )
        assert Counter(s.tenant for s in self._pending) == Counter({t: len(s) for t, s in self._per_tenant.items()})
        assert {s for known in self._movable.values() for s in known} == {
            s for s, p in self._pending.items() if p.may_move
        }
        assert set(self._ids.values()) == set(self._pending) and len(self._pending) <= self._most
        waiting = set(self._ends)
        assert all((p.hint.expires_s, s) in waiting for s, p in self._pending.items())


def _remove(table: dict[str, _Sessions], key: str, session: SessionKey) -> None:
    del table[key][session]
    if not table[key]:
        del table[key]
