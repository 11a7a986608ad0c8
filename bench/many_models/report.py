"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import Figure, quoted, read, table

#: Index of the scale in the main tables, as in `run`.
SHOWN = 1


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    settings, runs, alone = found["settings"], found["runs"], found["machine_alone"]
    arms, loads = list(dict.fromkeys(r["arm"] for r in runs)), list(dict.fromkeys(r["load"] for r in runs))
    scales = settings["scales"]
    mebi = {name: settings[f"{name}_bytes"] / 2**20 for name in ("weight", "kv", "hbm")}
    slos = {shape: alone["slos"][name] for name, shape in settings["shapes"].items()}
    most = max(loads)
    half = next((load for load in loads if mean(runs, "static", load, SHOWN, "ttft") < 0.5), None)
    return f"""
`bench/many_models/run`, {quoted(str(found["date"])[:10])}, {found["machine"]["cores"]:.0f} cores of {quoted(found["machine"]["cpu"])}:
{Figure(len(settings["shapes"])):.0f} models ({", ".join(quoted(shape) for shape in slos)}), {settings["seeds"]:.0f} traces of
{settings["seconds"]:.0f} s, {mebi["weight"]:.0f} MiB of weights and {mebi["kv"]:.0f} of KV on {mebi["hbm"]:.0f} MiB. {quoted(found["note"])}

With memory for everything, the machine served {alone["per_s"]:.2f} requests a second. The P95 alone was
{"; ".join(f"{quoted(shape)}: TTFT {1e3 * slo['ttft_s']:.0f} ms, TPOT {1e3 * slo['tpot_s']:.1f} ms" for shape, slo in slos.items())}.
The client itself sent up to {max(r["lateness_s"]["p95"] for r in runs):.1f} s late (P95 of a run).

Attainment of TTFT / TPOT in %, means of the traces, with an SLO of {scales[SHOWN]:.0f} times the P95 alone:

{table(("load", *arms), [[f"{load:g}", *(cell(runs, arm, load, SHOWN) for arm in arms)] for load in loads])}

By the SLO's scale, at load {most:g}:

{table(("scale", *arms), [[f"{scale:g}", *(cell(runs, arm, most, n) for arm in arms)] for n, scale in enumerate(scales)])}

{verdict(runs, arms, loads, half)}
"""


def verdict(runs: Any, arms: list[str], loads: list[Any], half: Any) -> str:
    """Whether what the issue wants has been seen."""

    def most_behind(what: str) -> Any:
        behind = [
            max(mean(runs, arm, load, SHOWN, what) for arm in arms if arm != "prism")
            - mean(runs, "prism", load, SHOWN, what)
            for load in loads
        ]
        return 100 * max(Figure(0), *behind)

    most = (
        f"In the first table `prism` is at most {most_behind('ttft'):.1f} points behind the best other arm in TTFT and "
        f"{most_behind('tpot'):.1f} in TPOT; with other scales of the SLO it is behind by more than the one point that "
        "was wanted."
    )
    if half is None:
        return f"`static` kept half of the TTFTs or more at every load. {most}"
    return (
        f"At load {half:g}, where `static` kept {100 * mean(runs, 'static', half, SHOWN, 'ttft'):.1f} % of the TTFTs, "
        f"`prism` kept {100 * mean(runs, 'prism', half, SHOWN, 'ttft'):.1f} %. {most}"
    )


def mean(runs: Any, arm: str, load: Any, scale: int, what: str) -> Any:
    """Mean attainment over the traces."""
    kept = [r["kept"][scale][what] for r in runs if (r["arm"], r["load"]) == (arm, load)]
    return sum(kept) / len(kept)


def cell(runs: Any, arm: str, load: Any, scale: int) -> str:
    return " / ".join(f"{100 * mean(runs, arm, load, scale, what):.1f}" for what in ("ttft", "tpot"))
