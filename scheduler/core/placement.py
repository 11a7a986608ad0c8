"""Filter, score, pick: a pure function of (snapshot, turn, seed)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.core.filters import eligible
from scheduler.core.policies import Policy, spread
from scheduler.core.snapshot import Snapshot, Turn

EXPLAINED = 5
#: Scores that differ by less are equal, in seconds.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """The node, and the best nodes' scores by term, best first."""

    node: str
    scores: tuple[tuple[str, dict[str, float]], ...]

    @property
    def why(self) -> str:
        """One line: `node-1 work_s=0.00 load_s=0.05 | node-0 ...`."""
        return " | ".join(f"{name} " + " ".join(f"{k}={v:.3g}" for k, v in terms.items()) for name, terms in self.scores)


def place(snapshot: Snapshot, turn: Turn, policy: Policy, seed: int) -> Choice:
    """The node for this turn. A hash of node and `seed` (64 bits) decides between equals, so that idle nodes share new sessions evenly.

    Raises what `filters.eligible` raises.
    """
    rows = eligible(snapshot, turn)
    terms = policy(snapshot, turn, rows, seed)
    total = np.round(sum(terms.values()) / _EQUAL)
    total[np.isnan(total)] = np.inf  # a policy may know nothing of some nodes
    near = np.flatnonzero(total <= np.partition(total, EXPLAINED)[EXPLAINED]) if len(rows) > EXPLAINED else np.arange(len(rows))
    drawn = spread(snapshot, rows[near], seed)
    best = near[np.lexsort((drawn, total[near]))][:EXPLAINED]
    scores = tuple((snapshot.names[rows[i]], {name: float(values[i]) for name, values in terms.items()}) for i in best)
    return Choice(scores[0][0], scores)
