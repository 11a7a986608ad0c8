"""Simulated teams of coding agents: long contexts, short answers, tools of half a second to five.

A team is that of `bench.symphony.agents` (SYMPHONY, section 4.4); its threads are the conversations. Hints come from
the call graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.agents.team import draw
from bench.pressure.setting import NODES, PRESET, Cell
from bench.symphony.agents import Say, Step, serve, team
from loadtest.agents import TeamLengths
from loadtest.simulate.fleet import VARIANTS
from loadtest.simulate.presets import PRESETS

#: Lengths of a file that is read, of a tool's output, and of a call or a change.
LENGTHS = TeamLengths(
    brief=(600, 900), design=(3000, 8000), file=(6000, 16000), note=(200, 1500), answer=(40, 200), tool_s=(0.5, 5.0)
)
TEAMS, FILES, PROJECTS = 12, 4, 2
#: Longest threads that HBM holds at least.
_SPARE = 1.3


def run(cell: Cell, arm: str, seed: int) -> dict[str, Any]:
    """An arm's figures of projects and requests."""
    kind = PRESETS[PRESET]
    threads = [_threads(seed, n) for n in range(TEAMS)]
    longest = max(max(each) for each in threads)
    tokens = max(cell.memory * sum(map(sum, threads)) / NODES, _SPARE * longest)
    memory = tokens * kind.shape.token_bytes
    kind = replace(kind, hbm_bytes=memory, dram_bytes=memory, ssd_bytes_per_s=cell.ssd_bytes_per_s)
    return serve(kind, NODES, VARIANTS[arm], FILES, TEAMS, PROJECTS, seed, LENGTHS)


def _threads(seed: int, number: int) -> list[int]:
    """Final tokens of each thread of a project."""
    found: dict[str, int] = {}
    for say in _says(team(draw(FILES, 1000 * seed + number, LENGTHS))):
        found[say.thread] = found.get(say.thread, 0) + say.tokens + say.answer
    return list(found.values())


def _says(steps: Iterator[Step]) -> Iterator[Say]:
    for step in steps:
        if isinstance(step, Say):
            yield step
        elif isinstance(step, list):
            for each in step:
                yield from _says(each)
