"""The ledger of a device's memory: the state and owner of each granule.

A device's memory is an array of granules. Weights, KV of every model, a trainer and another
engine's pinned share take from it; granules are counted only here. Prism's pool (section 5.2) has the same states.

Does not decide how many granules an owner gets. Does not map: `worker.memory.device_memory` maps and reports here.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from contracts.errors import UpbeatError


class OutOfGranules(UpbeatError, MemoryError):
    """Too few granules are free; nothing was taken."""


class GranuleMisuse(UpbeatError, ValueError):
    """A granule has the wrong state or owner for the call. Nothing was changed."""


class Use(StrEnum):
    """What an owner uses memory for."""

    WEIGHTS = "weights"
    KV = "kv"
    TRAINER = "trainer"
    #: A fixed share for an engine that manages it itself.
    ENGINE = "engine"


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """Owner of a granule. name: of its model or job."""

    use: Use
    name: str

    def __str__(self) -> str:
        return f"{self.use} of {self.name}"


class GranuleState(StrEnum):
    """State of a granule. Free and warm granules have no owner; held and mapped ones have one."""

    #: No owner and no memory: zero when mapped.
    FREE = "free"
    #: No owner, but memory of arbitrary content: mapping it costs no page fault.
    WARM = "warm"
    #: Owned, not mapped.
    HELD = "held"
    #: Owned, and mapped in one address range.
    MAPPED = "mapped"


class GranuleLedger:
    """`total` granules, by number. Invariants (`validate`): a granule has an owner exactly when it is held or mapped;
    all counters match the states."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._state = [GranuleState.FREE] * total
        self._owner: list[Owner | None] = [None] * total
        # Heaps, lowest numbers first, so that allocations stay contiguous.
        self._free, self._warm = list(range(total)), list[int]()
        self._owned: Counter[tuple[Owner, GranuleState]] = Counter()

    # ---- counts -----------------------------------------------------------------------------------------
    @property
    def spare(self) -> int:
        """Number of granules that can be taken: free and warm."""
        return len(self._free) + len(self._warm)

    @property
    def warm(self) -> int:
        """Number of warm granules."""
        return len(self._warm)

    def owned(self, owner: Owner) -> int:
        """Number of granules held by or mapped for an owner."""
        return self._owned[owner, GranuleState.HELD] + self._owned[owner, GranuleState.MAPPED]

    def counts(self) -> dict[tuple[Owner | None, GranuleState], int]:
        """Number of granules by owner (None for free and warm) and state; the sum is `total`. Any thread."""
        ownerless = {(None, GranuleState.FREE): len(self._free), (None, GranuleState.WARM): len(self._warm)}
        return ownerless | {of: count for of, count in dict(self._owned).items() if count}

    def state(self, granule: int) -> GranuleState:
        """State of a granule."""
        return self._state[granule]

    def owner(self, granule: int) -> Owner | None:
        """Owner of a granule."""
        return self._owner[granule]

    # ---- changes -----------------------------------------------------------------------------------------------
    def take(self, count: int, owner: Owner) -> list[int]:
        """Take `count` granules for `owner`, held; warm ones first. Raises OutOfGranules, changing nothing."""
        if count > self.spare:
            raise OutOfGranules(f"{count} granules wanted for {owner}, {self.spare} of {self.total} free")
        taken = [heapq.heappop(self._warm or self._free) for _ in range(count)]
        for granule in taken:
            self._owner[granule] = owner
            self._enter(granule, GranuleState.HELD)
        return taken

    def give(self, granules: Sequence[int], *, keep: bool) -> None:
        """Return held granules. keep: they keep their memory (warm). Raises GranuleMisuse, changing nothing, unless all
        are held."""
        self.require(granules, GranuleState.HELD)
        for granule in granules:
            self._leave(granule)
            self._owner[granule] = None
            self._state[granule] = GranuleState.WARM if keep else GranuleState.FREE
            heapq.heappush(self._warm if keep else self._free, granule)

    def cool(self, count: int) -> list[int]:
        """Turn up to `count` warm granules into free ones. Returns them; the caller drops their memory."""
        cooled = [heapq.heappop(self._warm) for _ in range(min(count, len(self._warm)))]
        for granule in cooled:
            self._state[granule] = GranuleState.FREE
            heapq.heappush(self._free, granule)
        return cooled

    @property
    def next_free(self) -> int | None:
        """The free granule that is taken first when none is warm."""
        return self._free[0] if self._free else None

    def warmed(self) -> None:
        """`next_free` has got memory: it is warm."""
        granule = heapq.heappop(self._free)
        self._state[granule] = GranuleState.WARM
        heapq.heappush(self._warm, granule)

    def hand(self, granules: Sequence[int], owner: Owner) -> None:
        """Transfer held granules, with their content, to another owner. Raises GranuleMisuse, changing nothing, unless
        all are held."""
        self.require(granules, GranuleState.HELD)
        for granule in granules:
            self._leave(granule)
            self._owner[granule] = owner
            self._enter(granule, GranuleState.HELD)

    def mapped(self, granules: Iterable[int]) -> None:
        """Held granules have been mapped."""
        self._move(granules, GranuleState.MAPPED)

    def hidden(self, granules: Iterable[int]) -> None:
        """Mapped granules have been unmapped."""
        self._move(granules, GranuleState.HELD)

    def require(self, granules: Sequence[int], state: GranuleState, owner: Owner | None = None) -> None:
        """Raise GranuleMisuse unless all granules have this state and, if given, this owner."""
        if len(set(granules)) != len(granules):
            raise GranuleMisuse("a granule is named twice")
        for granule in granules:
            if not 0 <= granule < self.total or self._state[granule] is not state:
                raise GranuleMisuse(f"granule {granule} is not {state}: it is {self._describe(granule)}")
            if owner is not None and self._owner[granule] != owner:
                raise GranuleMisuse(
                    f"granule {granule} is for {self._owner[granule]}, not for {owner}; hand it over first"
                )

    def _describe(self, granule: int) -> str:
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
            assert sorted(heap) == [g for g, s in enumerate(self._state) if s is state], (
                f"the {state} granules are not those listed"
            )
        owned = Counter((o, s) for o, s in zip(self._owner, self._state, strict=True) if o is not None)
        assert owned == +self._owned, "what is counted is not what is there"
        ownerless = (GranuleState.FREE, GranuleState.WARM)
        assert all((o is None) == (s in ownerless) for o, s in zip(self._owner, self._state, strict=True)), (
            "an owner too many or too few"
        )
        assert sum(self.counts().values()) == self.total
