"""Filter, score, pick: a pure function of (snapshot, turn, seed)."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from scheduler.core.filters import eligible
from scheduler.core.scorers import POLICIES, Terms
from scheduler.core.snapshot import Snapshot, Turn

EXPLAINED = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """The node, and the best nodes' scores by term, best first."""

    node: str
    scores: tuple[tuple[str, Terms], ...]

    @property
    def why(self) -> str:
        """One line: `node-1 work_s=0.00 load_s=0.05 | node-0 ...`."""
        return " | ".join(f"{name} " + " ".join(f"{k}={v:.3g}" for k, v in terms.items()) for name, terms in self.scores)


def place(snapshot: Snapshot, turn: Turn, policy: str, seed: bytes) -> Choice:
    """The node for this turn. Equal scores are decided by a hash of `seed`, so that idle nodes share new sessions evenly.

    Raises what `filters.eligible` raises.
    """
    scorer = POLICIES[policy]
    scored = [(scorer(node, snapshot, turn), node) for node in eligible(snapshot, turn)]
    scored.sort(key=lambda item: (round(sum(item[0].values()), 9), blake3(seed + item[1].name.encode()).digest()))
    return Choice(scored[0][1].name, tuple((node.name, terms) for terms, node in scored[:EXPLAINED]))
