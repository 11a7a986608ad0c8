"""Predicts a step's duration by split, batch and context (HARLI, section 5). Decides nothing.

The fits are measured (`contracts.corun`, `worker.core.fit_steps`). What has changed since (clocks, other load, another
trainer) is learned from the steps themselves, as `worker.core.pace` learns its pace: one factor each for steps alone,
steps beside training and prompts, and one for each split, whose fit may be off. `margin` says how much longer than
predicted nearly every step beside training may be; the choice of a split leaves it (`worker.core.harvest`).
"""

from __future__ import annotations

import math

from contracts.corun import CorunFit, StepFit

#: Weight of a step in a factor; the most that one step counts, and that a factor may become, and that of a split, and
#: their inverses.
_WEIGHT, _MOST_ERROR, _MOST_FACTOR, _MOST_OWN = 0.05, 2.0, 3.0, 1.25
#: The margin at first, its least and greatest value; what a step beyond it adds.
MARGIN, _LEAST_MARGIN, _MOST_MARGIN, _BEYOND = 0.03, 0.01, 0.3, 0.01
#: Part of the steps beside training that may take longer than predicted plus the margin.
_EXCEED = 0.005


class Predictor:
    """Of one model on one device. Mutable: `stepped` learns. Raises ValueError where a pair has no fit."""

    def __init__(self, fit: CorunFit) -> None:
        self.fit = fit
        #: Measured over fitted, lately: steps alone, steps beside training, prompts' part of a step.
        self.alone = self.corun = self.prompts = 1.0
        #: Relative; `1 - _EXCEED` of the steps beside training take at most so much longer than predicted.
        self.margin = MARGIN
        #: (infer, training) -> step, factor, seconds of a prompt's token.
        self._of: dict[tuple[int, int], tuple[StepFit, float, float]] = {}
        #: Measured over predicted by the rest, of each split with training.
        self._own = {(pair.infer, pair.training): 1.0 for pair in fit.pairs}
        alone = {solo.share: solo for solo in fit.solo}
        for solo in fit.solo:
            self._of[solo.share, 0] = (solo.step, 1.0, solo.prefill_token_s)
        for pair in fit.pairs:
            solo = alone[pair.infer]
            factor = fit.corun.factor(pair.infer / fit.shares, pair.training / fit.shares)
            token_s = solo.prefill_token_s
            if pair.step is not None:
                # Prompts suffer as a step of one sequence does.
                whole_s = solo.step.seconds(1, 0)
                token_s *= pair.step.seconds(1, 0) / whole_s if whole_s else 1.0
                self._of[pair.infer, pair.training] = (pair.step, 1.0, token_s)
            else:
                self._of[pair.infer, pair.training] = (solo.step, factor, factor * token_s)

    def latency_s(self, infer: int, training: int, batch: int, tokens: int, prefill_tokens: int = 0) -> float:
        """Seconds of a step of `batch` sequences with `tokens` of context in all, which also computes `prefill_tokens`,
        with `infer` units, beside training on `training` units; 0: alone. Raises ValueError for a split that was not
        measured."""
        try:
            step, factor, prefill_token_s = self._of[infer, training]
        except KeyError:
            raise ValueError(
                f"no fit for {infer} + {training} of {self.fit.shares} units; measure with `upbeat profile --corun`"
            ) from None
        learned = self.corun * self._own[infer, training] if training else self.alone
        seconds = learned * factor * step.seconds(batch, tokens)
        if prefill_tokens:
            seconds += learned * self.prompts * prefill_token_s * prefill_tokens
        return seconds

    def stepped(self, infer: int, training: int, batch: int, tokens: int, prefill_tokens: int, seconds: float) -> float:
        """Learn from a step. Returns measured over predicted."""
        predicted_s = self.latency_s(infer, training, batch, tokens, prefill_tokens)
        if predicted_s <= 0 or seconds <= 0:
            return 1.0
        error = seconds / predicted_s
        counted = min(max(error, 1 / _MOST_ERROR), _MOST_ERROR)
        if prefill_tokens:
            # The prompts' part of the error; the rest is learned from steps without any.
            part = 1 - self.latency_s(infer, training, batch, tokens) / predicted_s
            self.prompts = _bounded(self.prompts * counted ** (_WEIGHT * part))
        elif training:
            self.corun = _bounded(self.corun * counted**_WEIGHT)
            self._own[infer, training] = _bounded(self._own[infer, training] * counted**_WEIGHT, _MOST_OWN)
            beyond = error > 1 + self.margin
            self.margin += _BEYOND * (1 - _EXCEED) if beyond else -_BEYOND * _EXCEED
            self.margin = min(max(self.margin, _LEAST_MARGIN), _MOST_MARGIN)
        else:
            self.alone = _bounded(self.alone * counted**_WEIGHT)
        return error

    def validate(self) -> None:
        """Raise AssertionError when a bound is broken."""
        for factor in (self.alone, self.corun, self.prompts):
            assert math.isfinite(factor) and 1 / _MOST_FACTOR <= factor <= _MOST_FACTOR
        assert all(1 / _MOST_OWN <= own <= _MOST_OWN for own in self._own.values())
        assert _LEAST_MARGIN <= self.margin <= _MOST_MARGIN


def _bounded(factor: float, most: float = _MOST_FACTOR) -> float:
    return min(max(factor, 1 / most), most)
