"""Draws one token from one row of logits: temperature, then min_p, top_k and top_p.

Rows are processed one by one, so a row does not depend on its batch. The token is the one at which the cumulative
weight, in order of token ids, exceeds one uniform number; so rounding differences rarely change it. The vocabulary is
never sorted: limits need the best few tokens only, found by partition, and more of them only if these do not reach
top_p.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from contracts.request import Sampling

#: Lower temperatures count as 0 (greedy).
COLDEST = 1e-5
#: Number of best tokens tried first for top_p, and weights per block of the cumulative sum.
_FIRST, _BLOCK = 128, 256
Row = npt.NDArray[np.float32]


def draw(row: Row, s: Sampling, uniform: float) -> int:
    """The token of `row` that `uniform` in [0, 1) selects. row: `[vocab]`, not modified; minus infinity for forbidden
    tokens; its maximum is finite."""
    best = row.max()
    if s.temperature < COLDEST:
        return int(row.argmax())
    scaled = (row - best) * np.float32(1 / s.temperature)
    if s.min_p > 0 or 0 < s.top_k < len(row) or s.top_p < 1:
        kept = np.flatnonzero(allowed(scaled, s))
        return int(kept[_walk(np.exp(scaled[kept]), uniform)])
    return _walk(np.exp(scaled), uniform)


def _walk(weights: Row, uniform: float) -> int:
    """The first index at which the cumulative weight exceeds `uniform` times the total; its weight is not 0."""
    blocks = -(-len(weights) // _BLOCK)
    padded = np.zeros((blocks, _BLOCK), np.float32)
    padded.reshape(-1)[: len(weights)] = weights
    upto = padded.sum(axis=1, dtype=np.float64).cumsum()
    target = min(uniform * upto[-1], np.nextafter(upto[-1], 0.0))
    block = int(np.searchsorted(upto, target, side="right"))
    inside = padded[block].cumsum(dtype=np.float64)
    before = upto[block - 1] if block else 0.0
    at = int(np.searchsorted(inside, target - before, side="right"))
    if at == _BLOCK:  # the two sums differ in the last bit
        at = int(np.flatnonzero(padded[block])[-1])
    return block * _BLOCK + at


def allowed(scaled: Row, s: Sampling) -> npt.NDArray[np.bool_]:
    """Which tokens may be drawn, bool `[vocab]`; at least one. Among equal values at the limit of top_k or top_p, lower
    ids stay."""
    best = scaled.max()
    kept, count = np.ones(len(scaled), np.bool_), len(scaled)
    if s.min_p > 0:
        kept = scaled >= best + scaled.dtype.type(math.log(s.min_p))
        count = int(kept.sum())
    if 0 < s.top_k < count:
        kept, count = _best(scaled, _largest(scaled, s.top_k)[-1], s.top_k), s.top_k
    if s.top_p < 1:
        mass = float(np.exp((scaled if count == len(scaled) else scaled[kept]) - best).sum(dtype=np.float64))
        asked = min(_FIRST, count)
        while True:
            values = _largest(scaled, asked)
            reached = np.exp(values - best).cumsum(dtype=np.float64)
            wanted = int((reached < s.top_p * mass).sum()) + 1
            if wanted <= asked or asked == count:
                break
            asked = min(8 * asked, count)
        count = min(wanted, count)
        kept = _best(scaled, values[count - 1], count)
    return kept


def _largest(scaled: Row, count: int) -> Row:
    """The `count` largest values, largest first."""
    at = len(scaled) - count
    return np.sort(np.partition(scaled, at)[at:])[::-1]


def _best(scaled: Row, least: np.float32, count: int) -> npt.NDArray[np.bool_]:
    """Marks the `count` best tokens, the last of which has the value `least`."""
    kept: npt.NDArray[np.bool_] = scaled > least
    equals = np.flatnonzero(scaled == least)
    kept[equals[: count - int(kept.sum())]] = True
    return kept
