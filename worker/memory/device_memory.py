"""A device's memory: the ledger of its granules, and the address ranges (spans) that map them.

Every user of device memory (weights, KV of each model, a trainer, another engine) owns granules. A granule keeps its
content when it moves between spans and owners. Granules given back without `keep` lose it, and their memory returns to
the system at once. Memory used beside granules (activations, tables, graphs) is counted here too.

Does not decide who gets granules. Not thread-safe: the worker calls it from one thread, except `usage` and `Span.show`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from contracts.residency import MemoryShare
from worker.core.granules import GranuleLedger, GranuleMisuse, GranuleState, Owner
from worker.memory.exports import Exported
from worker.memory.host_memory import HostMemory
from worker.memory.physical import PhysicalMemory, runs
from worker.memory.unmapping import Unmapping


class DeviceMemory:
    """`total` granules of `granule_bytes` each, over one physical memory.

    Invariants: a span maps granules of its owner only, and a granule is mapped at most once, but for places that were
    retired; only warm granules and those mapped since they were taken use physical memory.
    """

    def __init__(self, physical: PhysicalMemory, total: int, granule_bytes: int) -> None:
        self.physical, self.device = physical, physical.device
        self.granule_bytes = granule_bytes
        self.ledger = GranuleLedger(total)
        self._spans: dict[int, Span] = {}
        self._numbers = itertools.count()
        self._unmapping = Unmapping(physical)
        self._beside: list[tuple[Owner, str, Callable[[], int]]] = []

    @property
    def total(self) -> int:
        """Granules of the device, for all owners."""
        return self.ledger.total

    @property
    def free(self) -> int:
        """Granules without an owner, warm or not."""
        return self.ledger.spare

    def take(self, count: int, owner: Owner) -> list[int]:
        """Takes `count` granules, warm ones first. Content: undefined in warm ones, zero in others. Raises
        OutOfGranules, changing nothing, when fewer are free."""
        return self.ledger.take(count, owner)

    def give(self, granules: Sequence[int], *, keep: bool = False) -> None:
        """Gives held granules back. keep: their memory stays allocated (warm), so that mapping them again is cheap.
        Raises GranuleMisuse, changing nothing, unless all are held."""
        self.ledger.require(granules, GranuleState.HELD)
        if not keep:
            self.physical.drop(granules)
        self.ledger.give(granules, keep=keep)

    def cool(self, count: int) -> int:
        """Releases the memory of at most `count` warm granules and returns their number."""
        cooled = self.ledger.cool(count)
        self.physical.drop(cooled)
        return len(cooled)

    def prepare(self) -> bool:
        """Allocates the memory of one free granule, which becomes warm; False if there is none. Raises OSError or
        UpbeatError, changing nothing, where the system has no memory."""
        granule = self.ledger.next_free
        if granule is None:
            return False
        try:
            self.physical.prepare(granule)
        except BaseException:
            self.physical.drop([granule])
            raise
        self.ledger.warmed()
        return True

    def hand(self, granules: Sequence[int], owner: Owner) -> None:
        """Moves held granules, with their content, to another owner. Raises GranuleMisuse, changing nothing, unless all
        are held."""
        self.ledger.hand(granules, owner)

    def reserve(self, bytes_: int, owner: Owner) -> Span:
        """Reserves an address range of at least `bytes_`, rounded up to whole granules; nothing is mapped yet."""
        if bytes_ <= 0:
            raise ValueError(f"cannot reserve {bytes_} bytes")
        span = Span(self, next(self._numbers), -(-bytes_ // self.granule_bytes), owner)
        self._spans[span.number] = span
        return span

    def export(self, granules: Sequence[int]) -> Exported:
        """Handles with which a child process maps these granules too (`exports`). They must stay held or mapped until
        it has ended. Raises GranuleMisuse for others."""
        for granule in granules:
            if not 0 <= granule < self.total or self.ledger.owner(granule) is None:
                raise GranuleMisuse(f"granule {granule} is nobody's: there is nothing to export")
        return self.physical.export(granules)

    def count_beside(self, owner: Owner, what: str, bytes_: Callable[[], int]) -> None:
        """Registers an owner's device memory outside of granules. bytes_: returns its current size; called on any
        thread."""
        self._beside.append((owner, what, bytes_))

    def usage(self) -> dict[tuple[str, str, str], int]:
        """Bytes by (use, owner's name, granules' state or kind of other memory); use and name are empty without an
        owner. Any thread."""
        found = {
            ("" if owner is None else owner.use.value, "" if owner is None else owner.name, state.value): count
            * self.granule_bytes
            for (owner, state), count in self.ledger.counts().items()
        }
        for owner, what, bytes_ in self._beside:
            found[owner.use.value, owner.name, what] = bytes_()
        return found

    def shares(self) -> list[MemoryShare]:
        """Bytes of granules by owner; the sum is the whole memory. Any thread."""
        found: Counter[tuple[str, str]] = Counter()
        for (owner, state), count in self.ledger.counts().items():
            of = (state.value, "") if owner is None else (owner.use.value, owner.name)
            found[of] += count * self.granule_bytes
        return [MemoryShare(use, name, bytes_) for (use, name), bytes_ in found.items()]

    def resident_bytes(self) -> int:
        """Physical memory that granules use now."""
        return self.physical.resident_bytes()

    def close(self) -> None:
        """Closes all spans and the memory. Tensors over it become invalid."""
        self._unmapping.close()
        for span in list(self._spans.values()):
            span.close()
        self.physical.close()

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        self.ledger.validate()
        shown = [(granule, span) for span in self._spans.values() for _, granule in span.mapped()]
        assert len({granule for granule, _ in shown}) == len(shown), "a granule is mapped twice"
        for granule, span in shown:
            assert self.ledger.state(granule) is GranuleState.MAPPED and self.ledger.owner(granule) == span.owner, (
                f"granule {granule}"
            )
        mapped = sum(count for (_, state), count in self.ledger.counts().items() if state is GranuleState.MAPPED)
        assert mapped == len(shown), "a granule counts as mapped and is not"


class Span:
    """A reserved address range, in granules, of one owner; made by `DeviceMemory.reserve`.

    `address` is stable until `close`. Access where no granule is mapped kills the process; callers use the ledger to
    avoid it.
    """

    def __init__(self, memory: DeviceMemory, number: int, count: int, owner: Owner) -> None:
        self.memory, self.number, self.owner = memory, number, owner
        self.granules = count
        self.bytes = count * memory.granule_bytes
        self.address = memory.physical.reserve(self.bytes)
        self._at: dict[int, int] = {}
        #: Places that `assign` gave a granule and `show` has not mapped yet.
        self._unshown: set[int] = set()
        #: Places that `retire` has left mapped for now.
        self._retired: set[int] = set()
        self._unmapped = threading.Condition()

    def map(self, at_granule: int, granules: Sequence[int]) -> None:
        """Maps held `granules` from granule `at_granule` of this span on.

        Raises GranuleMisuse, changing nothing, when a granule is not held for this span's owner, or the place is in use
        or outside the span.
        """
        self._require_free(at_granule, granules)
        self.memory.physical.show(self._address(at_granule), granules)
        self._at.update(zip(itertools.count(at_granule), granules, strict=False))
        self.memory.ledger.mapped(granules)

    def assign(self, at_granule: int, granules: Sequence[int]) -> None:
        """Like `map`, but each place can be used only after `show`."""
        self._require_free(at_granule, granules)
        self._at.update(zip(itertools.count(at_granule), granules, strict=False))
        self._unshown.update(range(at_granule, at_granule + len(granules)))
        self.memory.ledger.mapped(granules)

    def show(self, at_granule: int, count: int) -> None:
        """Maps places that were assigned. Their content is undefined. Any thread; none of them may be unmapped
        meanwhile. Waits for places that were retired."""
        places = range(at_granule, at_granule + count)
        with self._unmapped:
            while not self._retired.isdisjoint(places):
                self.memory._unmapping.hurry()
                self._unmapped.wait()
        self.memory.physical.show(self._address(at_granule), [self._at[at] for at in places], touch=False)
        self._unshown.difference_update(places)

    def _address(self, at_granule: int) -> int:
        return self.address + at_granule * self.memory.granule_bytes

    def _require_free(self, at_granule: int, granules: Sequence[int]) -> None:
        self._require_inside(at_granule, len(granules))
        self.memory.ledger.require(granules, GranuleState.HELD, self.owner)
        if any(at in self._at for at in range(at_granule, at_granule + len(granules))):
            raise GranuleMisuse(
                f"span {self.number} shows something in {at_granule}..{at_granule + len(granules)} already"
            )

    def unmap(self, at_granule: int, count: int) -> list[int]:
        """Unmaps `count` granules and returns their numbers; they are held and keep their content.

        Raises GranuleMisuse, changing nothing, unless the whole range is mapped.
        """
        self._require_shown(at_granule, count)
        self._hide(at_granule, count)
        return self._left(range(at_granule, at_granule + count))

    def _require_shown(self, at_granule: int, count: int) -> None:
        self._require_inside(at_granule, count)
        if not self.shows(at_granule, count):
            raise GranuleMisuse(f"span {self.number} shows nothing in part of {at_granule}..{at_granule + count}")

    def _left(self, places: range) -> list[int]:
        hidden = [self._at.pop(at) for at in places]
        self.memory.ledger.hidden(hidden)
        return hidden

    def retire(self, at_granule: int, count: int) -> list[int]:
        """Like `unmap`, but the range is unmapped a little later, on another thread; `assign` may be called at once. No
        queued work may use the range. Its granules are held and keep their content: others may map them already."""
        self._require_shown(at_granule, count)
        places = range(at_granule, at_granule + count)
        for first, shown in runs([at for at in places if at not in self._unshown]):
            with self._unmapped:
                self._retired.update(range(first, first + shown))
            gone = functools.partial(self._gone, range(first, first + shown))
            self.memory._unmapping.put(self._address(first), shown, gone)
        self._unshown.difference_update(places)
        return self._left(places)

    def _gone(self, places: range) -> None:
        with self._unmapped:
            self._retired.difference_update(places)
            self._unmapped.notify_all()

    def shows(self, at_granule: int, count: int) -> bool:
        """Whether the whole range is mapped."""
        return all(at in self._at for at in range(at_granule, at_granule + count))

    def mapped(self) -> list[tuple[int, int]]:
        """`(place, granule)` of every mapped granule, by place."""
        return sorted(self._at.items())

    def close(self) -> None:
        """Gives back mapped granules and the address range. Idempotent."""
        if self.memory._spans.pop(self.number, None) is None:
            return
        with self._unmapped:
            while self._retired:
                self.memory._unmapping.hurry()
                self._unmapped.wait()
        for at, _ in self.mapped():
            self._hide(at, 1)
        shown = list(self._at.values())
        self._at.clear()
        self.memory.ledger.hidden(shown)
        self.memory.physical.release(self.address, self.bytes)
        self.memory.give(shown)

    def _hide(self, at_granule: int, count: int) -> None:
        places = range(at_granule, at_granule + count)
        for first, shown in runs([at for at in places if at not in self._unshown]):
            self.memory.physical.hide(self._address(first), shown)
        self._unshown.difference_update(places)

    def _require_inside(self, at_granule: int, count: int) -> None:
        if at_granule < 0 or count < 0 or at_granule + count > self.granules:
            raise GranuleMisuse(
                f"{at_granule}..{at_granule + count} is outside span {self.number} of {self.granules} granules"
            )


def host_memory(total_bytes: int, granule_bytes: int) -> DeviceMemory:
    """`total_bytes` of host memory in granules of `granule_bytes`. Raises ValueError when a size is not positive, or
    not a multiple (the granule of the system's page)."""
    return DeviceMemory(HostMemory(total_bytes, granule_bytes), total_bytes // granule_bytes, granule_bytes)
