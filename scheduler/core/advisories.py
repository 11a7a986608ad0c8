"""Advisories whose request has not come: at most one a session, the newest; each with the node that was chosen.

A hint's life: placed -> used (its request came) | invalidated | expired. Nothing else depends on a hint being true.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from contracts.advisory import Advisory
from contracts.ids import SessionKey

MAX_PENDING = 200_000


@dataclass(frozen=True, slots=True)
class Pending:
    """One advisory, its node, and its times on the scheduler's clock."""

    session: SessionKey
    advisory_id: str
    advisory: Advisory
    node: str
    placed_s: float
    expires_s: float


class Advisories:
    """The pending ones, and how hints have ended so far (`outcomes`)."""

    def __init__(self) -> None:
        self._pending: dict[SessionKey, Pending] = {}
        self._ids: dict[tuple[str, str], SessionKey] = {}
        self._per_node: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, session: SessionKey) -> Pending | None:
        """The session's pending advisory."""
        return self._pending.get(session)

    def on_node(self, node: str) -> int:
        """How many are pending on this node."""
        return self._per_node[node]

    def place(self, pending: Pending) -> None:
        """Remember a choice; an older hint of the same session is replaced."""
        self._drop(pending.session)
        while len(self._pending) >= MAX_PENDING:
            self._drop(next(iter(self._pending)))
            self.outcomes["dropped"] += 1
        self._pending[pending.session] = pending
        self._ids[(pending.session.tenant, pending.advisory_id)] = pending.session
        self._per_node[pending.node] += 1

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
        late = [p for p in self._pending.values() if p.expires_s <= now]
        for p in late:
            self._drop(p.session)
        self.outcomes["expired"] += len(late)
        return late

    def forget_node(self, node: str) -> None:
        """The node left: its hints are void, and their requests are placed afresh."""
        for p in [p for p in self._pending.values() if p.node == node]:
            self._drop(p.session)

    def _drop(self, session: SessionKey) -> Pending | None:
        pending = self._pending.pop(session, None)
        if pending:
            self._ids.pop((session.tenant, pending.advisory_id), None)
            self._per_node[pending.node] -= 1
        return pending

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        assert Counter(p.node for p in self._pending.values()) == +self._per_node
        assert set(self._ids.values()) == set(self._pending)
