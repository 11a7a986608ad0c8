"""MIRAGE's figures, simulated: which runs each needs. A cell is one run, in a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.mirage import border
from bench.mirage.arms import run
from bench.mirage.devices import C1, C2, LINKS, device, instance
from bench.mirage.loads import ALPACA, BRIEF, LONG, SHAREGPT, SHORT, Lengths, Stream, spatial, temporal
from loadtest.simulate.costs import ModelShape
from loadtest.simulate.many import ModelRequest
from loadtest.simulate.presets import OPT_13B
from loadtest.simulate.shared_kind import SharedKind

#: A model's turn where models have turns (ours), in seconds.
TURN_S = 10.0
#: Length of a trace; those of Alpaca, with many more requests, are half as long.
SECONDS, QUICK_S = 80.0, 12.0
HEADLINE = ("recompute", "preempt", "remap", "even")
ALONE: Mapping[ModelShape, float] = {OPT_13B: C1[OPT_13B]}

T = TypeVar("T")
#: A run, and what of it goes into the results.
Cell = Callable[[], dict[str, Any]]
#: Runs cells, some at a time, and returns their rows in order.
Pool = Callable[[Sequence[Cell]], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Bench:
    """quick: short traces, one load each. seed: of the traces. trace: a file of arrivals."""

    quick: bool
    seed: int
    pool: Pool
    trace: Path | None = None

    def seconds(self, lengths: Iterable[Lengths]) -> float:
        """Length of a trace."""
        return QUICK_S if self.quick else SECONDS / (2 if ALPACA in lengths else 1)

    def some(self, loads: Sequence[T]) -> Sequence[T]:
        """These, or the last one."""
        return loads[-1:] if self.quick else loads

    def in_turn(self, kind: SharedKind, lengths: Sequence[Lengths], rates: Sequence[float]) -> list[ModelRequest]:
        """Requests of models that have turns."""
        turn_s = TURN_S / (2 if self.quick else 1)
        return temporal(self._streams(kind, lengths, rates), turn_s, self.seconds(lengths), self.seed, self.trace)

    def together(self, kind: SharedKind, lengths: Sequence[Lengths], rates: Sequence[float]) -> list[ModelRequest]:
        """Requests of models that are all busy."""
        return spatial(self._streams(kind, lengths, rates), self.seconds(lengths), self.seed, self.trace)

    def _streams(self, kind: SharedKind, lengths: Sequence[Lengths], rates: Sequence[float]) -> list[Stream]:
        return [Stream(m.name, of, rate) for m, of, rate in zip(kind.models, lengths, rates, strict=True)]


def _cells(
    kind: SharedKind, arms: Iterable[str], requests: Sequence[ModelRequest], **about: Any
) -> list[Callable[[], dict[str, Any]]]:
    return [functools.partial(_cell, kind, arm, requests, about) for arm in arms]


def _cell(kind: SharedKind, arm: str, requests: Sequence[ModelRequest], about: dict[str, Any]) -> dict[str, Any]:
    return about | run(kind, arm, requests)


def figure_4(bench: Bench) -> dict[str, Any]:
    """KV of two models on an H100, with a third of their weights remapped: how many more sequences fit."""
    del bench
    return border.example()


def figure_5(bench: Bench) -> dict[str, Any]:
    """Layers that copies can bring while a step computes, against the batch, by link."""
    del bench
    return {"rows": border.crossing()}


def figure_8(bench: Bench) -> dict[str, Any]:
    """Models that have turns: C1 and C2, with Alpaca's and ShareGPT's lengths."""
    cells = []
    for name, models, lengths, rate in bench.some(
        [
            ("C1", C1, ALPACA, 120.0),
            ("C1", C1, SHAREGPT, 6.0),
            ("C2", C2, ALPACA, 20.0),
            ("C2", C2, SHAREGPT, 1.0),
        ]
    ):
        kind = device(models)
        requests = bench.in_turn(kind, [lengths] * len(models), [rate] * len(models))
        cells += _cells(kind, HEADLINE, requests, models=name, lengths=lengths.name, rate=rate)
    return {"rows": bench.pool(cells)}


def figure_9(bench: Bench) -> dict[str, Any]:
    """C2 in turns at different rates of its models, ShareGPT."""
    kind, cells = device(C2), []
    for rates in bench.some([(0.5, 2.0), (1.0, 1.0), (1.0, 3.0), (1.5, 2.0)]):
        requests = bench.in_turn(kind, [SHAREGPT] * 2, rates)
        cells += _cells(kind, HEADLINE, requests, rates=list(rates))
    return {"rows": bench.pool(cells)}


def figure_10(bench: Bench) -> dict[str, Any]:
    """C2 in turns with long and short requests."""
    kind, cells = device(C2), []
    for lengths, rates in bench.some([((LONG, SHORT), (0.4, 3.0)), ((SHORT, LONG), (1.0, 1.0))]):
        requests = bench.in_turn(kind, lengths, rates)
        cells += _cells(kind, HEADLINE, requests, lengths=[of.name for of in lengths], rates=list(rates))
    return {"rows": bench.pool(cells)}


def figure_11(bench: Bench) -> dict[str, Any]:
    """C1 round robin, brief answers: which idle model lends first."""
    kind, cells = device(C1), []
    for rate in bench.some([18.0, 24.0]):
        requests = bench.in_turn(kind, [BRIEF] * 3, [rate] * 3)
        cells += _cells(kind, ("remap", "LRU"), requests, rate=rate)
    return {"rows": bench.pool(cells)}


def figure_12(bench: Bench) -> dict[str, Any]:
    """C1, all models busy: each lends to itself."""
    kind, cells = device(C1), []
    for lengths, rate in bench.some([(ALPACA, 30.0), (SHAREGPT, 3.0)]):
        requests = bench.together(kind, [lengths] * 3, [rate] * 3)
        cells += _cells(kind, HEADLINE, requests, lengths=lengths.name, rate=rate)
    return {"rows": bench.pool(cells)}


def figure_13(bench: Bench) -> dict[str, Any]:
    """C1 on strictly divided instances: one model each."""
    cells = []
    for model, part in bench.some(list(C1.items())):
        kind = instance(model, part, sum(C1.values()))
        for rate in bench.some([1.5, 3.0]):
            requests = bench.together(kind, [SHAREGPT], [rate])
            cells += _cells(kind, HEADLINE, requests, model=model.name, rate=rate)
    return {"rows": bench.pool(cells)}


def figure_14(bench: Bench) -> dict[str, Any]:
    """OPT-13b, Alpaca: against KV that is swapped."""
    return {"rows": bench.pool(_alone(bench, ("recompute", "pie", "remap", "even"), [80.0, 110.0]))}


def figure_15(bench: Bench) -> dict[str, Any]:
    """OPT-13b, Alpaca: one slot always, two always, production's choice."""
    return {"rows": bench.pool(_alone(bench, ("alpha+1", "alpha+2", "remap", "even"), [80.0, 110.0]))}


def figure_16(bench: Bench) -> dict[str, Any]:
    """OPT-13b, Alpaca: a peak, then other rates; with and without layers that come back."""
    kind, cells = device(ALONE), []
    for rate in (1.0, 10.0):
        peak = bench.together(kind, [ALPACA], [120.0])
        begin_s = bench.seconds([ALPACA]) / 4
        later = bench.together(kind, [ALPACA], [rate])
        requests = [asked for asked in peak if asked.time_s < begin_s]
        requests += [replace(asked, time_s=begin_s + asked.time_s) for asked in later]
        cells += _cells(kind, ("remap", "kept"), requests, rate=rate)
    cells.append(functools.partial(border.reversion, kind))
    return {"rows": bench.pool(cells)}


def figure_17(bench: Bench) -> dict[str, Any]:
    """OPT-13b, Alpaca: with a cap on what is lent, and without."""
    return {"rows": bench.pool(_alone(bench, ("preempt", "remap", "uncapped"), [10.0, 110.0]))}


def figure_ratio(bench: Bench) -> dict[str, Any]:
    """OPT-13b, ShareGPT, links by r = T_T / T_c: what equations and controller allow, and what lending brings."""
    cells: list[Cell] = []
    for ratio in (1.0, 2.0, 3.0, 5.0, 12.0):
        kind = border.with_ratio(device(ALONE), ratio)
        requests = bench.together(kind, [SHAREGPT], [4.0])
        cells += _cells(kind, ("preempt", "remap", "even"), requests, ratio=ratio)
    return {"borders": border.borders((1.0, 2.0, 3.0, 5.0, 12.0)), "links": LINKS, "rows": bench.pool(cells)}


def _alone(bench: Bench, arms: Sequence[str], rates: Sequence[float]) -> list[Cell]:
    kind, cells = device(ALONE), list[Cell]()
    for rate in bench.some(rates):
        cells += _cells(kind, arms, bench.together(kind, [ALPACA], [rate]), rate=rate)
    return cells


FIGURES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "4": figure_4,
    "5": figure_5,
    "8": figure_8,
    "9": figure_9,
    "10": figure_10,
    "11": figure_11,
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "ratio": figure_ratio,
}
