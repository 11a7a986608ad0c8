"""What a node did between two looks at its samples: rates and shares, computed from counters that only grow.

A counter that is smaller than before belongs to a process that was restarted: all of it is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Samples = Mapping[str, float]


def sample(family: str, **labels: str) -> str:
    """The name of one sample, as Prometheus' text format writes it."""
    return family + ("{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else "")


@dataclass(frozen=True, slots=True)
class Look:
    """Two looks at one node, `seconds` apart; without an earlier one, the counters since the processes started."""

    now: Samples
    before: Samples = field(default_factory=dict)
    seconds: float = 0.0

    def gained(self, name: str) -> float:
        """How much a counter grew."""
        new, old = self.now.get(name, 0.0), self.before.get(name, 0.0)
        return new if new < old else new - old

    def gained_in(self, family: str, **labels: str) -> float:
        """How much all counters of a family with (at least) these labels grew."""
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        names = (n for n in self.now if n.partition("{")[0] == family and all(w in n for w in wanted))
        return sum(self.gained(n) for n in names)

    def rate(self, name: str) -> float:
        """A counter's growth a second; without an earlier look, 0."""
        return self.gained(name) / self.seconds if self.seconds > 0 else 0.0

    def shares(self, families: tuple[str, ...], label: str, values: tuple[str, ...]) -> dict[str, float] | None:
        """What part of these families' growth each value of a label has; None when nothing grew."""
        grown = {value: sum(self.gained_in(family, **{label: value}) for family in families) for value in values}
        total = sum(grown.values())
        return {value: amount / total for value, amount in grown.items()} if total else None
