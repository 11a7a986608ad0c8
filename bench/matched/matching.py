"""Figures of matched requests: every target answers the same ones, and differences are taken request by request. Pure.

An interval is a 95 % bootstrap. Each draw resamples repeats, and conversations within a repeat, as requests of one
conversation or one repeat resemble each other. Both targets of a ratio have the same draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAWS = 1000
CONFIDENCE = 0.95
#: TTFT and TPOT in seconds, of every objective that attainment is counted for.
SLOS = tuple((ttft_s, tpot_s) for ttft_s in (0.5, 1.0, 2.0, 5.0) for tpot_s in (0.05, 0.1, 0.2))
#: Fewer repeats decide nothing.
LEAST_REPEATS = 5

Row = Mapping[str, Any]
Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a target's requests. of: seconds of a request, None if it has none. less: less is better."""

    name: str
    of: Callable[[Row], float | None]
    take: Callable[[Any], float]
    less: bool = True


def ttft_s(row: Row) -> float:
    return float(row["ttft_s"])


def end_to_end_s(row: Row) -> float:
    return float(row["end_s"] - row["sent_s"])


def tpot_s(row: Row) -> float | None:
    tokens = row["output_tokens"] - 1
    return (end_to_end_s(row) - ttft_s(row)) / tokens if tokens > 0 else None


def _turns(of: Callable[[Row], float | None], *, first: bool) -> Callable[[Row], float | None]:
    return lambda row: of(row) if (row["turn"] == 0) == first else None


def _percentile(share: float) -> Callable[[Any], float]:
    return lambda values: float(np.percentile(values, share))


def _mean(values: Any) -> float:
    return float(np.mean(values))


_OF: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("end to end", end_to_end_s),
    ("TTFT", ttft_s),
    ("TTFT of first turns", _turns(ttft_s, first=True)),
    ("TTFT of returning turns", _turns(ttft_s, first=False)),
    ("TPOT", tpot_s),
)
_TAKE = (("mean", _mean), *((f"p{share}", _percentile(share)) for share in (50, 95, 99)))
METRICS = tuple(Metric(f"{of}, {take}", value, taken) for of, value in _OF for take, taken in _TAKE)
#: What the comparison is about.
CLAIMED = tuple(f"{of}, {take}" for of in ("end to end", "TTFT") for take in ("mean", "p95"))
TOKENS = "output tokens/s"


class Unmatched(ValueError):
    """A target did not answer every request. The message says how many, and with which errors."""


def matched(rows: Sequence[Row], planned: set[Key]) -> dict[Key, Row]:
    """The answers by request. Raises Unmatched if one failed or is missing."""
    good = {key_of(row): row for row in rows if row["error"] is None}
    if missing := len(planned - set(good)):
        errors = sorted({str(row["error"]) for row in rows if row["error"] is not None})[:3]
        raise Unmatched(f"{missing} of {len(planned)} requests have no answer: {'; '.join(errors) or 'not sent'}")
    return {key: good[key] for key in sorted(planned)}


def key_of(row: Row) -> Key:
    """(repeat, conversation, turn)."""
    return row["repeat"], row["session"], row["turn"]


class Draws:
    """Bootstrap draws over the requests of a load, shared by all of its targets."""

    def __init__(self, keys: Sequence[Key], seed: int, count: int) -> None:
        chance = np.random.default_rng(seed)
        groups: dict[int, dict[str, list[int]]] = {}
        for at, (repeat, session, _) in enumerate(keys):
            groups.setdefault(repeat, {}).setdefault(session, []).append(at)
        held = [[np.asarray(at) for at in sessions.values()] for sessions in groups.values()]
        self.indices = []
        for _ in range(count):
            repeats = (held[i] for i in chance.integers(len(held), size=len(held)))
            chosen = [sessions[i] for sessions in repeats for i in chance.integers(len(sessions), size=len(sessions))]
            self.indices.append(np.concatenate(chosen))

    def of(self, metric: Metric, rows: Sequence[Row]) -> tuple[float, Any]:
        """(the metric of `rows`, its values of the draws). rows: in the order of the keys. NaN if no request has it."""
        given = [metric.of(row) for row in rows]
        values = np.asarray([np.nan if value is None else value for value in given], dtype=float)
        if np.isnan(values).all():
            return float("nan"), np.full(len(self.indices), np.nan)
        return _taken(metric, values), np.asarray([_taken(metric, values[at]) for at in self.indices])


def _taken(metric: Metric, values: Any) -> float:
    kept = values[~np.isnan(values)]
    return metric.take(kept) if len(kept) else float("nan")


def interval(drawn: Any) -> list[float]:
    """[low, high] of the draws."""
    kept = drawn[~np.isnan(drawn)]
    if not len(kept):
        return []
    edges = np.quantile(kept, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return [round(float(edge), 6) for edge in edges]


def attainment(rows: Sequence[Row]) -> dict[str, float]:
    """By objective, the share of requests within it."""
    found = {}
    for first_s, token_s in SLOS:
        kept = sum(ttft_s(row) <= first_s and (tpot_s(row) or 0.0) <= token_s for row in rows)
        found[f"TTFT {first_s:g} s, TPOT {token_s:g} s"] = round(kept / len(rows), 4)
    return found


def tokens_per_s(rows: Sequence[Row]) -> list[float]:
    """Output tokens a second of each repeat, from its first request to its last answer."""
    found = []
    for repeat in sorted({row["repeat"] for row in rows}):
        own = [row for row in rows if row["repeat"] == repeat]
        span_s = max(row["end_s"] for row in own) - min(row["sent_s"] for row in own)
        found.append(round(sum(row["output_tokens"] for row in own) / span_s, 3))
    return found


def figures(rows: Mapping[str, Sequence[Row]], planned: set[Key], ours: str, seed: int) -> dict[str, Any]:
    """Every target's figures at one load, and the ratios of `ours` to each other target with all the answers.

    rows: each target's requests. A target without an answer to each of `planned` has an `error` instead of figures.
    """
    whole: dict[str, list[Row]] = {}
    found: dict[str, Any] = {}
    for name, of in rows.items():
        try:
            whole[name] = list(matched(of, planned).values())
        except Unmatched as e:
            found[name] = {"error": str(e)}
    draws = Draws(sorted(planned), seed, DRAWS)
    taken = {(name, m.name): draws.of(m, of) for name, of in whole.items() for m in METRICS}
    for name, of in whole.items():
        values = {m.name: (taken[name, m.name], taken.get((ours, m.name))) for m in METRICS}
        found[name] = {
            "requests": len(of),
            "repeats": len({row["repeat"] for row in of}),
            "figures": {m: {"value": round(v, 6), "interval": interval(d)} for m, ((v, d), _) in values.items()},
            "each_repeat": _by_repeat(of),
            TOKENS: tokens_per_s(of),
            "attainment": attainment(of),
        }
        if name != ours and ours in whole:
            found[name]["ours_over_it"] = {
                m: {"value": round(own[0] / v, 4), "interval": interval(own[1] / d)}
                for m, ((v, d), own) in values.items()
                if own is not None and v > 0
            }
    return found


def _by_repeat(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Of what the comparison is about, each repeat's value."""
    found: dict[str, list[float]] = {}
    for metric in (m for m in METRICS if m.name in CLAIMED):
        for repeat in sorted({row["repeat"] for row in rows}):
            values = [v for row in rows if row["repeat"] == repeat and (v := metric.of(row)) is not None]
            found.setdefault(metric.name, []).append(round(metric.take(np.asarray(values)), 6))
    return found


def verdicts(found: Mapping[str, Any], ours: str, peers: Sequence[str]) -> list[dict[str, Any]]:
    """For each figure of CLAIMED: ours over the peer that is best in it, the interval, and what follows.

    ahead, behind: the interval is below, or above, one. Undecided otherwise, and with fewer than LEAST_REPEATS.
    """
    made = []
    for metric in CLAIMED:
        whole = [name for name in peers if "ours_over_it" in found.get(name, {})]
        if not whole:
            made.append({"metric": metric, "peer": None, "verdict": "not measured"})
            continue
        best = min(whole, key=lambda name: found[name]["figures"][metric]["value"])
        ratio = found[best]["ours_over_it"][metric]
        low, high = ratio["interval"]
        enough = found[best]["repeats"] >= LEAST_REPEATS
        said = "ahead" if enough and high < 1 else "behind" if enough and low > 1 else "undecided"
        made.append({"metric": metric, "peer": best, "ratio": ratio, "verdict": said})
    return made
