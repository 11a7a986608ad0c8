"""The arms on real stacks of this machine, one after the other, with slowed disks.

As in the simulated cell, a node's memory follows from the live KV, the load from what this machine serves without a
cache (measured), and the SSD's rate from the ratio of loading to computing a token.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.pressure.setting import LINGERS_S, PRESET, USUAL, Cell, drawn, memory_bytes, span_s
from loadtest.client import Endpoint, Outcome
from loadtest.disk_pace import paced
from loadtest.figures import figures
from loadtest.habits import Habits
from loadtest.plans import PlannedSession, PlannedTurn
from loadtest.policies import fixed_answers
from loadtest.prompts import block_words
from loadtest.random_model import SHAPES, make_random_model, weight_bytes
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.scenario import scripts
from loadtest.simulate.users import Script
from loadtest.stack import Stack, StackError
from loadtest.users import Loop, run_load
from loadtest.variants import with_habits
from runtime.clock import RealClock

NODES, SHAPE = 2, "shallow"
#: Short conversations, and cut at MAX_TOKENS, so that memory for a third of the live KV holds several.
LENGTH_SCALE, MAX_TOKENS = 0.04, 1_000
#: Factor on typing and lingering, because turns are shorter than on the simulated devices.
TIME_SCALE = 0.25
#: A hint for every request; hints do not say when their request will come.
_ALL = Habits(expected=False)
#: The arm with `kv.layer_priority`.
LAYERS = "sticky-layers"
#: (placement policy, clients' hints) by arm; None: no hints.
ARMS: dict[str, tuple[str, Habits | None]] = {
    "sticky": ("sticky", None),
    LAYERS: ("sticky", None),
    "balanced": ("balanced", _ALL),
    "missed-10": ("balanced", replace(_ALL, missed=0.1)),
    "spurious-60": ("balanced", replace(_ALL, spurious=0.6)),
}
#: The arms of each cell. With memory for all, hints have little to bring, and could only cost.
CELLS: dict[Cell, tuple[str, ...]] = {USUAL: tuple(ARMS), replace(USUAL, memory=1.0): ("sticky", "balanced")}
_GIB = float(1 << 30)
#: Words of the lone prompts; users that saturate the machine without a cache.
_LONE_WORDS, _WARM_WORDS, _BUSY = 2_000, 200, 8
_SETTINGS = {"worker": {"dtype": SHAPES[SHAPE][1]}}


@dataclass(frozen=True, slots=True)
class Machine:
    """The model and this machine's speed.

    all_s: seconds for all turns of a draw without a cache. token_s: seconds per token of a lone prompt.
    """

    model: Path
    all_s: float
    token_s: float


class Draw:
    """The conversations of a seed, which every arm serves."""

    def __init__(self, conversations: int, seed: int, trace: Path | None) -> None:
        self.seed = seed
        sessions = drawn(conversations, seed, trace)
        said = scripts(sessions, seed=seed, length_scale=LENGTH_SCALE, max_tokens=MAX_TOKENS)
        self.said = [
            replace(s, turns=tuple(replace(t, typing_s=t.typing_s * TIME_SCALE) for t in s.turns)) for s in said
        ]

    def within(self, seconds: float) -> list[Script]:
        """The conversations scaled in time so that the last turn arrives after `seconds`."""
        times = seconds / span_s(self.said)
        return [replace(s, turns=tuple(replace(t, arrival_s=t.arrival_s * times) for t in s.turns)) for s in self.said]


def make_model(scratch: Path) -> Path:
    """Write random weights; returns the model's folder."""
    config, dtype = SHAPES[SHAPE]
    return make_random_model(scratch / SHAPE, config, 1, dtype)


def measure(model: Path, draw: Draw) -> Machine:
    """Measure the draw without a cache, and a token of a lone prompt."""
    with Stack(model=model, nodes=NODES, cache=False, hbm_gib=1.0, dram_gib=0.25, settings=_SETTINGS) as stack:
        endpoint = _endpoint(stack, model, hints=False)
        lone = [_load(endpoint, [_lone(n, _LONE_WORDS)]) for n in range(5)][2:]
        everybody = [
            replace(s, turns=tuple(replace(t, typing_s=0.0) for t in s.turns)) for s in _planned(draw.said, draw.seed)
        ]
        outcomes = _load(endpoint, everybody, Loop(users=_BUSY))
    all_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    return Machine(model, all_s, statistics.median(o.ttft_s / o.prompt_tokens for [o] in lone))


def run(cell: Cell, arm: str, draw: Draw, machine: Machine) -> dict[str, Any]:
    """An arm's figures in a cell."""
    config = SHAPES[SHAPE][0]
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    said = draw.within(machine.all_s / cell.use)
    memory = memory_bytes(cell, said, token_bytes, NODES, LINGERS_S * TIME_SCALE)
    policy, habits = ARMS[arm]
    hbm_gib = (memory + weight_bytes(config)) / _GIB
    settings = _SETTINGS | {"kv": {"layer_priority": arm == LAYERS}}
    stack = Stack(
        model=machine.model, nodes=NODES, policy=policy, hbm_gib=hbm_gib, dram_gib=memory / _GIB, settings=settings
    )
    rate = ssd_bytes_per_s(cell, token_bytes, machine.token_s)
    with stack, paced(stack, rate):
        endpoint = _endpoint(stack, machine.model, hints=habits is not None)
        for n in range(NODES):
            _load(endpoint, [_lone(n, _WARM_WORDS)])
        outcomes = _load(endpoint, with_habits(_planned(said, draw.seed), habits or _ALL, draw.seed, TIME_SCALE))
    found = figures(outcomes, NODES, 5.0)
    return found | {"memory_bytes": round(memory), "ssd_bytes_per_s": round(rate)}


def ssd_bytes_per_s(cell: Cell, token_bytes: int, token_s: float) -> float:
    """SSD rate with the cell's ratio of loading to computing on this machine."""
    kind = PRESETS[PRESET]
    there_s = kind.costs.prefill_s(_LONE_WORDS, 0) / _LONE_WORDS
    return cell.ssd_bytes_per_s * (token_bytes / kind.shape.token_bytes) * (there_s / token_s)


def _endpoint(stack: Stack, model: Path, *, hints: bool) -> Endpoint:
    return Endpoint(stack.url, stack.model_name(), hints=hints, body=fixed_answers(model))


def _planned(said: Sequence[Script], seed: int) -> list[PlannedSession]:
    """Plan sessions with texts of the scripts' lengths. The first turn is sent after typing."""
    lead_s = max(max(s.turns[0].typing_s - s.turns[0].arrival_s for s in said), 0.0)
    found = []
    for number, script in enumerate(said):
        texts = [
            " ".join(block_words(1_000_000 * seed + 1_000 * number + n, t.new_tokens))
            for n, t in enumerate(script.turns)
        ]
        turns = (
            PlannedTurn(text, t.answer_tokens, lead_s + t.arrival_s, t.typing_s)
            for text, t in zip(texts, script.turns, strict=True)
        )
        found.append(PlannedSession(script.session.session_id, tuple(turns)))
    return found


def _lone(number: int, words: int) -> PlannedSession:
    text = " ".join(block_words(-1 - number, words))
    return PlannedSession(f"lone-{number}", (PlannedTurn(text, 8, 0.0, 0.0, hint=None),))


def _load(endpoint: Endpoint, sessions: Sequence[PlannedSession], loop: Loop | None = None) -> list[Outcome]:
    outcomes = asyncio.run(run_load(endpoint, sessions, RealClock(), loop=loop))
    if failed := next((o for o in outcomes if o.error is not None), None):
        raise StackError(f"{failed.session_id}, turn {failed.turn}: {failed.error}")
    return outcomes
