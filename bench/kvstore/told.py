"""The result of README.md, from result.json and result-again.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telling import quoted, read, stretch, table

VERDICT = {None: "", True: "yes", False: "**no**"}


def row(of: Any) -> list[str]:
    if "ratio" in of:
        low, high = of["ratio_range"]
        shown = [f"{of['ours']:.3g} {of['unit']}", f"{of['other']:.3g} {of['unit']}", f"{of['ratio']:.2f} ({low:.2f} to {high:.2f})"]
    else:
        shown = [f"{of['value']:g} {of['unit']}", "", ""]
    limits = [f"{word} {of[name]:g}" for name, word in (("at_most", "at most"), ("at_least", "at least")) if of.get(name) is not None]
    return [quoted(of["question"]), *shown, f"{' '.join(limits)} {VERDICT[of['holds']]}".strip(), quoted(of["note"])]


def ratios(of: Any) -> str:
    return ", ".join(f"{stretch(values, '.2f')} ({quoted(model)})" for model, values in of.items())


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    again = read(Path(__file__).with_name("result-again.json"))
    machine, parts = found["machine"], found["parts"]
    loads = [part["load_average_before"] for part in parts.values()]
    rows = [row(of) for part in parts.values() for of in part["figures"]]
    return f"""
`bench/kvstore/run --peers`, {quoted(found["date"][:10])}, {machine["cores"]:.0f} cores of {machine["cpu"]}; load average before a part
{min(loads):.2f} to {max(loads):.2f} (`result.json`). Medians; a ratio is the median of the repetitions' ratios, with the smallest and the largest.

Peers and loads again the day after, when the machine was slower (`result-again.json`): peer's DRAM to arena {ratios(again["peer"])}; a verified load against an
unverified one {ratios(again["load"])}.

{table(("question", "ours", "the other", "ratio", "should be", "note"), rows)}
"""
