"""Who has which granule of a device's memory, and whether its memory is there.

A device's memory is one row of granules (DESIGN, section 3). Weights, KV of every model, a trainer and another engine's pinned share take
from it, and nobody else counts granules. Prism's pool (section 5.2 and its pre-allocated pages) has the same states.

Not decided here: who shall have how many. Nothing is mapped here: `worker.memory.device_memory` does that, and tells.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from contracts.errors import UpbeatError


class OutOfGranules(UpbeatError, MemoryError):
    """Fewer granules can be taken than were asked for; nothing was taken."""


class GranuleMisuse(UpbeatError, ValueError):
    """A granule is not in the state, or not with the owner, that the call needs. Nothing was changed."""


class Use(StrEnum):
    """What an owner does with memory."""

    WEIGHTS = "weights"
    KV = "kv"
    TRAINER = "trainer"
    #: A fixed share of an engine that manages it alone.
    ENGINE = "engine"


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """Who has a granule. name: of its model or its job."""

    use: Use
    name: str

    def __str__(self) -> str:
        return f"{self.use} of {self.name}"


class GranuleState(StrEnum):
    """Of one granule. Free and warm ones have no owner; held and mapped ones have one."""

    #: Nobody's, and without memory: zero when it is mapped.
    FREE = "free"
    #: Nobody's, with memory of whatever content: mapping it costs no page fault.
    WARM = "warm"
    #: Taken, and shown nowhere.
    HELD = "held"
    #: Taken, and shown in one address range.
    MAPPED = "mapped"


class GranuleLedger:
    """`total` granules, by number. Invariants (`validate`): each has one state; it has an owner exactly when it is held or mapped; what is
    counted is what is there."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._state = [GranuleState.FREE] * total
        self._owner: list[Owner | None] = [None] * total
        # Heaps: lowest numbers first, so that runs stay contiguous.
        self._free, self._warm = list(range(total)), list[int]()
        self._owned: Counter[tuple[Owner, GranuleState]] = Counter()

    # ---- what there is -----------------------------------------------------------------------------------------
    @property
    def spare(self) -> int:
        """Granules that can be taken: free and warm ones."""
        return len(self._free) + len(self._warm)

    @property
    def warm(self) -> int:
        """Warm granules."""
        return len(self._warm)

    def owned(self, owner: Owner) -> int:
        """Granules that are held by an owner or mapped for it."""
        return self._owned[owner, GranuleState.HELD] + self._owned[owner, GranuleState.MAPPED]

    def counts(self) -> dict[tuple[Owner | None, GranuleState], int]:
        """Granules by owner and state; free and warm ones have no owner. Together they are `total`. Any thread."""
        nobodys = {(None, GranuleState.FREE): len(self._free), (None, GranuleState.WARM): len(self._warm)}
        return nobodys | {of: count for of, count in dict(self._owned).items() if count}

    def state(self, granule: int) -> GranuleState:
        """Of one granule."""
        return self._state[granule]

    def owner(self, granule: int) -> Owner | None:
        """Of one granule."""
        return self._owner[granule]

    # ---- changes -----------------------------------------------------------------------------------------------
    def take(self, count: int, owner: Owner) -> list[int]:
        """`count` granules for this owner, held; warm ones first. Raises OutOfGranules, changing nothing."""
        if count > self.spare:
            raise OutOfGranules(f"{count} granules wanted for {owner}, {self.spare} of {self.total} free")
        taken = [heapq.heappop(self._warm or self._free) for _ in range(count)]
        for granule in taken:
            self._owner[granule] = owner
            self._enter(granule, GranuleState.HELD)
        return taken

    def give(self, granules: Sequence[int], *, keep: bool) -> None:
        """Held granules are nobody's again. keep: with their memory, warm. Raises GranuleMisuse, changing nothing, unless all are held."""
        self.require(granules, GranuleState.HELD)
        for granule in granules:
            self._leave(granule)
            self._owner[granule] = None
            self._state[granule] = GranuleState.WARM if keep else GranuleState.FREE
            heapq.heappush(self._warm if keep else self._free, granule)

    def cool(self, count: int) -> list[int]:
        """At most `count` warm granules become free; which ones: their memory is to be dropped."""
        cooled = [heapq.heappop(self._warm) for _ in range(min(count, len(self._warm)))]
        for granule in cooled:
            self._state[granule] = GranuleState.FREE
            heapq.heappush(self._free, granule)
        return cooled

    def hand(self, granules: Sequence[int], owner: Owner) -> None:
        """Held granules, content and all, are another owner's. Raises GranuleMisuse, changing nothing, unless all are held."""
        self.require(granules, GranuleState.HELD)
        for granule in granules:
            self._leave(granule)
            self._owner[granule] = owner
            self._enter(granule, GranuleState.HELD)

    def mapped(self, granules: Iterable[int]) -> None:
        """Held granules are shown now."""
        self._move(granules, GranuleState.MAPPED)

    def hidden(self, granules: Iterable[int]) -> None:
        """Mapped granules are shown nowhere now."""
        self._move(granules, GranuleState.HELD)

    def require(self, granules: Sequence[int], state: GranuleState, owner: Owner | None = None) -> None:
        """Raise GranuleMisuse unless all of them are in this state and, where one is given, this owner's."""
        if len(set(granules)) != len(granules):
            raise GranuleMisuse("a granule is named twice")
        for granule in granules:
            if not 0 <= granule < self.total or self._state[granule] is not state:
                raise GranuleMisuse(f"granule {granule} is not {state}: it is {self._said(granule)}")
            if owner is not None and self._owner[granule] != owner:
                raise GranuleMisuse(f"granule {granule} is for {self._owner[granule]}, not for {owner}; hand it over first")

    def _said(self, granule: int) -> str:
        return str(self._state[granule]) if 0 <= granule < self.total else "unknown"

    def _move(self, granules: Iterable[int], state: GranuleState) -> None:
        for granule in granules:
            self._leave(granule)
            self._enter(granule, state)

    def _enter(self, granule: int, state: GranuleState) -> None:
        owner = self._owner[granule]
        assert owner is not None
        self._state[granule] = state
        self._owned[owner, state] += 1

    def _leave(self, granule: int) -> None:
        owner = self._owner[granule]
        assert owner is not None
        self._owned[owner, self._state[granule]] -= 1

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        for state, heap in ((GranuleState.FREE, self._free), (GranuleState.WARM, self._warm)):
            assert sorted(heap) == [g for g, s in enumerate(self._state) if s is state], f"the {state} granules are not those listed"
        owned = Counter((o, s) for o, s in zip(self._owner, self._state, strict=True) if o is not None)
        assert owned == +self._owned, "what is counted is not what is there"
        nobodys = (GranuleState.FREE, GranuleState.WARM)
        assert all((o is None) == (s in nobodys) for o, s in zip(self._owner, self._state, strict=True)), "an owner too many or too few"
        assert sum(self.counts().values()) == self.total
