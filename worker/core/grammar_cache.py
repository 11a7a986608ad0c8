"""Compiled grammars and refusals, so that no grammar is compiled or refused twice.

Entries are per tenant: response times reveal nothing about other tenants, and the tenant that holds most loses entries
first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    cost: int
    until_s: float


class GrammarCache(Generic[T]):
    """Invariants: `held` is the sum of all costs and at most `limit`; no tenant holds more than `most`; a tenant
    without entries is not listed."""

    def __init__(self, limit: int, share: float) -> None:
        """limit: bytes for all tenants together. share: maximum fraction of it for one tenant."""
        self.limit, self.most = limit, int(limit * share)
        self.held = 0
        self._of: dict[str, OrderedDict[bytes, _Entry[T]]] = {}
        self._costs: dict[str, int] = {}

    def get(self, tenant: str, digest: bytes, now_s: float) -> T | None:
        """The entry's value, or None; counts as a use."""
        mine = self._of.get(tenant)
        entry = mine.get(digest) if mine is not None else None
        if mine is None or entry is None:
            return None
        if now_s >= entry.until_s:
            self._drop(tenant, digest)
            return None
        mine.move_to_end(digest)
        return entry.value

    def put(self, tenant: str, digest: bytes, value: T, cost: int, until_s: float = math.inf) -> None:
        """Keep `value` until `until_s`, unless it exceeds a tenant's share. Evicts least recently used entries."""
        if digest in self._of.get(tenant, ()):
            self._drop(tenant, digest)
        if cost > self.most:
            return
        while self._costs.get(tenant, 0) + cost > self.most:
            self._drop(tenant, next(iter(self._of[tenant])))
        while self.held + cost > self.limit:
            largest = max(self._costs, key=self._costs.__getitem__)
            self._drop(largest, next(iter(self._of[largest])))
        self._of.setdefault(tenant, OrderedDict())[digest] = _Entry(value, cost, until_s)
        self._costs[tenant] = self._costs.get(tenant, 0) + cost
        self.held += cost

    def _drop(self, tenant: str, digest: bytes) -> None:
        entry = self._of[tenant].pop(digest)
        self.held -= entry.cost
        self._costs[tenant] -= entry.cost
        if not self._of[tenant]:
            del self._of[tenant], self._costs[tenant]

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert 0 <= self.held == sum(self._costs.values()) <= self.limit
        assert self._of.keys() == self._costs.keys()
        for tenant, mine in self._of.items():
            assert mine and self._costs[tenant] == sum(e.cost for e in mine.values()) <= self.most
