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


def ratios(ours: list[Any], theirs: list[Any], of: str, at: str) -> list[Any]:
    """Of each seed, lowest first."""
    other = {run["seed"]: run[of][at] for run in theirs}
    return sorted(run[of][at] / other[run["seed"]] for run in ours)


def spread(found: list[Any]) -> str:
    """The mean of the seeds, and from the lowest to the highest of them."""
    middle = sum(found) / len(found)
    return f"{middle:.2f}" if len(found) == 1 else f"{middle:.2f} ({found[0]:.2f}–{found[-1]:.2f})"


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    settings, cells = found["settings"], found["cells"]
    seconds, beside, behind, always = [], [], 0, 0
    for name, arms in cells.items():
        each = {arm: (mean(arms[arm], RETURNING, "mean"), mean(arms[arm], RETURNING, "p95")) for arm in ARMS}
        seconds.append([quoted(name), *(f"{each[arm][0]:.3f} / {each[arm][1]:.3f}" for arm in ARMS)])
        pairs = ((of, at) for of in (RETURNING, ALL, "end_to_end_s") for at in ("mean", "p95"))
        each_pair = [ratios(arms["balanced"], arms["sticky"], of, at) for of, at in pairs]
        beside.append([quoted(name), *map(spread, each_pair)])
        behind += sum(each_pair[0]) > len(each_pair[0])
        always += each_pair[0][-1] < 1
    return f"""
`bench/pressure/run --trace mooncake_conversation.jsonl`: {settings["conversations"]:.0f} conversations, lengths × {settings["length_scale"]},
{settings["nodes"]:.0f} nodes of {quoted(settings["preset"])}, {settings["seeds"]:.0f} seed(s), {quoted(str(found["date"])[:10])}. Virtual time, so the machine does not matter.

Time to the first token of returning turns, mean / p95, s, means of the seeds:

{table(("", *ARMS), seconds)}

`balanced` ÷ `sticky`, the mean of the seeds (lowest–highest); where it is less than one, ours is sooner:

{table(("", "returning, mean", "returning, p95", "all turns, mean", "all, p95", "end to end, mean", "end to end, p95"), beside)}

In the mean of returning turns `balanced` is behind `sticky` in {Figure(behind):.0f} of {Figure(len(cells)):.0f} cells, and ahead with every seed in {Figure(always):.0f}.
"""
