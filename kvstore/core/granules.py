"""Which granules of the arena belong to no slab: free runs, merged again as slabs are given back.

Invariants (`validate`): runs neither overlap nor touch, and the tables by start, by end and by length name the same
runs.
"""

from __future__ import annotations


class Granules:
    """`count` granules, numbered from 0, all free at first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._length: dict[int, int] = {}  #: of the run that starts there
        self._start: dict[int, int] = {}  #: of the run that ends before this granule
        self._of_length: dict[int, dict[int, None]] = {}  #: starts of the runs
        if count:
            self._add(0, count)

    def copy(self) -> Granules:
        """An independent copy, for an eviction plan."""
        made = Granules(0)
        made.count = self.count
        made._length = self._length.copy()
        made._start = self._start.copy()
        made._of_length = {length: starts.copy() for length, starts in self._of_length.items()}
        return made

    def available(self, granules: int) -> int:
        """How many runs of `granules` adjacent granules can be taken."""
        return sum(len(starts) * (length // granules) for length, starts in self._of_length.items())

    def take(self, granules: int) -> int | None:
        """Take adjacent granules from the shortest run that has as many. Returns the first; None when there is none."""
        length = min((n for n in self._of_length if n >= granules), default=None)
        if length is None:
            return None
        start = next(iter(self._of_length[length]))
        self._remove(start)
        if length > granules:
            self._add(start + granules, length - granules)
        return start

    def give(self, start: int, granules: int) -> None:
        """Return taken granules."""
        before, after = self.beside(start, granules)
        if before:
            self._remove(start - before)
        if after:
            self._remove(start + granules)
        self._add(start - before, before + granules + after)

    def beside(self, start: int, granules: int) -> tuple[int, int]:
        """Numbers of free granules directly before and directly after these."""
        first = self._start.get(start)
        return (0 if first is None else start - first), self._length.get(start + granules, 0)

    @property
    def free(self) -> int:
        """Number of free granules."""
        return sum(self._length.values())

    def _add(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        self._of_length.setdefault(length, {})[start] = None

    def _remove(self, start: int) -> None:
        length = self._length.pop(start)
        del self._start[start + length]
        starts = self._of_length[length]
        del starts[start]
        if not starts:
            del self._of_length[length]

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        end = -1
        for start, length in sorted(self._length.items()):
            assert length > 0 and start > end and start + length <= self.count
            assert self._start[start + length] == start and start in self._of_length[length]
            end = start + length
        assert len(self._start) == len(self._length) == sum(len(s) for s in self._of_length.values())
