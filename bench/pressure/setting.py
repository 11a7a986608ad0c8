"""The load and the nodes of a cell: load relative to recomputing, memory relative to the live conversations' KV."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from loadtest.sessions import Session
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.scenario import scripts, trace_sessions
from loadtest.simulate.users import Script

PRESET, NODES = "a100-llama-3.1-8b", 4
LENGTH_SCALE, MAX_TOKENS = 0.25, 30_000
#: Seconds that a conversation stays live after its last turn; percentile over time of the live tokens.
LINGERS_S, _USUALLY = 30.0, 90
#: Assumed decode batch when estimating a request's work.
_BATCH = 16
#: HBM holds at least the longest conversation times this.
_SPARE = 1.3


@dataclass(frozen=True, slots=True)
class Cell:
    """use: share of the load that recomputing can serve. memory: share of the live KV that HBM holds; DRAM as much.

    ssd_bytes_per_s: per node.
    """

    use: float
    memory: float
    ssd_bytes_per_s: float

    @property
    def name(self) -> str:
        """The cell's name in tables."""
        return f"{self.use:.0%} load, memory {self.memory:.2g}, SSD {self.ssd_bytes_per_s / 1e9:g} GB/s"


USUAL = Cell(0.9, 1 / 3, 1e9)
#: Cells change one setting of the usual one.
BY_MEMORY = tuple(replace(USUAL, memory=memory) for memory in (0.1, 1 / 3, 1.0))
#: With teams also a cell in which all is always in HBM: nothing that brings KV can do better.
ALL_IN_HBM = replace(USUAL, memory=10.0)
TEAMS = (*BY_MEMORY, ALL_IN_HBM)
CELLS = (
    *(replace(USUAL, use=use) for use in (0.5, 0.7, 0.9, 1.1)),
    *(cell for cell in BY_MEMORY if cell != USUAL),
    *(replace(USUAL, ssd_bytes_per_s=rate) for rate in (0.2e9, 3e9)),
)


def build(cell: Cell, conversations: int, seed: int, trace: Path | None) -> tuple[NodeKind, list[Script]]:
    """(a simulated node, the users' scripts)."""
    kind = PRESETS[PRESET]
    sessions = drawn(conversations, seed, trace)
    said = _scripts(sessions, seed, 1.0)
    said = _scripts(sessions, seed, _recomputing_s(said, kind) / (NODES * cell.use) / span_s(said))
    each = memory_bytes(cell, said, kind.shape.token_bytes, NODES)
    return replace(kind, hbm_bytes=each, dram_bytes=each, ssd_bytes_per_s=cell.ssd_bytes_per_s), said


def drawn(conversations: int, seed: int, trace: Path | None) -> list[Session]:
    """`conversations` conversations of two turns or more, by start time, from a trace or generated."""
    sessions = [s for s in trace_sessions(trace, sessions=2 * conversations, seed=seed) if len(s.turns) > 1]
    random.Random(seed).shuffle(sessions)
    return sorted(sessions[:conversations], key=lambda s: s.turns[0].arrival_s)


def span_s(said: Sequence[Script]) -> float:
    """Arrival of the last turn, in seconds."""
    return max(turn.arrival_s for script in said for turn in script.turns)


def memory_bytes(
    cell: Cell, said: Sequence[Script], token_bytes: int, nodes: int, lingers_s: float = LINGERS_S
) -> float:
    """Bytes of a node's HBM for KV, and of its DRAM."""
    longest = max(sum(t.new_tokens + t.answer_tokens for t in script.turns) for script in said)
    return token_bytes * max(cell.memory * _live_tokens(said, lingers_s) / nodes, _SPARE * longest)


def _scripts(sessions: Sequence[Session], seed: int, time_scale: float) -> list[Script]:
    return scripts(sessions, seed=seed, length_scale=LENGTH_SCALE, time_scale=time_scale, max_tokens=MAX_TOKENS)


def _recomputing_s(said: Sequence[Script], kind: NodeKind) -> float:
    """Device seconds to compute every prompt from nothing and decode all answers."""
    total_s = 0.0
    for script in said:
        tokens = 0
        for turn in script.turns:
            tokens += turn.new_tokens
            total_s += (
                kind.costs.prefill_s(tokens, 0)
                + turn.answer_tokens * kind.costs.decode(_BATCH, float(_BATCH * tokens))[0] / _BATCH
            )
            tokens += turn.answer_tokens
    return total_s


def _live_tokens(said: Sequence[Script], lingers_s: float) -> float:
    """Tokens of all live conversations, at the percentile `_USUALLY` over time."""
    changes = []
    for script in said:
        grown = [(turn.arrival_s, turn.new_tokens + turn.answer_tokens) for turn in script.turns]
        changes += [*grown, (grown[-1][0] + lingers_s, -sum(tokens for _, tokens in grown))]
    return float(np.percentile(np.cumsum([tokens for _, tokens in sorted(changes)]), _USUALLY))
