"""A run of decode-only steps as one event, with a closed form for its end."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Most steps of one stretch.
LONGEST = 256


@dataclass(slots=True)
class Stretch:
    """`count` steps from `start_s`. first_s: duration of the first. growth_s: added by each step to the next, as each
    sequence's context grows by a token."""

    start_s: float
    count: int
    first_s: float
    growth_s: float = 0.0

    def seconds(self, count: int) -> float:
        """Duration of the first `count` steps."""
        return count * self.first_s + self.growth_s * count * (count - 1) / 2

    @property
    def end_s(self) -> float:
        """End of the last step."""
        return self.start_s + self.seconds(self.count)

    def over(self, now: float) -> int:
        """Number of steps finished at `now`; none before `start_s`, when a timer is overdue."""
        a, b, seconds = self.growth_s / 2, self.first_s - self.growth_s / 2, max(now - self.start_s, 0.0)
        found = (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a) if a > 1e-15 else seconds / b
        return min(int(found + 1e-9), self.count)

    def pass_over(self, count: int) -> None:
        """Drop the first `count` steps."""
        self.start_s += self.seconds(count)
        self.first_s += self.growth_s * count
        self.count -= count

    def cut(self, now: float) -> bool:
        """End with the current step. False: it was the last one anyway."""
        count = min(self.over(now) + 1, self.count)
        cut, self.count = count < self.count, count
        return cut
