"""The result in README.md, from result.json and tuned.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from write_figures import quoted, read, table

HERE = Path(__file__).parent
SHOWN = ("end to end, mean", "end to end, p95", "TTFT, mean", "TTFT, p95", "TTFT of first turns, mean", "TTFT of returning turns, mean",
         "TTFT, p99", "TPOT, mean")  # fmt: skip
OBJECTIVES = ("TTFT 0.5 s, TPOT 0.05 s", "TTFT 1 s, TPOT 0.1 s", "TTFT 2 s, TPOT 0.2 s", "TTFT 5 s, TPOT 0.2 s")
Loads = Mapping[str, Any]


def result() -> str:
    path = HERE / "result.json"
    if not path.exists():
        return "**Not measured yet**: no result is committed."
    found = read(path)
    load, loads = found["load"], found["loads"]
    scales = " and ".join(f"{scale}" for scale in load["time_scales"])
    parts = [
        f"{_source(load)}, lengths × {load['length_scale']}, times × {scales}, conversations of three turns and more. The same "
        f"{load['requests']:.0f} requests of {load['sessions']:.0f} conversations for every target, {found['settings']['repeats']:.0f} repeats in turns; "
        f"tuned on {quoted(found['tuned_on']['source'])}, seed {found['tuned_on']['seed']:.0f}. `result.json`; every request: `outcomes.csv.gz`.",
        _verdicts(loads),
        *(_values(loads, metric) for metric in SHOWN),
        _objectives(loads),
        _repeats(loads, "end to end, mean"),
        *(_tuned() if (HERE / "tuned.json").exists() else ()),
    ]
    return "\n\n".join(part for part in parts if part)


def _source(load: Any) -> str:
    return "A generated load" if load["source"] == "generated" else f"A production trace (`{load['source']}`)"


def head(of: Any) -> str:
    return f"{of['requests_per_s']:.2g} requests/s"


def _verdicts(loads: Loads) -> str:
    """What is claimed, and at which loads ours is behind."""
    rows = []
    for of in loads.values():
        for verdict in of["verdicts"]:
            ratio = verdict.get("ratio")
            said = f"{ratio['value']:.2f} ({_range(ratio['interval'], '.2f')})" if ratio else "-"
            word = verdict["verdict"] if verdict["verdict"] == "ahead" else f"**{verdict['verdict']}**"
            rows.append((head(of), verdict["metric"], quoted(f"`{verdict['peer']}`"), said, word))
    return "Ours over the peer that is best in the figure, with the interval of matched requests:\n\n" + table(
        ("load", "figure", "best peer", "ours over it", ""), rows
    )


def _range(of: Any, spec: str) -> str:
    return " to ".join(f"{edge:{spec}}" for edge in of)


def _names(loads: Loads) -> list[str]:
    return list(dict.fromkeys(name for of in loads.values() for name in of["targets"]))


def _per_load(loads: Loads, title: str, cell: Any) -> str:
    """A table of targets by loads. cell: of a target's figures at a load."""
    rows = []
    for name in _names(loads):
        cells = []
        for of in loads.values():
            target = of["targets"].get(name)
            cells.append("-" if target is None else "failed" if "error" in target else cell(target))
        rows.append((quoted(f"`{name}`"), *cells))
    return table((title, *(head(of) for of in loads.values())), rows)


def _values(loads: Loads, metric: str) -> str:
    def cell(target: Any) -> str:
        figure = target["figures"][metric]
        spec = ".3f" if metric.startswith("TPOT") else ".2f"
        return f"{figure['value']:{spec}} ({_range(figure['interval'], spec)})"

    return _per_load(loads, f"{quoted(metric)}, s", cell)


def _objectives(loads: Loads) -> str:
    """Attainment of several objectives, in the order of OBJECTIVES."""
    shown = _per_load(
        loads, "% within", lambda t: " / ".join(f"{100 * t['attainment'][name]:.0f}" for name in OBJECTIVES)
    )
    return f"Share of requests within {quoted('; '.join(OBJECTIVES))}:\n\n{shown}"


def _repeats(loads: Loads, metric: str) -> str:
    shown = _per_load(loads, f"{quoted(metric)}, s", lambda t: ", ".join(f"{v:.2f}" for v in t["each_repeat"][metric]))
    return f"Every repeat:\n\n{shown}"


def _tuned() -> list[str]:
    """What the search found for each peer."""
    found = read(HERE / "tuned.json")
    rows = []
    for name, best in found["best"].items():
        if "batched_tokens" in best:
            rows.append((f"`{name}`", quoted("end to end, mean"), quoted(f"b{best['batched_tokens']:.0f}")))
            continue
        for metric, c in best.items():
            label = f"b{c['batched_tokens']:.0f} s{c['sequences']:.0f} {c['instances']:.0f}x {c['balance']}"
            rows.append((f"`{name}`", quoted(metric), quoted(label)))
    tried = sum(len(of) for of in found["found"].values())
    return [
        f"Best settings by figure, of {quoted(str(tried))} that were tried (`tuned.json`):\n\n"
        + table(("target", "figure", "settings"), rows)
    ]
