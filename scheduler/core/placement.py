"""Chooses a device: filter, score, pick. A pure function of (snapshot, turn, policy, seed)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler.core.filters import eligible
from scheduler.core.models import Floats
from scheduler.core.policies import Policy, spread
from scheduler.core.snapshot import PlacementRequest, Snapshot

#: Devices that a choice lists.
EXPLAINED = 5
#: Scores are rounded to this before they are compared, in seconds.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """The best devices, best first; the first is chosen.

    values: the cost of each of `terms`, device by device. Packed, as many choices are kept.
    """

    nodes: tuple[str, ...]
    terms: tuple[str, ...]
    values: array[float]

    @property
    def node(self) -> str:
        """The chosen device."""
        return self.nodes[0]

    @property
    def scores(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Each device with its scores by term."""
        width = len(self.terms)
        for i, node in enumerate(self.nodes):
            yield node, dict(zip(self.terms, self.values[i * width : (i + 1) * width], strict=True))

    @property
    def why(self) -> str:
        """One line: `node-1 work_s=0.00 load_s=0.05 | node-0 ...`."""
        width, line = len(self.terms), _format(self.terms)
        return " | ".join(
            [line % (node, *self.values[i * width : (i + 1) * width]) for i, node in enumerate(self.nodes)]
        )


@lru_cache(64)
def _format(terms: tuple[str, ...]) -> str:
    """The format of one device in `Choice.why`."""
    return " ".join(("%s", *(term.replace("%", "%%") + "=%.3g" for term in terms)))


def _upper_bound(total: Floats) -> float:
    """A bound that at least `EXPLAINED` values do not exceed: the largest minimum of `EXPLAINED` groups.

    Cheaper to find than the `EXPLAINED`-th lowest value, and rarely much larger.
    """
    groups = total[: len(total) // EXPLAINED * EXPLAINED].reshape(EXPLAINED, -1)
    return float(groups.min(axis=1).max())


def place(snapshot: Snapshot, turn: PlacementRequest, policy: Policy, seed: int) -> Choice:
    """The device for this turn. A hash of device and `seed` (64 bits) breaks ties, so idle devices share new sessions
    evenly.

    Raises what `filters.eligible` raises.
    """
    rows = eligible(snapshot, turn)
    terms = policy(snapshot, turn, rows, seed)
    costs = np.array(list(terms.values()), np.float64)
    total = np.rint(costs.sum(axis=0) / _EQUAL)
    total = np.fmin(total, np.inf)  # NaN (the policy knows nothing of the device) comes last
    near = np.flatnonzero(total <= _upper_bound(total)) if len(rows) > EXPLAINED else np.arange(len(rows))
    drawn = spread(snapshot, rows[near], seed)
    best = near[np.lexsort((drawn, total[near]))][:EXPLAINED]
    nodes = tuple([snapshot.names[row] for row in rows[best].tolist()])
    return Choice(nodes, tuple(terms), array("d", costs[:, best].tobytes("F")))
