"""The results in README.md that go beyond the paper's figures: its headline numbers, users as busy as its own, and
systems that it does not compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from report import E2E, HERE, NAMES, TTFT, by, figure
from write_figures import read, table

MORE = NAMES | {
    "prefix-caching": "vLLM, prefix caching",
    "infercept-ssd": "InferCept, SSD",
    "lmcache-ssd": "LMCache, SSD",
    "sticky": "ours, sticky, no hints",
    "sticky-hints": "ours, sticky",
    "balanced-no-hints": "ours, no hints",
}


def maybe(name: str) -> Any:
    """A figure's results, or None."""
    path = HERE / "results" / f"figure-{name}.json"
    return read(path) if path.exists() else None


# ---- the paper's headline numbers ---------------------------------------------------------------------------------
def most(rows: Sequence[Any], system: str, what: str = "normalised_s") -> str:
    """The largest ratio of a system over ours, and at how many users."""
    found = by(rows)
    ratio, users = max((found[n, system][what] / found[n, "balanced"][what], n) for n, name in found if name == system)
    return f"{ratio:.1f} x ({users:,} users)"


def users_at_equal_tpot(document: Any) -> str:
    """The largest ratio of our users to vLLM's at equal TPOT."""
    rows = [row for row in document["users_at_equal_tpot"] if row["system"] == "recompute"]
    best = max(rows, key=lambda row: row["ours"] / row["users"])
    return f"{'at least ' if best['at_least'] else ''}{best['ours'] / best['users']:.1f} x"


def fewer(rows: Sequence[Any], system: str) -> str:
    """How much lower a system's throughput is than ours, at most."""
    found, what = by(rows), "requests_per_s"
    lost = max(1 - found[n, system][what] / found[n, "balanced"][what] for n, name in found if name == system)
    return f"{100 * lost:.1f} %"


def imbalance(document: Any) -> str:
    """The highest load of a GPU over the median, with InferCept and with ours."""
    of = document["systems"]
    return " → ".join(f"{of[f'8b {name}']['peak_to_median']['whole_run']:.1f} x" for name in ("infercept", "balanced"))


def spread(document: Any) -> str:
    """The largest difference of requests between two GPUs, with InferCept and with ours."""
    return ", ".join(
        f"{max(a - b for a, b in zip(of['most'], of['least'], strict=True)):.0f} ({NAMES[name]})"
        for name, of in document["systems"].items()
    )


#: The paper's claim, its number, the figure of ours that answers, and how to read that.
HEADLINES: tuple[tuple[str, str, str, Callable[[Any], str]], ...] = (
    ("requests between two GPUs, 8B", "up to 300 (InferCept)", "1", spread),
    ("end to end over vLLM, 8B", "2.4 x", "11", lambda d: most(d["rows"], "recompute", E2E)),
    ("end to end over vLLM, 13B", "2.4 x", "12", lambda d: most(d["rows"], "recompute", E2E)),
    ("users at equal TPOT over vLLM, 8B", "4 x", "11", users_at_equal_tpot),
    ("a token over Llumnix + InferCept, 8B", "1.6 x", "11", lambda d: most(d["rows"], "llumnix-infercept")),
    ("a token over Llumnix + InferCept, 13B", "1.6 x", "12", lambda d: most(d["rows"], "llumnix-infercept")),
    ("without cooperative memory", "7 x slower", "17", lambda d: most(d["rows"], "no-cooperative", E2E)),
    ("requests/s lost without layer-wise loads", "18.4 %", "17", lambda d: fewer(d["rows"], "no-layerwise")),
    ("most loaded GPU over the median", "3.1 x → even", "15", imbalance),
)


def headlines() -> str:
    """The table of `HEADLINES`, with our users and with busy ones."""
    rows = []
    for claim, papers, name, told in HEADLINES:
        busy = maybe(f"{name}-busy")
        rows.append((claim, papers, told(figure(name)), told(busy) if busy else "-"))
    return table(("", "paper", "here, our users", "here, busy users"), rows)


# ---- systems that the paper does not compare ----------------------------------------------------------------------
def beside(name: str) -> str:
    """Each system of the figure `arms-…`: TTFT and end to end."""
    found = by(figure(name)["rows"])
    users = sorted({n for n, _ in found})
    rows = [
        (MORE[system], *(f"{found[n, system][TTFT]:.2f} s, {found[n, system][E2E]:.1f} s" for n in users))
        for system in dict.fromkeys(system for _, system in found)
    ]
    return table(("TTFT, end to end", *(f"{n:,} users" for n in users)), rows)
