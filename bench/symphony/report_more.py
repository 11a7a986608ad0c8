"""The results in README.md that go beyond the paper's figures: its headline numbers, and systems that it does not
compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report_tables import E2E, NAMES, TTFT, by, figure
from write_figures import table

#: The mean TTFT that a load is served within.
SERVED_S = 1.0


# ---- the paper's headline numbers ---------------------------------------------------------------------------------
def over(system: str, what: str) -> Callable[[Any], str]:
    """A system's figure over ours, at the most users that ours serves."""

    def told(document: Any) -> str:
        found = by(document["rows"])
        served = [n for n, name in found if name == "balanced" and found[n, name][TTFT] <= SERVED_S]
        if not served:
            return "ours is past saturation"
        users = max(served)
        return f"{found[users, system][what] / found[users, 'balanced'][what]:.1f} x ({users:,} users)"

    return told


def users_at_equal_tpot(document: Any) -> str:
    """The largest ratio of our users to vLLM's at equal TPOT."""
    rows = [row for row in document["users_at_equal_tpot"] if row["system"] == "recompute"]
    best = max(rows, key=lambda row: row["ours"] / row["users"])
    return f"{'at least ' if best['at_least'] else ''}{best['ours'] / best['users']:.1f} x"


def lost(system: str) -> Callable[[Any], str]:
    """How much lower a system's throughput is than ours, at most."""

    def told(document: Any) -> str:
        found, what = by(document["rows"]), "requests_per_s"
        most = max(1 - found[n, system][what] / found[n, "balanced"][what] for n, name in found if name == system)
        return f"{100 * most:.1f} %"

    return told


def more(system: str) -> Callable[[Any], str]:
    """How much higher a system's throughput is than ours, at most; below 0: lower everywhere."""

    def told(document: Any) -> str:
        found, what = by(document["rows"]), "requests_per_s"
        gains = [found[n, system][what] / found[n, "balanced"][what] - 1 for n, name in found if name == system]
        return f"{100 * max(gains):+.1f} %" if gains else "not simulated"

    return told


def imbalance(document: Any) -> str:
    """The highest load of a GPU over the median, with InferCept and with ours."""
    of = document["systems"]
    return " → ".join(f"{of[f'8b {name}']['peak_to_median']['whole_run']:.1f} x" for name in ("infercept", "balanced"))


def agents(document: Any) -> str:
    """vLLM's time for a project over ours, at most."""
    rows = {(r["teams"], r["files"], r["system"]): r["project_mean_s"] for r in document["rows"]}
    return f"{max(s / rows[t, f, 'balanced'] for (t, f, name), s in rows.items() if name == 'recompute'):.1f} x"


def codec(document: Any) -> str:
    """How much sooner ours is than LMCache, at most."""
    found = by(document["rows"])
    ours = "balanced, remote tier, codec"
    return f"{100 * max(1 - found[n, ours][E2E] / found[n, 'lmcache'][E2E] for n, name in found if name == ours):.0f} %"


_PAUSES, _SHORT = (
    "our users pause, so a GPU has few requests",
    "loads from DRAM are short, and below saturation users set the pace",
)
_DISK = "part of the history is on the SSD, from which loading takes as long as recomputing"
#: The paper's claim and number; the figure of ours that answers, and how to read it; why they differ.
HEADLINES: tuple[tuple[str, str, str, Callable[[Any], str], str], ...] = (
    ("end to end, vLLM over SYMPHONY, 8B", "2.4 x", "11", over("recompute", E2E), "vLLM is past saturation there"),
    ("the same, 13B", "2.4 x", "12", over("recompute", E2E), _DISK),
    ("users at vLLM's TPOT, 8B", "4 x", "11", users_at_equal_tpot, "within a quarter"),
    ("a token, Llumnix + InferCept over SYMPHONY, 8B", "1.6 x", "11", over("llumnix-infercept", "normalised_s"),
     "InferCept's memory is full there"),
    ("the same, 13B", "1.6 x", "12", over("llumnix-infercept", "normalised_s"), _DISK),
    ("sooner than LMCache, 13B", "47 % with its codec, 35 % without", "14", codec,
     "with its codec; the first token is a small part of it"),
    ("without cooperative memory, 13B", "7 x slower", "17", over("no-cooperative", E2E), _SHORT),
    ("without layer-wise loading, 13B", "18.4 % fewer requests/s", "17", lost("no-layerwise"), _SHORT),
    ("with layer priority, 13B", "21.7 % more requests/s", "17", more("layer-priority"), _SHORT),
    ("agents, vLLM over SYMPHONY", "2.8 x", "16", agents, "agents write 400 to 900 tokens, which no cache speeds up"),
    ("the most loaded GPU over the median, 8B", "3.1 x → even", "15", imbalance, _PAUSES),
)  # fmt: skip


def headlines() -> str:
    """With a column for busy users if they were simulated."""
    told = [(claim, papers, each(figure(name)), _busy(name, each), why) for claim, papers, name, each, why in HEADLINES]
    busy = any(row[3] for row in told)
    head = ("", "paper", "here", *(["with users as busy as the paper's"] if busy else []), "why they differ")
    return f"""
## The paper's headline numbers

Ratios at the most users that ours serves with a mean TTFT of at most {SERVED_S:.0f} s, shares at the load with the
largest.

{table(head, [(*row[:3], *([row[3]] if busy else []), row[4]) for row in told])}
"""


def _busy(name: str, told: Callable[[Any], str]) -> str:
    document = figure(f"{name}-busy")
    return "" if document is None else told(document)


# ---- systems that the paper does not compare ----------------------------------------------------------------------
def arms() -> str:
    """Empty if they have not been simulated."""
    parts = []
    for name, model in (("arms-8b", "Llama-3.1-8B"), ("arms-13b", "Llama-2-13B")):
        if (document := figure(name)) is None:
            continue
        found = by(document["rows"])
        users = sorted({n for n, _ in found})
        rows = [
            (NAMES[system], *(f"{found[n, system][TTFT]:.2f} s, {found[n, system][E2E]:.1f} s" for n in users))
            for system in dict.fromkeys(system for _, system in found)
        ]
        parts.append(f"{model}, mean TTFT and end to end:\n\n" + table(("", *(f"{n:,} users" for n in users)), rows))
    return "\n\n".join(("## Systems that the paper does not compare", *parts)) if parts else ""
