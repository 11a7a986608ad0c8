"""The fleet as columns with a row per device, so that a decision reads a thousand devices at once.

Updated with every report, so that placing a turn collects nothing from objects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from contracts.devices import node_of
from scheduler.core.models import Flags, Floats, ModelColumns, ModelLoad, ModelView

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.intp]


class Place(NamedTuple):
    """A node's rows. first: of its first device. rows: an index for all its devices: a number, a slice if they are
    adjacent (as after `Fleet.add`), else an array."""

    first: int
    rows: int | slice | Rows


#: The first fields of `Snapshot`, in its order.
Steady = tuple[tuple[str, ...], Mapping[str, int], Mapping[str, Place], Flags, Floats, Floats, Floats, Hashes]

#: A device that has not reported for this long is suspect, in seconds.
SUSPECT_AFTER_S = 3.0
#: The range of priorities that placement distinguishes; those beyond count as its ends.
_MOST_URGENT, _LEAST_URGENT = -7, 8
CLASSES = _LEAST_URGENT - _MOST_URGENT + 1


def urgency_class(priority: int) -> int:
    """The urgency class of a priority; 0 is the most urgent."""
    return min(max(priority, _MOST_URGENT), _LEAST_URGENT) - _MOST_URGENT


class Columns:
    """See the module. Arrays may be longer than `count`, the number of rows in use."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        #: Device to row, and node to place. Like `names` replaced and never mutated, as snapshots share them.
        self.rows: Mapping[str, int] = {}
        self.places: Mapping[str, Place] = {}
        size = 16
        self.serving: Flags = np.zeros(size, np.bool_)
        self.heard_s: Floats = np.zeros(size)
        #: The engine is stalled.
        self.stalled: Flags = np.zeros(size, np.bool_)
        #: Until when a device that left repeatedly is suspect.
        self.trusted_s: Floats = np.zeros(size)
        #: Seconds of outstanding work of all models by urgency class: as reported, and of placements since.
        self.reported_s: Floats = np.zeros((CLASSES, size))
        self.unconfirmed_s: Floats = np.zeros((CLASSES, size))
        #: Requests that hints announce, by class, weighted by their probability.
        self.expected: Floats = np.zeros((CLASSES, size))
        self.link_bytes_per_s: Floats = np.ones(size)
        self.ssd_bytes_per_s: Floats = np.ones(size)
        self.blob_bytes_per_s: Floats = np.ones(size)
        #: Urgency classes that have ever had work, ascending; the rows of the others are zero.
        self.classes: tuple[int, ...] = ()
        #: Of the devices' names, to break ties.
        self.hashes: Hashes = np.zeros(size, np.uint64)
        self.models: dict[str, ModelColumns] = {}
        self._has: dict[str, frozenset[str]] = {}  #: device to its models
        self._steady: Steady | None = None
        self._views: dict[str, ModelView] = {}

    def _grow(self) -> None:
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray):
                setattr(self, name, np.concatenate([old, np.zeros_like(old)], axis=-1))
        for model in self.models.values():
            model.grow()

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.names)

    def add(self, name: str) -> None:
        """Add a row for a device. Only its node's rates are known, if another device has joined."""
        if self.count == len(self.serving):
            self._grow()
        row = self.count
        self._invalidate()
        self.hashes[row] = int.from_bytes(blake3(name.encode()).digest(8), "little")
        self.names += (name,)
        self.rows = {**self.rows, name: row}
        node = node_of(name)
        before = self.places.get(node)
        self.places = {**self.places, node: _place(before, row)}
        if before is not None:
            for column in (self.link_bytes_per_s, self.ssd_bytes_per_s, self.blob_bytes_per_s):
                column[row] = column[before.first]

    def _invalidate(self) -> None:
        self._steady = None
        self._views = {}

    def describe(self, node: str, link: float, ssd: float, blob: float) -> None:
        """Set a node's rates, in bytes a second."""
        rows = self.places[node].rows
        self._invalidate()
        self.link_bytes_per_s[rows], self.ssd_bytes_per_s[rows], self.blob_bytes_per_s[rows] = link, ssd, blob

    def report(
        self,
        name: str,
        serving: bool,
        heard_s: float,
        seconds: Mapping[int, float],
        unconfirmed_s: Mapping[int, float],
        models: Mapping[str, ModelLoad],
        *,
        stalled: bool = False,
    ) -> None:
        """Set a device's state. seconds, unconfirmed_s: work by urgency class. models: all that it has."""
        row = self.rows[name]
        self._invalidate()
        self.serving[row], self.heard_s[row], self.stalled[row] = serving, heard_s, stalled
        for model in self._has.get(name, frozenset()) - models.keys():
            self.models[model].take(row, None)
        self._has[name] = frozenset(models)
        for model, load in models.items():
            if model not in self.models:
                self.models[model] = ModelColumns(len(self.serving))
            self.models[model].take(row, load)
        self.reported_s[:, row] = 0.0
        self.unconfirmed_s[:, row] = 0.0
        for urgency, value in seconds.items():
            self._note(urgency)
            self.reported_s[urgency, row] = value
        for urgency, value in unconfirmed_s.items():
            self._note(urgency)
            self.unconfirmed_s[urgency, row] = value

    def _note(self, urgency: int) -> None:
        if urgency not in self.classes:
            self.classes = tuple(sorted((*self.classes, urgency)))

    def steady(self) -> Steady:
        """The first fields of `Snapshot`, which only reports change. Never mutated, so snapshots between two reports
        share them."""
        if self._steady is None:
            n = self.count
            self._steady = (
                self.names,
                self.rows,
                self.places,
                self.serving[:n].copy(),
                self.link_bytes_per_s[:n].copy(),
                self.ssd_bytes_per_s[:n].copy(),
                self.blob_bytes_per_s[:n].copy(),
                self.hashes[:n].copy(),
            )
        return self._steady

    def of_model(self, model: str) -> ModelView:
        """Like `steady`, for one model. No device serves an unknown one."""
        view = self._views.get(model)
        if view is None:
            known = self.models.get(model) or ModelColumns(self.count)
            view = known.view(self.count)
            if model in self.models:  # callers choose other names: those are not kept
                self._views[model] = view
        return view

    def suspect(self, now: float) -> Flags:
        """Devices that get work only if there is no other: silent, back too recently, or with a stalled engine."""
        n = self.count
        found: Flags = (now - self.heard_s[:n] > SUSPECT_AFTER_S) | (now < self.trusted_s[:n]) | self.stalled[:n]
        return found

    def add_unconfirmed(self, name: str, urgency: int, seconds: float) -> None:
        """Add a placed request's work."""
        self._note(urgency)
        self.unconfirmed_s[urgency, self.rows[name]] += seconds

    def expect(self, name: str, urgency: int, requests: float) -> None:
        """Add to the requests of a class that hints announce there; `requests` may be negative."""
        self._note(urgency)
        at = (urgency, self.rows[name])
        self.expected[at] = max(float(self.expected[at]) + requests, 0.0)

    def work_s(self, name: str) -> float:
        """A device's outstanding work of all classes, in seconds."""
        row = self.rows[name]
        return float(self.reported_s[:, row].sum() + self.unconfirmed_s[:, row].sum())

    def validate(self, names: Collection[str]) -> None:
        """Raise AssertionError when rows and names disagree."""
        assert set(self.names) == set(names) and self.rows == {name: row for row, name in enumerate(self.names)}
        for node, place in self.places.items():
            found = np.atleast_1d(np.arange(self.count)[place.rows]).tolist()
            assert (
                found == [row for row, name in enumerate(self.names) if node_of(name) == node]
                and found[0] == place.first
            )
        assert {node_of(name) for name in self.names} == set(self.places)
        for model, columns in self.models.items():
            assert {self.names[row] for row in np.flatnonzero(columns.state)} == {
                name for name, has in self._has.items() if model in has
            }
        assert (self.unconfirmed_s >= 0).all() and (self.expected >= 0).all()
        unused = [i for i in range(CLASSES) if i not in self.classes]
        assert not any(by_class[unused].any() for by_class in (self.reported_s, self.unconfirmed_s, self.expected))


def _place(before: Place | None, row: int) -> Place:
    """A node's place with one more row."""
    if before is None:
        return Place(row, row)
    last = (
        before.rows if isinstance(before.rows, int) else before.rows.stop - 1 if isinstance(before.rows, slice) else -1
    )
    if row == last + 1 and last >= 0:
        return Place(before.first, slice(before.first, row + 1))
    return Place(before.first, np.append(np.arange(row)[before.rows], row))
