"""Fits equations (2) and (3) to measured steps (HARLI, section 5). Decides which form fits; measures nothing.

Least squares of *relative* errors, with figures that are never negative: a step of 5 ms counts as much as one of 50 ms,
and noise never makes more work cheaper.

Where the paper's forms misfit, a closer one is taken:

- Equation (2) is a line over batch sizes. Kernels of CPUs read weights once for several sequences and compute for each,
  so time bends where computing begins to dominate. While the line is off by more than `GOOD`, a bend at a measured
  batch is added, if errors fall by a third.
- Equation (3) has one factor a split, whatever the batch. On a host, training takes caches and memory bandwidth, which
  cost small batches more than large ones. If it is off by more than `GOOD`, every pair gets equation (2) for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from contracts.corun import Corun, CorunFit, Errors, Pair, Solo, StepFit
from worker.core.predictor import Predictor

#: A fit whose mean relative error is at most this needs no closer form.
GOOD = 0.02
#: Most bends of a fit; steps that a fit of a pair's own needs.
_MOST_BENDS, _OWN = 3, 6

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured step. infer, training: units of the device; training 0: alone. tokens: context of all sequences in
    all. trained_tokens_s: what training reached meanwhile; 0: not measured."""

    infer: int
    training: int
    batch: int
    tokens: int
    seconds: float
    prefill_tokens: int = 0
    trained_tokens_s: float = 0.0


def fit(
    shares: int, measured: Sequence[Measurement], held_out: Sequence[Measurement] = (), unit_rows: int = 0
) -> CorunFit:
    """Of a device of `shares` units. held_out: steps to judge by, which nothing is fitted to. Raises ValueError where
    too little was measured, and says what."""
    solo = _solo_fits(shares, measured)
    beside = _by_split(m for m in measured if m.training)
    decodes = [m for steps in beside.values() for m in steps if not m.prefill_tokens]
    corun = _corun(shares, solo, decodes)
    plain = [_pair(split, steps) for split, steps in beside.items()]
    made = CorunFit(shares, tuple(solo[share] for share in sorted(solo)), corun, tuple(plain), unit_rows=unit_rows)
    if decodes and errors(made, decodes).mean > GOOD:
        made = replace(made, pairs=tuple(_own(solo[p.infer].step, p, beside[p.infer, p.training]) for p in plain))
    return replace(
        made,
        solo_errors=_judged(made, [m for m in held_out if not m.training]),
        corun_errors=_judged(made, [m for m in held_out if m.training]),
    )


def errors(made: CorunFit, steps: Iterable[Measurement]) -> Errors:
    """Relative errors of these steps, which must not be none."""
    each = [abs(predicted_s(made, m) / m.seconds - 1) for m in steps]
    return Errors(fmean(each), max(each))


def predicted_s(made: CorunFit, step: Measurement) -> float:
    """Seconds of a step, from the fits alone. Raises ValueError for a split without a fit."""
    return Predictor(made).latency_s(step.infer, step.training, step.batch, step.tokens, step.prefill_tokens)


def step_fit(steps: Sequence[Measurement]) -> StepFit:
    """Equation (2), with bends where the line misfits. Raises ValueError without two batch sizes."""
    batches = sorted({m.batch for m in steps})
    if len(batches) < 2:
        raise ValueError(f"steps of at least two batch sizes must be measured, not of {batches or 'none'}")
    seconds = np.array([m.seconds for m in steps])
    bends: list[int] = []
    found, error = _line(steps, seconds, bends)
    while error > GOOD and len(bends) < _MOST_BENDS:
        tried = [(*_line(steps, seconds, sorted([*bends, at])), at) for at in batches[1:-1] if at not in bends]
        if not tried:
            break
        bent, less, at = min(tried, key=lambda each: each[1])
        if less > error * 2 / 3:
            break
        bends, found, error = sorted([*bends, at]), bent, less
    return found


def _line(steps: Sequence[Measurement], seconds: _Floats, bends: Sequence[int]) -> tuple[StepFit, float]:
    """The fit with these bends, and its mean relative error."""
    edges = [0, *bends]
    columns = [np.ones(len(steps)), np.array([m.tokens for m in steps], float)]
    for start, end in zip(edges, [*bends, None], strict=True):
        columns.append(np.clip([float(m.batch) for m in steps], start, end) - start)
    x = np.stack(columns, axis=1) / seconds[:, None]
    c0_s, k0_s, b0_s, *later = _least_squares(x, np.ones(len(steps)))
    made = StepFit(b0_s, c0_s, k0_s, tuple(zip(map(float, bends), later, strict=True)))
    return made, fmean(abs(made.seconds(m.batch, m.tokens) / m.seconds - 1) for m in steps)


def _least_squares(x: _Floats, y: _Floats) -> list[float]:
    """Coefficients that are not negative: the most negative one is left out until none is."""
    kept = list(range(x.shape[1]))
    while kept:
        found = np.linalg.lstsq(x[:, kept], y, rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    values = [0.0] * x.shape[1]
    for column, value in zip(kept, found if kept else (), strict=True):
        values[column] = float(value)
    return values


def _solo_fits(shares: int, measured: Sequence[Measurement]) -> dict[int, Solo]:
    alone = defaultdict[int, list[Measurement]](list)
    for m in measured:
        if not m.training:
            alone[m.infer].append(m)
    wanted = {shares} | {m.infer for m in measured}
    if missing := sorted(wanted - alone.keys()):
        raise ValueError(f"steps with {', '.join(map(str, missing))} of {shares} units must be measured alone too")
    made = {}
    for share, steps in alone.items():
        try:
            fitted = step_fit([m for m in steps if not m.prefill_tokens])
        except ValueError as e:
            raise ValueError(f"share {share}: {e}") from e
        made[share] = Solo(share, fitted, _prefill_token_s(fitted, [m for m in steps if m.prefill_tokens]))
    return made


def _prefill_token_s(fitted: StepFit, steps: Sequence[Measurement]) -> float:
    """Seconds that a prompt's token adds, by relative errors; 0 where nothing was measured."""
    rest = [(m.prefill_tokens / m.seconds, 1 - fitted.seconds(m.batch, m.tokens) / m.seconds) for m in steps]
    return max(sum(x * y for x, y in rest) / sum(x * x for x, _ in rest), 0.0) if rest else 0.0


def _by_split(steps: Iterable[Measurement]) -> dict[tuple[int, int], list[Measurement]]:
    found = defaultdict[tuple[int, int], list[Measurement]](list)
    for m in steps:
        found[m.infer, m.training].append(m)
    return dict(sorted(found.items()))


def _corun(shares: int, solo: Mapping[int, Solo], steps: Sequence[Measurement]) -> Corun:
    """Equation (3), over all splits. Without any: no slowdown."""
    if not steps:
        return Corun(1.0, 0.0)
    alone_s = np.array([solo[m.infer].step.seconds(m.batch, m.tokens) for m in steps])
    seconds = np.array([m.seconds for m in steps])
    x = np.array([[m.infer, m.training] for m in steps], float) / shares * (alone_s / seconds)[:, None]
    b1, k1 = np.linalg.lstsq(x, np.ones(len(steps)), rcond=None)[0]
    return Corun(float(b1), float(k1))


def _pair(split: tuple[int, int], steps: Sequence[Measurement]) -> Pair:
    trained = [m.trained_tokens_s for m in steps if m.trained_tokens_s and not m.prefill_tokens]
    return Pair(*split, trained_tokens_s=fmean(trained) if trained else 0.0)


def _own(solo: StepFit, pair: Pair, steps: Sequence[Measurement]) -> Pair:
    """With its own fit; from few steps: that of its share, so many times as long."""
    decodes = [m for m in steps if not m.prefill_tokens]
    if len(decodes) >= _OWN and len({m.batch for m in decodes}) > 1:
        return replace(pair, step=step_fit(decodes))
    if not decodes:
        return pair
    return replace(pair, step=solo.times(fmean(m.seconds / solo.seconds(m.batch, m.tokens) for m in decodes)))


def _judged(made: CorunFit, steps: Sequence[Measurement]) -> Errors | None:
    return errors(made, steps) if steps else None
