"""The result of README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telling import Figure, quoted, read, table

ARMS = ("sticky", "sticky-hints", "balanced-no-hints", "balanced")
RETURNING, ALL = "ttft_returning_turns_s", "ttft_s"


def mean(runs: list[Any], of: str, at: str) -> Any:
    """Over the seeds."""
    return sum(run[of][at] for run in runs) / len(runs)


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    settings, cells = found["settings"], found["cells"]
    seconds, ratios = [], []
    for name, arms in cells.items():
        each = {arm: (mean(arms[arm], RETURNING, "mean"), mean(arms[arm], RETURNING, "p95")) for arm in ARMS}
        seconds.append([quoted(name), *(f"{each[arm][0]:.3f} / {each[arm][1]:.3f}" for arm in ARMS)])
        ours, theirs = arms["balanced"], arms["sticky"]
        pairs = ((of, at) for of in (RETURNING, ALL, "end_to_end_s") for at in ("mean", "p95"))
        ratios.append([quoted(name), *(f"{mean(ours, of, at) / mean(theirs, of, at):.2f}" for of, at in pairs)])
    means = [mean(arms["balanced"], RETURNING, "mean") / mean(arms["sticky"], RETURNING, "mean") for arms in cells.values()]
    behind, count = Figure(sum(ratio > 1 for ratio in means)), Figure(len(means))
    return f"""
`bench/pressure/run --trace mooncake_conversation.jsonl`: {settings["conversations"]:.0f} conversations, lengths × {settings["length_scale"]},
{settings["nodes"]:.0f} nodes of {quoted(settings["preset"])}, {settings["seeds"]:.0f} seed, {quoted(str(found["date"])[:10])}. Virtual time, so the machine does not matter.

Time to the first token of returning turns, mean / p95, s:

{table(("", *ARMS), seconds)}

`balanced` ÷ `sticky`; where it is less than one, ours is sooner:

{table(("", "returning, mean", "returning, p95", "all turns, mean", "all, p95", "end to end, mean", "end to end, p95"), ratios)}

`balanced` is behind `sticky` in the mean of returning turns in {behind:.0f} of {count:.0f} cells.
"""
