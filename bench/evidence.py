"""The claims of docs/evidence.md, each with its figure, interval, source, command and verdict, and their picture.

.venv/bin/python bench/evidence.py       # draws docs/evidence.svg again (`make figures` does)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from claim import Claim
from claimed import GROUPS, claims
from intervals import Estimate, holds
from measured import Measurement, measurement
from write_figures import ROOT, Figure, quoted, read, table

PICTURE = ROOT / "docs" / "evidence.svg"
_VERDICT = {True: "holds", False: "**refuted**", None: "**not decided**"}
_COLOUR = {True: "#009E73", False: "#D55E00", None: "#777777"}
_ROW, _LABEL, _PLOT = 26, 470, 420


def figure(claim: Claim) -> tuple[Estimate, Measurement]:
    """The claim's figure in the committed result, and where that comes from."""
    path = f"bench/{claim.result}"
    document = read(ROOT / path)
    return claim.of(document), measurement(path, document)


def result() -> str:
    """All groups: a table of what was found, and a list of where it comes from and what would refute it."""
    found = {claim: figure(claim) for claim in claims()}
    parts, numbered = [_counts(found)], {claim: number for number, claim in enumerate(found, 1)}
    for title, group in ((title, group) for title, group in GROUPS.items() if group):
        rows, sources = [], dict[tuple[str, str], list[Claim]]()
        for claim in group:
            of, _ = found[claim]
            cells = claim.says, _shown(of), of.samples, _bound(claim), _VERDICT[_holds(claim, of)]
            rows.append((quoted(str(numbered[claim])), *map(quoted, cells)))
            sources.setdefault((claim.command, claim.result), []).append(claim)
        told = [_source([numbered[c] for c in of], of, found[of[0]][1]) for of in sources.values()]
        parts += [f"### {title}", table(("", "claim", "found", "samples", "refuted if", ""), rows), "\n".join(told)]
    return "\n\n".join(parts)


def _holds(claim: Claim, of: Estimate) -> bool | None:
    return holds(of, claim.bound, below=claim.below)


def _counts(found: Mapping[Claim, tuple[Estimate, Measurement]]) -> str:
    said = [_holds(claim, of) for claim, (of, _) in found.items()]
    old = [source for _, source in found.values() if not source.current]
    count = {name: Figure(said.count(value)) for name, value in (("hold", True), ("refuted", False), ("open", None))}
    return (
        f"Of {Figure(len(said)):.0f} claims, {count['hold']:.0f} hold, {count['refuted']:.0f} refuted, and "
        f"{count['open']:.0f} are not decided by what was measured. For {Figure(len(old)):.0f} of them the measured "
        "code has changed since: those say what was true of the commit that they name."
    )


def _shown(of: Estimate) -> str:
    spec = ".4f" if of.samples.endswith("answers") else ".2f"
    return f"{of.value:{spec}} ({of.low:{spec}} to {of.high:{spec}}{'' if of.decides else ', range'})"


def _bound(claim: Claim) -> str:
    return f"{'≥' if claim.below else '≤'} {claim.bound:g}"


def _source(numbers: list[int], of: list[Claim], source: Measurement) -> str:
    """A list item on the result of some claims; `write_figures` does not wrap it."""
    claim = of[0]
    code = "the same code" if source.current else "**older code**"
    said = f"{'not later than ' if source.brought else ''}`{source.commit}`{' with changes' if source.touched else ''}"
    parts = [
        f"`{claim.command}`, about {claim.minutes} minutes",
        *([f"needs {claim.needs}"] if claim.needs else []),
        f"`bench/{claim.result}`, {source.date}, {said}, {source.machine or 'machine not recorded'}, {code}",
        *dict.fromkeys(claim.note.removesuffix(".") for claim in of if claim.note),
    ]
    return quoted(f"- {', '.join(map(str, numbers))}: " + ";\n  ".join(parts) + ".")


def draw() -> str:
    """A picture of all ratios with their intervals, on a logarithmic axis, and the bounds."""
    found = [(claim, *figure(claim)) for claim in claims()]
    rows = [(number, c, of) for number, (c, of, _) in enumerate(found, 1) if not of.samples.endswith("answers")]
    low = min(min(of.low, c.bound) for _, c, of in rows)
    high = max(max(of.high, c.bound) for _, c, of in rows)

    def x(value: float) -> float:
        return _LABEL + _PLOT * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))

    height = _ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LABEL + _PLOT + 30} {height}"',
        '  font-family="sans-serif" font-size="11">',
        "<title>Ratios with their intervals; a bar is the bound that would refute the claim</title>",
    ]
    for value in (v for v in (0.03, 0.1, 0.3, 1, 3, 10, 30) if low <= v <= high):
        lines.append(f'<path d="M{x(value):.1f} {_ROW / 2}V{height - _ROW}" stroke="#dddddd"/>')
        lines.append(f'<text x="{x(value):.1f}" y="{height - 8}" text-anchor="middle">{value:g}</text>')
    for at, (number, claim, of) in enumerate(rows, 1):
        y, colour = _ROW * at, _COLOUR[_holds(claim, of)]
        says = claim.says if len(claim.says) <= 74 else claim.says[:72].rsplit(" ", 1)[0] + " …"
        lines.append(f'<text x="8" y="{y + 4}">{number}. {escape(says)}</text>')
        lines.append(f'<path d="M{x(claim.bound):.1f} {y - 8}v16" stroke="#000000"/>')
        dash = "" if of.decides else ' stroke-dasharray="3 3"'
        lines.append(f'<path d="M{x(of.low):.1f} {y}H{x(of.high):.1f}" stroke="{colour}" stroke-width="2"{dash}/>')
        lines.append(f'<circle cx="{x(of.value):.1f}" cy="{y}" r="4" fill="{colour}"/>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE.relative_to(ROOT))
