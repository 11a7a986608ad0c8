"""The fleet as columns, a row a node: what a decision reads of a thousand nodes at once.

Kept up to date as reports come, so that nothing is collected from objects when a turn is placed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]
#: Names, their rows, models, then columns.
Steady = tuple[tuple[str, ...], Mapping[str, int], Mapping[str, Flags], Flags, Floats, Floats, Floats, Floats, Floats, Floats, Hashes]

#: A node that has not reported for this long gets no new work while others can take it, in seconds.
SUSPECT_AFTER_S = 3.0
#: Priorities that placement tells apart: 0 and as many more and less urgent ones; beyond them all are equal.
_MOST_URGENT, _LEAST_URGENT = -7, 8
CLASSES = _LEAST_URGENT - _MOST_URGENT + 1


def urgency_class(priority: int) -> int:
    """The class of a priority, 0 is the most urgent."""
    return min(max(priority, _MOST_URGENT), _LEAST_URGENT) - _MOST_URGENT


class Columns:
    """See the module. Arrays have room for more rows than there are nodes; `count` says how many are used."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        #: Replaced, never written to, as `names` is: decisions keep it.
        self.rows: Mapping[str, int] = {}
        size = 16
        self.serving: Flags = np.zeros(size, np.bool_)
        self.heard_s: Floats = np.zeros(size)
        #: Its engine stands still.
        self.stalled: Flags = np.zeros(size, np.bool_)
        #: From when on a node that came and went is trusted again.
        self.trusted_s: Floats = np.zeros(size)
        #: Outstanding work by class of urgency as reported, and the requests by class that were placed since.
        self.reported_s: Floats = np.zeros((CLASSES, size))
        self.young_count: Floats = np.zeros((CLASSES, size))
        #: Requests that hints promise, by class, each counted with the chance that it comes.
        self.expected: Floats = np.zeros((CLASSES, size))
        self.pages_total: Floats = np.zeros(size)
        self.pages_free: Floats = np.zeros(size)
        #: Infinite where nobody knows.
        self.prefill_token_s: Floats = np.zeros(size)
        self.link_bytes_per_s: Floats = np.ones(size)
        self.ssd_bytes_per_s: Floats = np.ones(size)
        self.blob_bytes_per_s: Floats = np.ones(size)
        #: Classes of urgency of which there has been any work, ascending: the other rows are zero.
        self.classes: tuple[int, ...] = ()
        #: Of the name: decides between equals.
        self.hashes: Hashes = np.zeros(size, np.uint64)
        #: By model: which nodes serve it.
        self.models: dict[str, Flags] = {}
        self._steady: Steady | None = None

    def _grow(self) -> None:
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray):
                setattr(self, name, np.concatenate([old, np.zeros_like(old)], axis=-1))
        self.models = {model: np.concatenate([serves, np.zeros_like(serves)]) for model, serves in self.models.items()}

    @property
    def count(self) -> int:
        """Nodes."""
        return len(self.names)

    def add(self, name: str) -> None:
        """A row for a node that nothing is known of."""
        if self.count == len(self.serving):
            self._grow()
        row = self.count
        self.prefill_token_s[row] = np.inf
        self._steady = None
        self.hashes[row] = int.from_bytes(blake3(name.encode()).digest(8), "little")
        self.names += (name,)
        self.rows = {**self.rows, name: row}

    def describe(self, name: str, models: Collection[str], link: float, ssd: float, blob: float) -> None:
        """What a worker said when it joined; rates in bytes a second."""
        row = self.rows[name]
        self._steady = None
        for model in models:
            self.models.setdefault(model, np.zeros(len(self.serving), np.bool_))
        for model, serves in self.models.items():
            serves[row] = model in models
        self.link_bytes_per_s[row], self.ssd_bytes_per_s[row], self.blob_bytes_per_s[row] = link, ssd, blob

    def report(
        self,
        name: str,
        serving: bool,
        heard_s: float,
        seconds: Mapping[int, float],
        young: Mapping[int, int],
        pages_total: int,
        pages_free: int,
        prefill_token_s: float,
        *,
        stalled: bool = False,
    ) -> None:
        """How a node is now; work by class of urgency."""
        row = self.rows[name]
        self._steady = None
        self.serving[row], self.heard_s[row], self.stalled[row] = serving, heard_s, stalled
        self.pages_total[row], self.pages_free[row], self.prefill_token_s[row] = pages_total, pages_free, prefill_token_s or np.inf
        self.reported_s[:, row] = 0.0
        self.young_count[:, row] = 0.0
        for urgency, value in seconds.items():
            self._note(urgency)
            self.reported_s[urgency, row] = value
        for urgency, count in young.items():
            self._note(urgency)
            self.young_count[urgency, row] = count

    def _note(self, urgency: int) -> None:
        if urgency not in self.classes:
            self.classes = tuple(sorted((*self.classes, urgency)))

    def steady(self) -> Steady:
        """What changes by reports only, as `Snapshot` begins: never written to, so that decisions between two reports share it."""
        if self._steady is None:
            n = self.count
            models = {model: serves[:n].copy() for model, serves in self.models.items()}
            self._steady = (
                self.names,
                self.rows,
                models,
                self.serving[:n].copy(),
                self.pages_total[:n].copy(),
                self.pages_free[:n].copy(),
                self.prefill_token_s[:n].copy(),
                self.link_bytes_per_s[:n].copy(),
                self.ssd_bytes_per_s[:n].copy(),
                self.blob_bytes_per_s[:n].copy(),
                self.hashes[:n].copy(),
            )
        return self._steady

    def suspect(self, now: float) -> Flags:
        """Nodes that get work only if there is no other: not heard of for a while, back for too short a time, or with an engine that stands
        still."""
        n = self.count
        found: Flags = (now - self.heard_s[:n] > SUSPECT_AFTER_S) | (now < self.trusted_s[:n]) | self.stalled[:n]
        return found

    def young(self, name: str, urgency: int, count: int) -> None:
        """So many more requests were placed there."""
        self._note(urgency)
        self.young_count[urgency, self.rows[name]] += count

    def expect(self, name: str, urgency: int, requests: float) -> None:
        """So many more requests of a class, or fewer, are promised there by hints."""
        self._note(urgency)
        at = (urgency, self.rows[name])
        self.expected[at] = max(float(self.expected[at]) + requests, 0.0)

    def work_s(self, name: str, request_s: float) -> float:
        """A node's outstanding work of all classes."""
        row = self.rows[name]
        return float(self.reported_s[:, row].sum() + self.young_count[:, row].sum() * request_s)

    def validate(self, names: Collection[str]) -> None:
        """Raise AssertionError when rows and names disagree."""
        assert set(self.names) == set(names) and self.rows == {name: row for row, name in enumerate(self.names)}
        assert (self.young_count >= 0).all() and (self.expected >= 0).all()
        unused = [i for i in range(CLASSES) if i not in self.classes]
        assert not any(by_class[unused].any() for by_class in (self.reported_s, self.young_count, self.expected))
