"""The result in README.md, from result*.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import Figure, quoted, read, table

ARMS = ("sticky", "sticky-layers", "sticky-hints", "balanced-no-hints", "balanced")
IMPERFECT = ("missed-10", "spurious-60")
RETURNING, ALL, END = "ttft_returning_turns_s", "ttft_s", "end_to_end_s"
#: Draws that decide something.
ENOUGH = 5
FIGURES = tuple((of, at) for of in (RETURNING, ALL, END) for at in ("mean", "p95"))
COLUMNS = ("returning, mean", "returning, p95", "all turns, mean", "all, p95", "end to end, mean", "end to end, p95")


def document(name: str) -> Any:
    return read(Path(__file__).with_name(name))


def mean(runs: list[Any], of: str, at: str) -> Any:
    """The mean over the seeds."""
    return sum(run[of][at] for run in runs) / len(runs)


def _pairs(ours: list[Any], theirs: list[Any]) -> list[tuple[Any, Any]]:
    """Runs of both arms, paired by seed."""
    other = {run["seed"]: run for run in theirs}
    return [(run, other[run["seed"]]) for run in ours]


def ratios(ours: list[Any], theirs: list[Any], of: str, at: str) -> list[Any]:
    """Ratios of the seeds, lowest first."""
    return sorted(run[of][at] / other[of][at] for run, other in _pairs(ours, theirs))


def spread(found: list[Any]) -> str:
    """The mean of the seeds and their range."""
    middle = sum(found) / len(found)
    return f"{middle:.2f}" if len(found) == 1 else f"{middle:.2f} ({found[0]:.2f}–{found[-1]:.2f})"


def seconds(cells: Any) -> str:
    """A table of the returning turns' TTFT, by cell and arm."""
    rows, shown = [], [arm for arm in ARMS if any(arm in arms for arms in cells.values())]
    for name, arms in cells.items():
        each = ([mean(arms[arm], RETURNING, at) for at in ("mean", "p95")] if arm in arms else [] for arm in shown)
        rows.append([quoted(name), *(" / ".join(f"{seconds:.3f}" for seconds in both) for both in each)])
    return table(("", *shown), rows)


def beside(cells: Any, other: str = "sticky") -> str:
    """A table of `balanced` over another arm, by cell."""
    rows = []
    for name, arms in ((name, arms) for name, arms in cells.items() if other in arms):
        rows.append([quoted(name), *(spread(ratios(arms["balanced"], arms[other], of, at)) for of, at in FIGURES)])
    return table(("", *COLUMNS), rows)


def fairest(cells: Any) -> str:
    """`balanced` over `sticky` in its best setting; empty if that was not measured."""
    if not any("sticky-layers" in arms for arms in cells.values()):
        return ""
    return f"""
The same ÷ `sticky-layers`, which is the better setting without hints:

{beside(cells, "sticky-layers")}
"""


def simulated() -> str:
    found = document("result.json")
    settings, cells = found["settings"], found["cells"]
    paired = [ratios(arms["balanced"], arms["sticky"], RETURNING, "mean") for arms in cells.values()]
    behind, always = sum(sum(each) > len(each) for each in paired), sum(each[-1] < 1 for each in paired)
    return f"""
### Simulated

`bench/pressure/run --trace mooncake_conversation.jsonl`: {settings["conversations"]:.0f} conversations, lengths × {settings["length_scale"]},
{settings["nodes"]:.0f} nodes of {quoted(settings["preset"])}, {settings["seeds"]:.0f} seeds, {quoted(str(found["date"])[:10])}. Virtual time.

TTFT of returning turns, mean / p95, s, means of the seeds:

{seconds(cells)}

`balanced` ÷ `sticky`, mean of the seeds (lowest–highest); below one, `balanced` is faster:

{beside(cells)}
{fairest(cells)}
In the mean of returning turns `balanced` is behind `sticky` in {Figure(behind):.0f} of {Figure(len(cells)):.0f} cells and ahead with every seed in {Figure(always):.0f}.
"""


def switches() -> str:
    """`balanced` without each mechanism, over `balanced`."""
    found = document("result-switches.json")
    rows, pairs = [], ((RETURNING, "mean"), (RETURNING, "p95"), (END, "mean"))
    for name, arms in found["cells"].items():
        for arm in (arm for arm in arms if arm != "balanced"):
            rows.append([quoted(name), arm, *(spread(ratios(arms[arm], arms["balanced"], of, at)) for of, at in pairs)])
    return f"""
### Without one mechanism

`bench/pressure/run --switches`, the same load, {found["settings"]["seeds"]:.0f} seeds: `balanced` without one mechanism ÷ `balanced`. Above one, the mechanism pays.
`layer-priority` is on, which it is not by default.

{table(("", "without", "returning, mean", "returning, p95", "end to end, mean"), rows)}
"""


def real() -> str:
    found = document("result-real.json")
    settings, cells = found["settings"], found["cells"]
    draws = min(len(arms["balanced"]) for arms in cells.values())
    enough, draws = draws >= ENOUGH, Figure(draws)
    return f"""
### For real

`bench/pressure/run --real --trace mooncake_conversation.jsonl`: {settings["conversations"]:.0f} conversations, lengths × {settings["length_scale"]},
{settings["nodes"]:.0f} nodes, {settings["seeds"]:.0f} seeds, {quoted(str(found["date"])[:10])}, {quoted(found["machine"]["cpu"])}. Returning turns, mean / p95, s:

{seconds(cells)}

`balanced` ÷ `sticky`, as above:

{beside(cells)}
{fairest(cells)}
{always(cells)} {"" if enough else f"{draws:.0f} draws are too few to decide: five are wanted."}
{imperfect(cells)}"""


def always(cells: Any) -> str:
    """In which figures `balanced` is ahead, and behind, of `sticky` with every draw of every cell."""
    ahead, behind = [], []
    for name, (of, at) in zip(COLUMNS, FIGURES, strict=True):
        each = [ratio for arms in cells.values() for ratio in ratios(arms["balanced"], arms["sticky"], of, at)]
        if max(each) < 1:
            ahead.append(name)
        elif min(each) > 1:
            behind.append(name)
    said = [f"{word} in {'; '.join(names)}" for word, names in (("ahead", ahead), ("behind", behind)) if names]
    return (
        f"With every draw `balanced` is {', and '.join(said)}."
        if said
        else "With every draw it is neither ahead nor behind in any of these."
    )


def other_traces() -> str:
    """The simulated arms under other traces: a file `result-trace-NAME.json` each."""
    parts = []
    for path in sorted(Path(__file__).parent.glob("result-trace-*.json")):
        found = read(path)
        parts.append(f"""
### Another trace: {quoted(f"`{found['settings']['trace']}`")}

{found["settings"]["conversations"]:.0f} conversations, lengths × {found["settings"]["length_scale"]}, {found["settings"]["seeds"]:.0f} seeds,
{quoted(str(found["date"])[:10])} (`{path.name}`). TTFT of returning turns, mean / p95, s:

{seconds(found["cells"])}

`balanced` ÷ `sticky`:

{beside(found["cells"])}

{always(found["cells"])}
""")
    return "".join(parts)


def imperfect(cells: Any) -> str:
    """`balanced` with hints that are missed or spurious, over `balanced`; empty if that was not measured."""
    rows = []
    for name, arms in cells.items():
        for arm in (arm for arm in IMPERFECT if arm in arms):
            pairs = _pairs(arms[arm], arms["balanced"])
            each = [spread(ratios(arms[arm], arms["balanced"], of, "mean")) for of in (RETURNING, ALL, END)]
            rate = sorted(run["requests_per_s"] / other["requests_per_s"] for run, other in pairs)
            rows.append([quoted(name), arm, *each, spread(rate)])
    if not rows:
        return ""
    return f"""
10 % of the hints missed, or 60 % spurious ones added, ÷ `balanced`. SYMPHONY: latency 1.06, throughput 0.979.

{table(("", "hints", "returning, mean", "all turns, mean", "end to end, mean", "requests a second"), rows)}
"""


def of_agents() -> str:
    found = document("result-agents.json")
    most = max(found["settings"]["cells"], key=lambda name: found["settings"]["cells"][name]["memory"])
    least_s = project_s(found["cells"][most]["balanced-no-hints"])
    rows = []
    for name, arms in found["cells"].items():
        rows.append(
            [
                "all in HBM" if name == most else quoted(name),
                *(f"{project_s(arms[arm]):.1f} s" for arm in ("recompute", "balanced-no-hints", "balanced")),
                *(projects(arms[arm], arms["balanced"]) for arm in ("recompute", "balanced-no-hints")),
                f"{project_s(arms['balanced-no-hints']) / least_s:.2f}",
                spread(ratios(arms["balanced-no-hints"], arms["balanced"], RETURNING, "mean")),
            ]
        )
    head = (
        "", "project, recompute", "no hints", "hints",
        "recompute ÷ hints", "no hints ÷ hints", "no hints ÷ all in HBM", "no hints ÷ hints, TTFT of returning requests",
    )  # fmt: skip
    return f"""
### Agents

`bench/pressure/run --agents`: teams of `bench/symphony/agents.py` with long contexts and short answers (`agents.py` here), {found["settings"]["seeds"]:.0f} seeds.
Hints come from the call graph. Mean seconds of a project, and their ratios; above one, hints pay:

{table(head, rows)}

"No hints ÷ all in HBM" is what hints could win at most.
"""


def project_s(runs: list[Any]) -> Any:
    """The mean of the seeds."""
    return sum(run["project_mean_s"] for run in runs) / len(runs)


def projects(theirs: list[Any], ours: list[Any]) -> str:
    """Ratios of the seeds' projects."""
    return spread(sorted(run["project_mean_s"] / other["project_mean_s"] for run, other in _pairs(theirs, ours)))


#: Sections by their result file, in order; sections without a file are left out.
PARTS = {
    "result.json": simulated,
    "result-real.json": real,
    "result-switches.json": switches,
    "result-agents.json": of_agents,
}


def result() -> str:
    return "".join(part() for name, part in PARTS.items() if Path(__file__).with_name(name).exists()) + other_traces()
