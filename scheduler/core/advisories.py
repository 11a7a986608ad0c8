"""Advisories whose request has not come: at most one a session; each with the node that was chosen.

A hint's life: placed -> used (its request came) | invalidated | expired | dropped. Nothing else depends on a hint being true.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from contracts.ids import SessionKey

MAX_PENDING = 200_000


@dataclass(frozen=True, slots=True)
class Hint:
    """What a caller says: this session is about to speak. Times are on the scheduler's clock.

    arrival_s: when, or None. expires_s: when it stops counting. pin: the node it must go to. address: of the caller, for trust.
    """

    session: SessionKey
    advisory_id: str
    model: str = ""
    arrival_s: float | None = None
    expires_s: float = 0.0
    priority: int = 0
    pin: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """A hint that waits for its request: its node; the chance it was given when it came; whether its cache was sent for."""

    hint: Hint
    node: str
    placed_s: float
    chance: float = 1.0
    prefetched: bool = True

    @property
    def session(self) -> SessionKey:
        """Whose."""
        return self.hint.session


def merged(old: Hint, new: Hint, now: float) -> Hint:
    """Two hints of one session as one: as early, as urgent and for as long as either says. The newer one's id counts."""
    coming = [a for a in (old.arrival_s, new.arrival_s) if a is not None and a >= now]
    return replace(
        new,
        model=new.model or old.model,
        arrival_s=min(coming, default=new.arrival_s),
        expires_s=max(old.expires_s, new.expires_s),
        priority=min(old.priority, new.priority),
    )


class Advisories:
    """The pending ones, and how hints have ended so far (`outcomes`). `expect` is told when a node's expected requests change."""

    def __init__(self, expect: Callable[[str, float], None] = lambda node, requests: None) -> None:
        self._pending: dict[SessionKey, Pending] = {}
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

    def of_node(self, node: str) -> list[Pending]:
        """Those that are pending on this node, oldest first."""
        return [self._pending[session] for session in self._per_node.get(node, ())]

    def place(self, pending: Pending) -> None:
        """Remember a choice; an older hint of the same session is replaced."""
        self._drop(pending.session)
        while len(self._pending) >= MAX_PENDING:
            self._drop(next(iter(self._pending)))
            self.outcomes["dropped"] += 1
        session, hint = pending.session, pending.hint
        self._pending[session] = pending
        self._ids[(session.tenant, hint.advisory_id)] = session
        self._per_node.setdefault(pending.node, {})[session] = None
        self._expect(pending.node, pending.chance)
        heapq.heappush(self._ends, (hint.expires_s, session))
        if len(self._ends) > 2 * len(self._pending) + 64:
            self._ends = [(p.hint.expires_s, s) for s, p in self._pending.items()]
            heapq.heapify(self._ends)

    def use(self, session: SessionKey) -> Pending | None:
        """The request came: take its hint."""
        pending = self._drop(session)
        self.outcomes["used" if pending else "missed"] += 1
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
            del self._per_node[pending.node][session]
            if not self._per_node[pending.node]:
                del self._per_node[pending.node]
            self._expect(pending.node, -pending.chance)
        return pending

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        assert Counter(p.node for p in self._pending.values()) == Counter({n: len(s) for n, s in self._per_node.items()})
        assert set(self._ids.values()) == set(self._pending)
        waiting = set(self._ends)
        assert all((p.hint.expires_s, s) in waiting for s, p in self._pending.items())
