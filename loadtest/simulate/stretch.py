"""Steps that follow each other and only decode: one event, whose end is reckoned."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Steps in one go at most.
LONGEST = 256


@dataclass(slots=True)
class Stretch:
    """So many steps from `start_s` on: what the first takes, and by how much each takes longer than the one before, as each reads a token
    more of each sequence."""

    start_s: float
    count: int
    first_s: float
    growth_s: float = 0.0

    def seconds(self, count: int) -> float:
        """What the first `count` take."""
        return count * self.first_s + self.growth_s * count * (count - 1) / 2

    @property
    def end_s(self) -> float:
        """When the last is over."""
        return self.start_s + self.seconds(self.count)

    def over(self, now: float) -> int:
        """How many are over."""
        a, b, seconds = self.growth_s / 2, self.first_s - self.growth_s / 2, now - self.start_s
        found = (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a) if a > 1e-15 else seconds / b
        return min(int(found + 1e-9), self.count)

    def pass_over(self, count: int) -> None:
        """Begin with the step after the first `count`."""
        self.start_s += self.seconds(count)
        self.first_s += self.growth_s * count
        self.count -= count

    def cut(self, now: float) -> bool:
        """It ends with the step that is under way. False: it ends there anyway."""
        count = min(self.over(now) + 1, self.count)
        cut, self.count = count < self.count, count
        return cut
