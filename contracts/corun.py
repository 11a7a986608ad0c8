"""Fits of decode steps by part of a device, alone and beside training (HARLI, equations 2 and 3).

A device has `shares` units: cores, or groups of a GPU's processors. Inference has some, training some of the others.
`worker.core.fit_steps` makes the fits, `worker.core.predictor` reads them, and a profile keeps them
(`contracts.latency_profile`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds of a decode step: `c0_s + b0_s x batch + k0_s x tokens`, tokens: context of all its sequences (equation
    2).

    bends: (batch, seconds a sequence): beyond that batch each further sequence costs so much instead of `b0_s`; empty
    where the equation fits as it is. None of the figures is negative, so more work never takes less time.
    """

    b0_s: float
    c0_s: float
    k0_s: float
    bends: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for impossible figures."""
        _not_negative(b0_s=self.b0_s, c0_s=self.c0_s, k0_s=self.k0_s)
        for batch, slope_s in self.bends:
            _not_negative(bends=batch)
            _not_negative(bends=slope_s)
        if any(left >= right for (left, _), (right, _) in pairwise(self.bends)):
            raise ValueError(f"bends {self.bends} must ascend by batch")

    def seconds(self, batch: float, tokens: float) -> float:
        """Of a step of `batch` sequences with `tokens` of context in all."""
        seconds, slope_s, done = self.c0_s + self.k0_s * tokens, self.b0_s, 0.0
        for at, next_s in self.bends:
            if batch <= at:
                break
            seconds += slope_s * (at - done)
            done, slope_s = at, next_s
        return seconds + slope_s * (batch - done)

    def times(self, factor: float) -> StepFit:
        """All of it so many times as long."""
        return StepFit(
            factor * self.b0_s,
            factor * self.c0_s,
            factor * self.k0_s,
            tuple((batch, factor * slope_s) for batch, slope_s in self.bends),
        )


@dataclass(frozen=True, slots=True)
class Solo:
    """Steps with `share` units, alone on the device. prefill_token_s: what a prompt's token adds to a step; 0: not
    measured."""

    share: int
    step: StepFit
    prefill_token_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for impossible figures."""
        _positive(share=self.share)
        _not_negative(prefill_token_s=self.prefill_token_s)


@dataclass(frozen=True, slots=True)
class Corun:
    """How many times as long steps take beside training: `b1 x infer + k1 x training`, both as fractions of the device
    (equation 3)."""

    b1: float
    k1: float

    def __post_init__(self) -> None:
        """Raises ValueError for what are no numbers."""
        for name in ("b1", "k1"):
            figure = getattr(self, name)
            if isinstance(figure, bool) or not isinstance(figure, int | float) or not math.isfinite(figure):
                raise ValueError(f"{name} = {figure!r} must be a finite number")

    def factor(self, infer: float, training: float) -> float:
        """See the class. Training never makes a step shorter."""
        return max(self.b1 * infer + self.k1 * training, 1.0)


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured split. step: its own fit; None: `Corun` holds. trained_tokens_s: what training reaches beside decode
    steps; 0: not measured."""

    infer: int
    training: int
    step: StepFit | None = None
    trained_tokens_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for impossible figures."""
        _positive(infer=self.infer)
        _positive(training=self.training)
        _not_negative(trained_tokens_s=self.trained_tokens_s)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predicted step times: the mean and the worst."""

    mean: float
    worst: float

    def __post_init__(self) -> None:
        """Raises ValueError for impossible figures."""
        _not_negative(mean=self.mean, worst=self.worst)


@dataclass(frozen=True, slots=True)
class CorunFit:
    """What `upbeat profile --corun` measured on one device. solo: by share, ascending; the last one is all of the
    device. pairs: every split that there is. solo_errors, corun_errors: on steps that nothing was fitted to; None: not
    measured. unit_rows: tokens of a unit of training, which takes at most 10 ms; 0: not measured."""

    shares: int
    solo: tuple[Solo, ...]
    corun: Corun
    pairs: tuple[Pair, ...]
    solo_errors: Errors | None = None
    corun_errors: Errors | None = None
    unit_rows: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a device that is not divided as it says."""
        _positive(shares=self.shares)
        if type(self.unit_rows) is not int or self.unit_rows < 0:
            raise ValueError(f"unit_rows = {self.unit_rows!r} must be a whole number that is not negative")
        measured = [each.share for each in self.solo]
        if measured != sorted(set(measured)) or measured[-1:] != [self.shares]:
            raise ValueError(f"solo must ascend by share up to all {self.shares}, not {measured}")
        for pair in self.pairs:
            if pair.infer not in measured or pair.infer + pair.training > self.shares:
                raise ValueError(f"pairs has {pair.infer} + {pair.training} of {self.shares}, or no solo fit for it")
        if len({(pair.infer, pair.training) for pair in self.pairs}) != len(self.pairs):
            raise ValueError("pairs has a split twice")

    def step_of(self, infer: int, training: int) -> StepFit:
        """Steps with `infer` units beside `training` units; 0: alone. Raises ValueError for a split without a fit."""
        solo = next((each.step for each in self.solo if each.share == infer), None)
        pair = next((each for each in self.pairs if (each.infer, each.training) == (infer, training)), None)
        if solo is None or (training and pair is None):
            raise ValueError(
                f"no fit for {infer} + {training} of {self.shares} units; measure with `upbeat profile --corun`"
            )
        if pair is None:
            return solo
        return pair.step or solo.times(self.corun.factor(infer / self.shares, training / self.shares))


def corun_from(data: Mapping[str, Any]) -> CorunFit:
    """The inverse of `asdict`, after JSON. Raises ValueError, TypeError or KeyError, which name what is wrong."""
    found = dict(data)
    found["solo"] = tuple(Solo(**(each | {"step": _step(each["step"])})) for each in found["solo"])
    found["corun"] = Corun(**found["corun"])
    found["pairs"] = tuple(
        Pair(**(each | {"step": None if each.get("step") is None else _step(each["step"])})) for each in found["pairs"]
    )
    for name in ("solo_errors", "corun_errors"):
        if found.get(name) is not None:
            found[name] = Errors(**found[name])
    return CorunFit(**found)


def _step(data: Mapping[str, Any]) -> StepFit:
    bends = tuple((batch, slope_s) for batch, slope_s in data.get("bends", ()))
    return StepFit(**(dict(data) | {"bends": bends}))


def _not_negative(**figures: float) -> None:
    for name, figure in figures.items():
        if isinstance(figure, bool) or not isinstance(figure, int | float) or not math.isfinite(figure) or figure < 0:
            raise ValueError(f"{name} = {figure!r} must be a finite number that is not negative")


def _positive(**figures: int) -> None:
    for name, figure in figures.items():
        if type(figure) is not int or figure < 1:
            raise ValueError(f"{name} = {figure!r} must be a whole number of at least 1")
