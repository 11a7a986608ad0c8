"""How much of something scarce one owner may hold: bytes of bodies, requests, connections.

Nobody may hold all of it: an owner (a tenant, or an address whose tenant is not known yet) gets at most its share, so that what one
holds for ever is never missing to the others.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """Invariants: `held` is the sum over owners and at most `limit`; no owner holds more than `most`."""

    def __init__(self, limit: int, share: float) -> None:
        """limit: of all owners together. share: of it, for one owner, above 0 and at most 1; it is never less than 1."""
        self.limit, self.most = limit, max(1, int(limit * share))
        self.held = 0
        self._of: Counter[str] = Counter()

    def of(self, owner: str) -> int:
        """What the owner holds."""
        return self._of.get(owner, 0)

    def take(self, owner: str, amount: int = 1) -> bool:
        """Hold so much more for the owner, or nothing when it does not fit into the owner's share or into what is left."""
        if self._of.get(owner, 0) + amount > self.most or self.held + amount > self.limit:
            return False
        self._of[owner] += amount
        self.held += amount
        return True

    def give(self, owner: str, amount: int = 1) -> None:
        """The owner holds so much less."""
        self._of[owner] -= amount
        self.held -= amount
        if not self._of[owner]:
            del self._of[owner]

    def greediest(self) -> str | None:
        """Who holds the most; None when nobody holds anything."""
        return max(self._of, key=lambda owner: self._of[owner], default=None)

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert 0 <= self.held <= self.limit
        assert self.held == sum(self._of.values())
        assert all(0 < amount <= self.most for amount in self._of.values())
