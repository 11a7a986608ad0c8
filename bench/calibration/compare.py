"""Compares a real run with its simulation, request by request. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from contracts.ids import DEFAULT_TENANT, SessionKey
from contracts.latency_profile import Profile
from loadtest.client import Outcome
from loadtest.figures import spread
from loadtest.plans import PlannedSession, PlannedTurn
from loadtest.prompts import block_words
from loadtest.simulate.costs import NodeKind, Slowed
from loadtest.simulate.fleet import VARIANTS
from loadtest.simulate.presets import measured
from loadtest.simulate.request import Request
from loadtest.simulate.scenario import Run, simulate
from loadtest.simulate.users import Script, ScriptedTurn
from loadtest.typist import typing_times

#: Uniform ranges per turn: words of a first prompt, words of a later one, tokens of an answer.
FIRST, LATER, ANSWER = (200, 1400), (40, 200), (24, 96)
TURNS = 3


def planned(sessions: int, sessions_per_s: float, seed: int) -> list[PlannedSession]:
    """Conversations at random times, with short pauses to keep the run short."""
    rng, at, found = random.Random(seed), 0.0, []
    for number in range(sessions):
        at += rng.expovariate(sessions_per_s)
        turns, time_s = [], at
        typed = typing_times(TURNS, rng.getrandbits(32), mean_s=4.0)
        for turn in range(TURNS):
            words = block_words(1000 * number + turn, rng.randint(*(LATER if turn else FIRST)))
            turns.append(PlannedTurn(" ".join(words), rng.randint(*ANSWER), typed[0] + time_s, typed[turn]))
            time_s += 6.0 + typed[turn]
        found.append(PlannedSession(f"c{seed}-{number}", tuple(turns)))
    return found


def scripts_of(sessions: Sequence[PlannedSession], outcomes: Sequence[Outcome]) -> list[Script]:
    """Scripts of what the stack was asked, in the tokens it counted, at the planned times."""
    of = {(o.session_id, o.turn): o for o in outcomes if o.error is None}
    scripts = []
    for session in sessions:
        turns, history = [], 0
        for number, turn in enumerate(session.turns):
            outcome = of.get((session.session_id, number))
            if outcome is None:
                break
            turns.append(
                ScriptedTurn(
                    max(outcome.prompt_tokens - history, 1), outcome.output_tokens, turn.typing_s, turn.arrival_s
                )
            )
            history = max(outcome.prompt_tokens, history + 1) + outcome.output_tokens
        if turns:
            scripts.append(Script(SessionKey(DEFAULT_TENANT, session.session_id), tuple(turns)))
    return scripts


@dataclass(frozen=True, slots=True)
class Overhead:
    """A stack's overhead beside a profile: seconds per request, per step and per token of a step, and a factor on
    prefill."""

    request_s: float
    step_s: float
    token_s: float
    prefill_times: float


@dataclass(frozen=True, slots=True)
class Lone:
    """Outcomes of lone requests of two lengths, and of groups of equal requests sent at once."""

    alone: Sequence[Outcome]
    together: Sequence[Sequence[Outcome]]


def drift(before: Lone, after: Lone) -> float:
    """Slowdown of lone requests after the load."""
    pairs = zip(before.alone, after.alone, strict=True)
    return round(median((b.end_s - b.sent_s) / (a.end_s - a.sent_s) for a, b in pairs), 3)


def fit_overhead(before: Lone, after: Lone, profile: Profile) -> Overhead:
    """Fit the overhead to requests before and after the load; a change of the machine's speed counts by half."""
    alone, together = [*before.alone, *after.alone], [*before.together, *after.together]

    def longer_s(outcome: Outcome, batch: int) -> float:
        assert outcome.tpot_s is not None
        return outcome.tpot_s - profile.decode_s(batch, outcome.prompt_tokens + outcome.output_tokens / 2)

    pairs = sorted((profile.prefill_s(o.prompt_tokens), o.ttft_s) for o in alone)
    half = len(pairs) // 2
    low, high = _middle(pairs[:half]), _middle(pairs[half:])
    times = max((high[1] - low[1]) / (high[0] - low[0]), 0.1)
    one_s = median(longer_s(o, 1) for o in alone)
    many = [
        (longer_s(o, batch), batch)
        for group in together
        for o in group
        if (batch := sum(o.node == other.node for other in group)) > 1
    ]
    several_s, batch = _middle(many)
    token_s = max((several_s - one_s) / (batch - 1), 0.0)
    return Overhead(max(low[1] - times * low[0], 0.0), max(one_s - token_s, 0.0), token_s, times)


def _middle(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(a for a, _ in pairs), median(b for _, b in pairs)


def kind_of(profile: Profile, hbm_gib: float, dram_gib: float, found: Overhead | None) -> NodeKind:
    """The profile as a preset, with the overhead `found`."""
    kind = measured(profile, hbm_gib, dram_gib)
    if found is None:
        return kind
    return replace(
        kind, costs=Slowed(kind.costs, found.step_s, found.token_s, found.prefill_times), request_s=found.request_s
    )


def predicted(kind: NodeKind, nodes: int, scripts: Sequence[Script]) -> list[Request]:
    """Simulate the scripts."""
    return simulate(Run(kind, nodes, VARIANTS["balanced"]), scripts).users.requests


def within(measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, float]:
    """Relative error of the predicted means of TTFT and TPOT over all turns."""
    true, said = measured["all turns"], predicted["all turns"]
    return {
        what: round(said[f"{what.lower()}_s"]["mean"] / true[f"{what.lower()}_s"]["mean"] - 1, 4)
        for what in ("TTFT", "TPOT")
    }


def row(ttft: Sequence[float], tpot: Sequence[float], normalised: Sequence[float]) -> dict[str, Any]:
    """Means, medians and other statistics of each."""
    return {"ttft_s": spread(ttft), "tpot_s": spread(tpot), "normalised_s": spread(normalised)}


def of_outcomes(outcomes: Sequence[Outcome], later: bool | None = None) -> dict[str, Any]:
    """Measured latencies. later: only first turns (False) or only later ones (True)."""
    good = [o for o in outcomes if o.error is None and (later is None or later == (o.turn > 0))]
    normal = [(o.end_s - o.sent_s) / o.output_tokens for o in good]
    return row([o.ttft_s for o in good], [o.tpot_s for o in good if o.tpot_s is not None], normal)


def of_requests(requests: Sequence[Request], later: bool | None = None) -> dict[str, Any]:
    """Predicted latencies; `later` as in `of_outcomes`."""
    good = [r for r in requests if r.end_s >= 0 and (later is None or later == (r.turn > 0))]
    tpot = [(r.end_s - r.first_s) / (r.answer_tokens - 1) for r in good if r.answer_tokens > 1]
    return row([r.first_s - r.sent_s for r in good], tpot, [(r.end_s - r.sent_s) / r.answer_tokens for r in good])
