"""The rest of a device's memory, as one model's cache sees it."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from contracts.memory.victim_order import Standing


class Lent(Enum):
    """Whether layers have lent memory to a request: now, or not before the next round."""

    NOW = "now"
    NEXT = "next"
    NEVER = "never"


class Supply(Protocol):
    """Memory beyond a pool's limit, in pages of its model. What is obtained raises the limit."""

    def unused(self) -> int:
        """Pages that `grow` can obtain."""
        ...

    def cached(self) -> int:
        """Pages that `purge` can obtain. An estimate: some lie in slabs that are in use."""
        ...

    def grow(self, pages: int) -> None:
        """Obtain up to so many pages of memory that no model uses."""
        ...

    def purge(self, pages: int, now: float, under: Standing | None = None) -> None:
        """Obtain up to so many pages by purging other models' caches. under: only what ranks under it."""
        ...

    def lend(self, pages: int, now: float) -> Lent:
        """A request lacks so many pages: obtain some from layers of weights (MIRAGE)."""
        ...

    def waits(self, rank: tuple[float, ...] | None) -> None:
        """A request of this rank (`arbitration.Order.memory_rank`) waits for memory. None: no request does."""
        ...

    def comes_first(self, rank: tuple[float, ...]) -> bool:
        """Whether a request of another model that waits for memory comes before this one."""
        ...

    def displace(self, now: float, priority: int, arrival_s: float, pages: int) -> bool:
        """Preempt a sequence of another model that is less urgent or, at equal priority, arrived later than
        `arrival_s`. False if all such sequences hold fewer than `pages`, or these come without."""
        ...


class _Fixed:
    """A model with a fixed share."""

    def unused(self) -> int:
        """See `Supply.unused`."""
        return 0

    def cached(self) -> int:
        """See `Supply.cached`."""
        return 0

    def grow(self, pages: int) -> None:
        """See `Supply.grow`."""

    def purge(self, pages: int, now: float, under: Standing | None = None) -> None:
        """See `Supply.purge`."""

    def lend(self, pages: int, now: float) -> Lent:
        """See `Supply.lend`."""
        return Lent.NEVER

    def waits(self, rank: tuple[float, ...] | None) -> None:
        """See `Supply.waits`."""

    def comes_first(self, rank: tuple[float, ...]) -> bool:
        """See `Supply.comes_first`."""
        return False

    def displace(self, now: float, priority: int, arrival_s: float, pages: int) -> bool:
        """See `Supply.displace`."""
        return False


FIXED: Supply = _Fixed()
