"""Advisories whose request has not come: at most one a session; each with the node that was chosen, and what its store was told.

A hint's life: placed -> used (its request came) | invalidated | expired | dropped. Nothing else depends on a hint being true.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from contracts.ids import SessionKey
from scheduler.core.columns import urgency_class

MAX_PENDING = 200_000
#: An arrival that is expected sooner by less than this is no news, in seconds.
_SOONER_S = 1.0


@dataclass(frozen=True, slots=True)
class Hint:
    """What a caller says: this session is about to speak. Times are on the scheduler's clock.

    arrival_s: when, or None. expires_s: when it stops counting. pin: the node it must go to. address: of the caller, for trust.
    chance: how likely it is by its own account. caller: whose trust it is on; empty: the tenant's.
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

    @property
    def on_trust_of(self) -> str:
        """Whose record says what it is worth, and on whose record its end is written."""
        return self.caller or self.session.tenant

    def lead_s(self, now: float) -> float:
        """How long until its request comes; infinity: nobody knows."""
        return math.inf if self.arrival_s is None else max(self.arrival_s - now, 0.0)


@dataclass(frozen=True, slots=True)
class Sent:
    """What the node's store was last told of a hint, and when it was first told. priority: with what trust takes away."""

    at_s: float
    priority: int
    arrival_s: float | None
    expires_s: float

    def is_outdated(self, hint: Hint, priority: int, now: float) -> bool:
        """The store must be told again how the hint is now: of another priority, sooner, or for more than twice as long as is left.

        One that is expected later than told is not news: its cache is there by then.
        """
        told_s = self.arrival_s if self.arrival_s is not None else -math.inf  # a store brings at once what has no time
        sooner = hint.arrival_s is not None and hint.arrival_s < told_s - _SOONER_S
        return priority != self.priority or sooner or hint.expires_s - now > 2.0 * (self.expires_s - now)


@dataclass(frozen=True, slots=True)
class Pending:
    """A hint that waits for its request.

    node: where its turn is to go. placed_s: since when it is promised. chance: with which it counts as work to come there. sent: what the
    store was told; None: nothing, as the hint was not worth it. left: the nodes it has moved away from. looked_s: when a move was last
    considered.
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
        """Whose."""
        return self.hint.session

    @property
    def urgency(self) -> int:
        """Its class (`columns.urgency_class`)."""
        return urgency_class(self.hint.priority)


def in_order(hints: Iterable[Hint], now: float) -> list[Hint]:
    """Hints that came together: the most urgent first, then the one expected first, as their places are chosen one after the other."""
    return sorted(hints, key=lambda h: (h.priority, now if h.arrival_s is None else h.arrival_s))


def merged(old: Hint, new: Hint, now: float) -> Hint:
    """Two hints of one session as one: as early, as urgent and for as long as either says. The newer one's id counts."""
    coming = [a for a in (old.arrival_s, new.arrival_s) if a is not None and a >= now]
    return replace(
        new,
        model=new.model or old.model,
        arrival_s=min(coming, default=new.arrival_s),
        expires_s=max(old.expires_s, new.expires_s),
        priority=min(old.priority, new.priority),
        pin=new.pin or old.pin,
        chance=max(old.chance, new.chance),
    )


class Advisories:
    """The pending ones, and how hints have ended so far (`outcomes`).

    `expect` is told of changes of what is to come: node, class of urgency, requests. Where hints are too many, the oldest goes of the
    tenant that has most.
    """

    def __init__(self, expect: Callable[[str, int, float], None] = lambda node, urgency, requests: None, most: int = MAX_PENDING) -> None:
        self._most = most
        self._pending: dict[SessionKey, Pending] = {}
        self._per_tenant: dict[str, dict[SessionKey, None]] = {}
        self._ids: dict[tuple[str, str], SessionKey] = {}
        self._per_node: dict[str, dict[SessionKey, None]] = {}
        self._ends: list[tuple[float, SessionKey]] = []
        self._expect = expect
        self.outcomes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, session: SessionKey) -> Pending | None:
        """The session's pending advisory."""
        return self._pending.get(session)

    def on_node(self, node: str) -> int:
        """How many are pending on this node."""
        return len(self._per_node.get(node, ()))

    def of_node(self, node: str) -> Iterator[Pending]:
        """Those that are pending on this node, in the order in which they were placed there. Nothing may be placed meanwhile."""
        return (self._pending[session] for session in self._per_node.get(node, ()))

    def place(self, pending: Pending) -> None:
        """Remember a choice; an older hint of the same session is replaced."""
        self._drop(pending.session)
        while len(self._pending) >= self._most:
            most = max(self._per_tenant, key=lambda tenant: len(self._per_tenant[tenant]))
            self._drop(next(iter(self._per_tenant[most])))
            self.outcomes["dropped"] += 1
        session, hint = pending.session, pending.hint
        self._pending[session] = pending
        self._ids[(session.tenant, hint.advisory_id)] = session
        self._per_node.setdefault(pending.node, {})[session] = None
        self._per_tenant.setdefault(session.tenant, {})[session] = None
        self._expect(pending.node, pending.urgency, pending.chance)
        heapq.heappush(self._ends, (hint.expires_s, session))
        if len(self._ends) > 2 * len(self._pending) + 64:
            self._ends = [(p.hint.expires_s, s) for s, p in self._pending.items()]
            heapq.heapify(self._ends)

    def use(self, session: SessionKey) -> Pending | None:
        """The request came: take its hint."""
        pending = self._drop(session)
        if pending:
            self.outcomes["used"] += 1
        return pending

    def invalidate(self, session: SessionKey | None, tenant: str, advisory_id: str) -> Pending | None:
        """Withdraw a hint, named by its session or by its id (within the tenant)."""
        key = session if session is not None else self._ids.get((tenant, advisory_id))
        pending = self._drop(key) if key is not None else None
        if pending:
            self.outcomes["invalidated"] += 1
        return pending

    def expire(self, now: float) -> list[Pending]:
        """Drop and return those whose time is over."""
        late: list[Pending] = []
        while self._ends and self._ends[0][0] <= now:
            expires_s, session = heapq.heappop(self._ends)
            pending = self._pending.get(session)
            if pending is not None and pending.hint.expires_s == expires_s:
                self._drop(session)
                late.append(pending)
        self.outcomes["expired"] += len(late)
        return late

    def forget(self, sessions: Iterable[SessionKey]) -> None:
        """These hints are void, and their requests are placed afresh."""
        for session in list(sessions):
            self._drop(session)

    def _drop(self, session: SessionKey) -> Pending | None:
        pending = self._pending.pop(session, None)
        if pending:
            self._ids.pop((session.tenant, pending.hint.advisory_id), None)
            for table, key in ((self._per_node, pending.node), (self._per_tenant, session.tenant)):
                del table[key][session]
                if not table[key]:
                    del table[key]
            self._expect(pending.node, pending.urgency, -pending.chance)
        return pending

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        assert Counter(p.node for p in self._pending.values()) == Counter({n: len(s) for n, s in self._per_node.items()})
        assert Counter(s.tenant for s in self._pending) == Counter({t: len(s) for t, s in self._per_tenant.items()})
        assert set(self._ids.values()) == set(self._pending) and len(self._pending) <= self._most
        waiting = set(self._ends)
        assert all((p.hint.expires_s, s) in waiting for s, p in self._pending.items())
