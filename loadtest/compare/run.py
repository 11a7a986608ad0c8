"""Runs a comparison: repeat by repeat, each target in turn, each load on each. Keeps all results after an interruption
or error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from contracts.errors import ConfigError
from loadtest.client import Endpoint, Outcome, ask
from loadtest.compare.load import Point, Workload
from loadtest.compare.settings import TargetFile
from loadtest.compare.summary import at, interleaved, ratios, summarised
from loadtest.compare.targets import Served, opened
from loadtest.figures import figures
from loadtest.plans import turns_of
from loadtest.policies import raw
from loadtest.prompts import block_words
from loadtest.report import provenance
from loadtest.stack import StackError
from loadtest.users import run_load
from runtime.clock import Clock, RealClock

#: Number of windows in a run, for imbalance.
_WINDOWS = 20
#: Lengths of the warm-up prompts in words; a long one triggers what servers set up for long prompts.
_WARM_UP_WORDS = (8, 400)


class Watcher(Protocol):
    """Shows the progress of a comparison."""

    def step(self, number: int, of: int, what: str) -> None:
        """Step `number` (from 0) of `of` begins."""

    def share(self, done: float, failed: int) -> None:
        """done: share of the step, from 0 to 1. failed: its requests so far."""


@dataclass(slots=True)
class Comparison:
    """Results so far. runs: by target and load, each run's figures with `repeat`, `outcomes`, and `partial` if it was
    cut off."""

    targets: Sequence[TargetFile]
    workload: Workload
    repeats: int
    runs: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    interrupted: bool = False

    def document(self) -> dict[str, Any]:
        """The results for JSON: figures, medians, spread, ratios to the first target, and provenance."""
        base = self.targets[0].name
        points = [
            {"label": p.label, "users": p.users, "time_scale": p.time_scale, "load": p.load}
            for p in self.workload.points
        ]
        return provenance() | {
            "kind": "comparison",
            "interrupted": self.interrupted,
            "repeats": self.repeats,
            "workload": self.workload.section.model_dump(mode="json", exclude_defaults=True)
            | {"found": self.workload.described},
            "seed": self.workload.section.seed,
            "points": points,
            "baseline": base,
            "targets": {t.name: self._target(t, base) for t in self.targets},
        }

    def _target(self, target: TargetFile, base: str) -> dict[str, Any]:
        own, others = self.runs.get(target.name, {}), self.runs.get(base, {})
        return {
            "configuration": target.model_dump(mode="json", exclude={"workload", "name"}, exclude_defaults=True),
            "found": self.found.get(target.name, {}),
            "error": self.errors.get(target.name),
            "points": {
                label: {
                    "runs": runs,
                    "summary": summarised(_whole(runs)),
                    "ratios": ratios(_whole(others.get(label, [])), _whole(runs)),
                }
                for label, runs in own.items()
            },
        }


def _whole(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The complete runs; if there are none, all."""
    return [run for run in runs if not run.get("partial")] or list(runs)


def compare(
    targets: Sequence[TargetFile],
    workload: Workload,
    repeats: int,
    watcher: Watcher,
    *,
    folders: dict[str, Path] | None = None,
    launcher: list[str] | None = None,
    clock: Clock | None = None,
    before: Comparison | None = None,
    kept: Callable[[Comparison], None] = lambda _: None,
    seconds: float = math.inf,
) -> Comparison:
    """Run a comparison. Ctrl-C ends it and keeps the results. A target that does not serve is recorded in `errors` and
    skipped from then on.

    before: results of an earlier run of the same comparison, not measured again. kept: called after each turn of a
    target. seconds: no turn starts later; the comparison is then marked interrupted.
    """
    made = before or Comparison(targets, workload, repeats)
    order, points = interleaved([t.name for t in targets], repeats), workload.points
    by_name = {t.name: t for t in targets}
    steps = len(order) * len(points)
    clock = clock or RealClock()
    began_s = clock.now()
    try:
        for turn, (repeat, name) in enumerate(order):
            if name in made.errors or not _left(made, name, repeat):
                continue
            if clock.now() - began_s > seconds:
                made.interrupted = True
                break
            watcher.step(turn * len(points), steps, f"{name}: starting")
            try:
                with opened(by_name[name], workload.body, (folders or {}).get(name, Path.cwd()), launcher) as served:
                    made.found[name] = dict(served.found)
                    asyncio.run(_warm_up(served))
                    while left := _left(made, name, repeat):
                        number, point = left[0]
                        watcher.step(turn * len(points) + number, steps, f"{name}: {point.label}")
                        if not _measure(made, by_name[name], served, point, repeat, number, watcher, clock):
                            raise StackError(f"{name} has answered nothing at {point.label}")
            except (StackError, ConfigError, OSError) as e:
                made.errors[name] = str(e)
            kept(made)
    except KeyboardInterrupt:
        made.interrupted = True
        kept(made)
    return made


def _left(made: Comparison, name: str, repeat: int) -> list[tuple[int, Point]]:
    """The loads, with their numbers, still to measure in this repeat of a target: none after one that exceeded
    `give_up_s`."""
    found, most_s = [], made.workload.section.give_up_s
    for number, point in enumerate(made.workload.points):
        runs = made.runs.get(name, {}).get(point.label, [])
        run = next((run for run in runs if run["repeat"] == repeat and not run.get("partial")), None)
        if run is None:
            found.append((number, point))
        elif most_s is not None and (took_s := at(run, ("end_to_end_s", "mean"))) is not None and took_s > most_s:
            break
    return found


def _measure(
    made: Comparison,
    target: TargetFile,
    served: Served,
    point: Point,
    repeat: int,
    number: int,
    watcher: Watcher,
    clock: Clock,
) -> bool:
    """Measure one load on one target; recorded even if it is cut off. False: no request was measured."""
    workload = made.workload
    # Each load of each repeat has its own words, the same for every target.
    planned = workload.plan(point, salt=repeat * len(workload.points) + number + 1)
    loop, total = workload.loop(point), turns_of(planned)
    outcomes: list[Outcome] = []
    failed = 0

    def done(outcome: Outcome) -> None:
        nonlocal failed
        outcomes.append(outcome)
        failed += outcome.error is not None
        watcher.share(min(1.0, max(len(outcomes) / total, outcome.end_s / loop.seconds)), failed)

    partial = True
    try:
        asyncio.run(run_load(served.endpoints, planned, clock, done, loop, target.balance))
        partial = False
    finally:
        kept = sorted((o for o in outcomes if o.sent_s >= workload.section.warm_up_s), key=lambda o: o.sent_s)
        if kept:
            span_s = max(o.end_s for o in kept) - min(o.sent_s for o in kept)
            run = figures(kept, served.nodes, span_s / _WINDOWS, workload.slo)
            run |= {"repeat": repeat, "outcomes": [raw(o) for o in kept]} | ({"partial": True} if partial else {})
            runs = made.runs.setdefault(target.name, {}).setdefault(point.label, [])
            # Replaces an earlier partial run.
            runs[:] = [*(r for r in runs if r["repeat"] != repeat), run]
    return bool(kept)


async def _warm_up(served: Served) -> None:
    """Send a short and a longer request to each address and node, so that first-time costs are not measured."""
    clock = RealClock()
    several = len(served.endpoints) > 1
    async with aiohttp.ClientSession() as http:
        for number in range(served.nodes):
            endpoint: Endpoint = served.endpoints[number if several else 0]
            pin = None if several or served.nodes == 1 else f"node-{number}"
            for words in _WARM_UP_WORDS:
                name = f"warm-up-{number}-{words}"
                said = " ".join(block_words(number + 1_000_000 * words, words))
                await ask(
                    http, endpoint, [{"role": "user", "content": said}], 8, name, Outcome(name, 0, 0.0), clock.now, pin
                )
