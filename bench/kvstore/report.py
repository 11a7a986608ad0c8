"""The result in README.md, from result.json and result-again.json: a table per part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import quoted, read, stretch, table

VERDICT = {None: "", True: "yes", False: "**no**"}
HEAD = ("question", "ours", "other", "ratio", "wanted", "note")
#: A heading for each part of the run.
PARTS = {
    "ssd": "SSD",
    "sealed": "Digests and encryption",
    "direct": "O_DIRECT",
    "peer": "A peer's DRAM",
    "load": "Verification of a load",
    "index": "The core's index",
    "recovery": "Recovery",
    "prefetch": "Prefetch beside decoding",
    "peers": "Other stores",
}
#: Notes whose wording in committed results is outdated, by the start of the question.
NOTES = {
    "a session in a peer's DRAM": "includes asking, leasing, making room and notifying the worker; small, so all of that counts"
}


def row(of: Any) -> list[str]:
    if "ratio" in of:
        low, high = of["ratio_range"]
        shown = [
            f"{of['ours']:.3g} {of['unit']}",
            f"{of['other']:.3g} {of['unit']}",
            f"{of['ratio']:.2f} ({low:.2f} to {high:.2f})",
        ]
    else:
        shown = [f"{of['value']:g} {of['unit']}", "", ""]
    limits = [
        f"{word} {of[name]:g}"
        for name, word in (("at_most", "at most"), ("at_least", "at least"))
        if of.get(name) is not None
    ]
    note = next((now for begins, now in NOTES.items() if of["question"].startswith(begins)), of["note"])
    return [
        quoted(of["question"]),
        *shown,
        f"{' '.join(limits)} {VERDICT[of['holds']]}".strip(),
        quoted(note) if note else "",
    ]


def part(name: str, figures: list[Any]) -> str:
    """A part's heading and table, without empty columns; a note that all rows share stands above the table."""
    rows = [row(of) for of in figures]
    notes = {cells[-1] for cells in rows}
    shared = notes.pop() if len(notes) == 1 and len(rows) > 1 else ""
    if shared:
        rows = [[*cells[:-1], ""] for cells in rows]
    kept = [n for n in range(len(HEAD)) if any(cells[n] for cells in rows)]
    shown = table([HEAD[n] for n in kept], [[cells[n] for n in kept] for cells in rows])
    above = f"Each row: {shared}.\n\n" if shared else ""
    return f"### {PARTS[name]}\n\n{above}{shown}"


def ratios(of: Any) -> str:
    return ", ".join(f"{stretch(values, '.2f')} ({quoted(model)})" for model, values in of.items())


def result() -> str:
    found = read(Path(__file__).with_name("result.json"))
    again = read(Path(__file__).with_name("result-again.json"))
    machine, parts = found["machine"], found["parts"]
    tables = "\n\n".join(part(name, of["figures"]) for name, of in parts.items())
    return f"""
`bench/kvstore/run --peers`, {quoted(found["date"][:10])}, {machine["cores"]:.0f} cores of {machine["cpu"]} (`result.json`);
medians and ranges.

Again on a slower machine (`result-again.json`): peer's DRAM to arena {ratios(again["peer"])}; a verified load against an unverified one
{ratios(again["load"])}.

{tables}
"""
