"""Counts which answers kept to their model's targets (`models.NAME.ttft_s`, `tpot_s`): metrics, and `GET /v1/models`.

Each choice counts once for each target of its model, when it is decided: that for the first token with the token, that
for further tokens with the end of an answer of several. One that fails keeps neither. One whose caller leaves first
counts only if its first token was late already. Refused requests (4xx) do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gateway import metrics

#: The targets.
TTFT, TPOT = "ttft", "tpot"


class Attainments:
    """Counts of this process since its start, by model and target."""

    def __init__(self) -> None:
        self._turns: Counter[tuple[str, str]] = Counter()
        self._kept: Counter[tuple[str, str]] = Counter()
        #: Since the last `take`: answers that counted, and those that kept to the target.
        self._fresh: dict[tuple[str, str], tuple[int, int]] = {}

    def take(self) -> dict[tuple[str, str], tuple[int, int]]:
        """By model and target: answers that counted since the last call, and those that kept to the target."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def answer(self, model: str, targets: Mapping[str, float]) -> Attainment:
        """A new answer of a known model. targets: in seconds; 0: none."""
        return Attainment(self, model, {target: most_s for target, most_s in targets.items() if most_s})

    def shown(self, model: str) -> dict[str, Any]:
        """For `GET /v1/models`: answers that counted, and those that kept to the target."""
        return {
            target: {"turns": self._turns[model, target], "attained": self._kept[model, target]}
            for target in (TTFT, TPOT)
        }

    def decided(self, model: str, target: str, *, kept: bool) -> None:
        """An answer kept to a target, or did not."""
        self._turns[model, target] += 1
        turns, good = self._fresh.get((model, target), (0, 0))
        self._fresh[model, target] = turns + 1, good + kept
        metrics.child(metrics.SLO_TURNS, model, target).inc()
        attained = metrics.child(metrics.SLO_ATTAINED, model, target)  # there with 0, so that shares can be computed
        if kept:
            self._kept[model, target] += 1
            attained.inc()


class Attainment:
    """One answer, and its targets that are not decided."""

    def __init__(self, counts: Attainments, model: str, targets: dict[str, float]) -> None:
        self._counts, self._model, self._open = counts, model, targets

    def took(self, target: str, seconds: float) -> None:
        """Time to its first token, or a token after that."""
        most_s = self._open.pop(target, None)
        if most_s is not None:
            self._counts.decided(self._model, target, kept=seconds <= most_s)

    def stopped(self, waited_s: float, *, failed: bool) -> None:
        """Nothing more comes. waited_s: since its arrival."""
        if failed or waited_s > self._open.get(TTFT, float("inf")):
            self.took(TTFT, float("inf"))
        if failed:
            self.took(TPOT, float("inf"))
