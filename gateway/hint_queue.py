"""Decides which hints are sent together: every tenant's in its order, tenants in turns. Sends nothing.

A tenant's invalidation comes after its hints before it and ends the tenant's part of a round, so whoever sends many of
them delays others by one round only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gateway.core.shares import Shares
from runtime.turns import Turns

A = TypeVar("A")
W = TypeVar("W")


@dataclass(slots=True)
class Round(Generic[A, W]):
    """What is sent next: the advisories together, then the invalidations, at most one a tenant."""

    advisories: list[A] = field(default_factory=list)
    invalidations: list[W] = field(default_factory=list)


class HintQueue(Generic[A, W]):
    """Invariant: at most `limit` hints wait, of a tenant at most its share."""

    def __init__(self, limit: int, share: float) -> None:
        self._shares = Shares(limit, share)
        self._turns: Turns[tuple[A | None, W | None]] = Turns(sys.maxsize, 1, sys.maxsize)
        self._invalidations = 0

    def __len__(self) -> int:
        return self._shares.held

    @property
    def invalidates(self) -> bool:
        """Whether an invalidation waits; hints may wait behind it."""
        return self._invalidations > 0

    def advise(self, tenant: str, advisory: A) -> bool:
        """Queue an advisory; False when there is no room for it."""
        return self._put(tenant, (advisory, None))

    def invalidate(self, tenant: str, invalidation: W) -> bool:
        """Queue an invalidation; False when there is no room for it."""
        taken = self._put(tenant, (None, invalidation))
        self._invalidations += taken
        return taken

    def _put(self, tenant: str, hint: tuple[A | None, W | None]) -> bool:
        return self._shares.take(tenant) and self._turns.ask(tenant, hint)

    def next(self, most: int) -> Round[A, W]:
        """Remove and return the next round, of at most `most` advisories. Send it before the one after it."""
        made, ended = Round[A, W](), list[str]()
        while len(made.advisories) < most and (started := self._turns.start()) is not None:
            tenant, (advisory, invalidation) = started
            self._shares.give(tenant)
            if invalidation is not None:
                made.invalidations.append(invalidation)
                ended.append(tenant)
            elif advisory is not None:
                made.advisories.append(advisory)
                self._turns.finish(tenant)
        for tenant in ended:
            self._turns.finish(tenant)
        self._invalidations -= len(ended)
        return made

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self._shares.validate()
        self._turns.validate()
        assert self._turns.waiting == len(self) >= self._invalidations >= 0
