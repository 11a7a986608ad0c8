"""Filter, score, pick: a pure function of (snapshot, turn, seed)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scheduler.core.filters import eligible
from scheduler.core.models import Floats
from scheduler.core.policies import Policy, spread
from scheduler.core.snapshot import Snapshot, Turn

EXPLAINED = 5
#: Scores that differ by less are equal, in seconds.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """The best nodes, best first: the first is chosen. values: what each of `terms` costs there, node by node; packed, as many choices
    are kept."""

    nodes: tuple[str, ...]
    terms: tuple[str, ...]
    values: array[float]

    @property
    def node(self) -> str:
        """The chosen one."""
        return self.nodes[0]

    @property
    def scores(self) -> Iterator[tuple[str, dict[str, float]]]:
        """The nodes' scores by term."""
        width = len(self.terms)
        for i, node in enumerate(self.nodes):
            yield node, dict(zip(self.terms, self.values[i * width : (i + 1) * width], strict=True))

    @property
    def why(self) -> str:
        """One line: `node-1 work_s=0.00 load_s=0.05 | node-0 ...`."""
        width, line = len(self.terms), _line(self.terms)
        return " | ".join([line % (node, *self.values[i * width : (i + 1) * width]) for i, node in enumerate(self.nodes)])


@lru_cache(64)
def _line(terms: tuple[str, ...]) -> str:
    """The format of a node's scores."""
    return " ".join(("%s", *(term.replace("%", "%%") + "=%.3g" for term in terms)))


def _enough(total: Floats) -> float:
    """At least the `EXPLAINED`-th least, and rarely much more: the worst of the bests of so many groups, which is sooner found."""
    groups = total[: len(total) // EXPLAINED * EXPLAINED].reshape(EXPLAINED, -1)
    return float(groups.min(axis=1).max())


def place(snapshot: Snapshot, turn: Turn, policy: Policy, seed: int) -> Choice:
    """The node for this turn. A hash of node and `seed` (64 bits) decides between equals, so that idle nodes share new sessions evenly.

    Raises what `filters.eligible` raises.
    """
    rows = eligible(snapshot, turn)
    terms = policy(snapshot, turn, rows, seed)
    costs = np.array(list(terms.values()), np.float64)
    total = np.rint(costs.sum(axis=0) / _EQUAL)
    total = np.fmin(total, np.inf)  # a policy may know nothing of some nodes: not a number comes last
    near = np.flatnonzero(total <= _enough(total)) if len(rows) > EXPLAINED else np.arange(len(rows))
    drawn = spread(snapshot, rows[near], seed)
    best = near[np.lexsort((drawn, total[near]))][:EXPLAINED]
    nodes = tuple([snapshot.names[row] for row in rows[best].tolist()])
    return Choice(nodes, tuple(terms), array("d", costs[:, best].tobytes("F")))
