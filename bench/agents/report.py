"""The result in README.md, from result.json and result-12-files.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import read, stretch, table

HERE = Path(__file__).parent
RUNS = {4: "result.json", 12: "result-12-files.json"}
MIB = 1 << 20


def row(files: int, arm: str, of: Any) -> list[str]:
    took, moved = of["median"], of["median_bytes"]
    mib = [
        f"{moved[name] / MIB:.0f} MiB"
        for name in ("loaded for requests", "loaded for hints", "hints used", "found in HBM")
    ]
    return [
        f"{files} files, {arm}",
        f"{took['end_to_end_s']:.1f} s",
        f"{1000 * took['ttft_returning_mean_s']:.0f} ms",
        *mib,
    ]


def result() -> str:
    found = {files: read(HERE / name)[f"{files}_files"] for files, name in RUNS.items()}
    rows = [row(files, arm, of["figures"][arm]) for files, of in found.items() for arm in ("hints", "no hints")]
    head = (
        "medians",
        "end to end",
        "TTFT of returning requests",
        "loaded for requests",
        "loaded for hints",
        "of which used",
        "found in HBM",
    )

    def ratio(files: int, name: str) -> str:
        of = found[files]["no_hints_over_hints"][name]
        return f"{of['median']:.2f} ({stretch(of['range'], '.2f')})"

    learned = {(e["from"], e["to"]): e for e in read(HERE / "result-12-files.json")["learned"]}
    edges = [
        f"`{a} -> {b}` with probability {learned[a, b]['probability']:.2f}"
        for a, b in (("engineer", "reviewer"), ("reviewer", "engineer"))
    ]
    return f"""
`bench/agents/run --files 4 --repetitions 3 --profiled 1` (`result.json`) and
`bench/agents/run --files 12 --repetitions 2 --profiled 1 --out bench/agents/result-12-files.json`, 2026-11-23, two cores of an AMD EPYC.
Eight files are not measured.

{table(head, rows)}

**On this machine hints do not pay**. The ratio of no hints to hints is {ratio(4, "end_to_end_s")} end to end and {ratio(4, "ttft_returning_mean_s")} in TTFT with four files,
{ratio(12, "end_to_end_s")} and {ratio(12, "ttft_returning_mean_s")} with twelve. Loads use the
cores that compute, and a project is mostly tools and compute. The paper's 2.8 × is over vLLM, which recomputes; both arms here cache.

**One run nearly learns the graph**: {edges[0]}, {edges[1]}, so some hints are wasted even with a
perfect graph.
"""
