"""Limits how much of a resource one owner may hold: bytes of bodies, requests, connections.

An owner (a tenant, or an address whose tenant is unknown) gets at most its share, so that it cannot starve the others.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """Invariants: `held` is the sum over owners and at most `limit`; no owner holds more than `most`."""

    def __init__(self, limit: int, share: float) -> None:
        """limit: for all owners together. share: the part for one owner, above 0 and at most 1; at least 1 unit."""
        self.limit, self.most = limit, max(1, int(limit * share))
        self.held = 0
        self._of: Counter[str] = Counter()

    def of(self, owner: str) -> int:
        """Amount that the owner holds."""
        return self._of.get(owner, 0)

    def take(self, owner: str, amount: int = 1) -> bool:
        """Take `amount` for the owner, or nothing if it exceeds the owner's share or the limit. Returns whether it was
        taken."""
        if self._of.get(owner, 0) + amount > self.most or self.held + amount > self.limit:
            return False
        self._of[owner] += amount
        self.held += amount
        return True

    def give(self, owner: str, amount: int = 1) -> None:
        """Give back `amount` of the owner's."""
        self._of[owner] -= amount
        self.held -= amount
        if not self._of[owner]:
            del self._of[owner]

    def greediest(self) -> str | None:
        """The owner that holds the most; None when nothing is held."""
        return max(self._of, key=lambda owner: self._of[owner], default=None)

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert 0 <= self.held <= self.limit
        assert self.held == sum(self._of.values())
        assert all(0 < amount <= self.most for amount in self._of.values())
