"""Arrivals and lengths of MIRAGE's evaluation (section 7.1), drawn from what is published about them.

Arrivals: a file with a column TIMESTAMP (Azure's code trace, which the paper scales), or bursts: intervals of
`_BURST_S` at rates that are exponentially distributed, as that trace's minutes are about. Both are scaled to a mean
rate. Lengths are log-normal; the means of ShareGPT and Alpaca are those of the vLLM paper (section 6.1), `long` and
`short` MIRAGE's of section 7.2 (tokens of prompt and answer together, a third of them answered: ours).
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loadtest.simulate.many import ModelRequest

_BURST_S, _SIGMA = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens, and the most of prompt and answer each. sigma: of their logarithms."""

    name: str
    input_tokens: float
    output_tokens: float
    most: int = 700
    sigma: float = _SIGMA


SHAREGPT, ALPACA = Lengths("ShareGPT", 161.0, 338.0), Lengths("Alpaca", 19.0, 58.0)
#: Six tenths of the paper's 1,734 and 634 tokens: the longest must fit the memory that C2 leaves.
LONG, SHORT = Lengths("long", 700.0, 350.0, 950, 0.2), Lengths("short", 254.0, 126.0, 950, 0.2)
#: Answers end soon after their model's turn, so that the other models are idle (ours).
BRIEF = Lengths("brief", 161.0, 100.0, 200, 0.5)


class BadTrace(ValueError):
    """A file of arrivals that a run cannot use."""


def arrivals(rate: float, seconds: float, seed: int, trace: Path | None) -> list[float]:
    """Times of arrivals, `rate` a second in the mean. Raises BadTrace for a file without times, or with too few."""
    return _of_file(trace, rate, seconds) if trace is not None else _in_bursts(rate, seconds, seed)


def _in_bursts(rate: float, seconds: float, seed: int) -> list[float]:
    dice, found = random.Random(f"{seed} arrivals"), list[float]()
    rates = [dice.expovariate(1.0) for _ in range(max(round(seconds / _BURST_S), 1))]
    scale = rate * len(rates) / sum(rates)
    for number, each in enumerate(rates):
        at = number * _BURST_S
        while (at := at + dice.expovariate(each * scale)) < min((number + 1) * _BURST_S, seconds):
            found.append(at)
    return found


def _of_file(path: Path, rate: float, seconds: float) -> list[float]:
    """The file's first arrivals, with times stretched to the mean rate."""
    with path.open() as lines:
        rows = csv.DictReader(lines)
        if "TIMESTAMP" not in (rows.fieldnames or ()):
            raise BadTrace(f"--trace {path} has no column TIMESTAMP; use a file like Azure's code trace")
        # Fractions of a second have seven digits.
        try:
            times = sorted(datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows)
        except ValueError as error:
            raise BadTrace(f"--trace {path}: {error}; TIMESTAMP is like 2023-11-16 18:17:03.9799600") from None
    count = round(rate * seconds) + 1
    if len(times) < count:
        raise BadTrace(f"--trace {path} has {len(times)} arrivals; a run needs {count}")
    scale = seconds / (times[count - 1] - times[0])
    return [(at - times[0]) * scale for at in times[: count - 1]]


@dataclass(frozen=True, slots=True)
class Stream:
    """A model's requests. rate: a second, while it is its turn."""

    model: str
    lengths: Lengths
    rate: float


def spatial(streams: Sequence[Stream], seconds: float, seed: int, trace: Path | None) -> list[ModelRequest]:
    """All models have requests all the time. Models of one rate have arrivals alike, at other times."""
    found = list[ModelRequest]()
    for number, of in enumerate(streams):
        dice = random.Random(f"{seed} lengths {number}")
        shift_s = seconds * number / len(streams)
        for at in arrivals(of.rate, seconds, seed, trace):
            lengths = of.lengths
            sizes = _tokens(dice, lengths, lengths.input_tokens), _tokens(dice, lengths, lengths.output_tokens)
            found.append(ModelRequest((at + shift_s) % seconds, of.model, *sizes))
    return sorted(found, key=lambda asked: asked.time_s)


def temporal(
    streams: Sequence[Stream], turn_s: float, seconds: float, seed: int, trace: Path | None
) -> list[ModelRequest]:
    """Models have turns, round robin: each keeps its requests of its own turns."""
    names = [of.model for of in streams]
    every = spatial(streams, seconds, seed, trace)
    return [asked for asked in every if names[int(asked.time_s / turn_s) % len(names)] == asked.model]


def _tokens(dice: random.Random, of: Lengths, mean: float) -> int:
    return min(max(round(dice.lognormvariate(math.log(mean) - of.sigma**2 / 2, of.sigma)), 2), of.most)
