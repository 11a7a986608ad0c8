"""Rates and shares of a node's activity between two samples of its counters.

A counter that is smaller than before belongs to a restarted process: all of it is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Samples = Mapping[str, float]


def sample(family: str, **labels: str) -> str:
    """A sample's name in Prometheus' text format."""
    return family + ("{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else "")


@dataclass(frozen=True, slots=True)
class Look:
    """Two samples of one node, `seconds` apart. Without an earlier one, counters are since the processes started."""

    now: Samples
    before: Samples = field(default_factory=dict)
    seconds: float = 0.0

    def gained(self, name: str) -> float:
        """How much a counter grew."""
        new, old = self.now.get(name, 0.0), self.before.get(name, 0.0)
        return new if new < old else new - old

    def gained_in(self, family: str, **labels: str) -> float:
        """Sum of the growth of a family's counters that have at least these labels."""
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        names = (n for n in self.now if n.partition("{")[0] == family and all(w in n for w in wanted))
        return sum(self.gained(n) for n in names)

    def rate(self, name: str) -> float:
        """A counter's growth a second; 0 without an earlier sample."""
        return self.gained(name) / self.seconds if self.seconds > 0 else 0.0

    def shares(self, families: tuple[str, ...], label: str, values: tuple[str, ...]) -> dict[str, float] | None:
        """Each label value's share of these families' growth; None if nothing grew."""
        grown = {value: sum(self.gained_in(family, **{label: value}) for family in families) for value in values}
        total = sum(grown.values())
        return {value: amount / total for value, amount in grown.items()} if total else None
