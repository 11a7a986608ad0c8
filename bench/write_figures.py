#!/usr/bin/env python3
"""The figures in README.md, docs/evidence.md and bench/*/README.md, from the JSON beside them.

    .venv/bin/python bench/write_figures.py            # rewrite the results in every README (`make figures`)
    .venv/bin/python bench/write_figures.py --check    # list what differs, and numbers without a source; also a test

`result()` of a bench's `report.py` returns the Markdown between `<!-- result -->` and `<!-- end of result -->` of its
README; `bench/report.py` has that of README.md, `bench/evidence.py` that of docs/evidence.md. A bench's result ends
with the commit that was measured, and whether the measured code has changed since (`bench/measured.py`): a change makes
the text wrong until it is measured, or written, again. Numbers from a JSON are `Figure`s, also after arithmetic.
Printed, they leave marks, which are removed before the text is written. Every other number of a README (a setting, an
aim, a published figure) must be in `bench/declared.json`.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DECLARED = ROOT / "bench" / "declared.json"
#: Documents whose result is told elsewhere than in a `report.py` beside them.
_ELSEWHERE = {
    ROOT / "README.md": ROOT / "bench" / "report.py",
    ROOT / "docs" / "evidence.md": ROOT / "bench" / "evidence.py",
}
_WIDTH = 140
BEGIN, END = "<!-- result -->", "<!-- end of result -->"
_OPEN, _CLOSE = "\ue000", "\ue001"
_MARKED = re.compile(f"{_OPEN}[^{_CLOSE}]*{_CLOSE}")
#: A number with the word after it; declared.json lists it in this form.
_NUMBER = re.compile(r"(?<![\w.,/-])[-+]?\d[\d,]*(?:\.\d+)?(?: ?[%A-Za-z]+)?")


class Figure(float):
    """A number that was measured or computed from measured ones."""

    def __format__(self, spec: str) -> str:
        return _OPEN + (float.__format__(self, spec) if spec else f"{float(self):g}") + _CLOSE

    def __str__(self) -> str:
        return format(self, "")

    def _of(operation: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[misc]
        return lambda *of: Figure(operation(*of))

    __add__, __radd__, __sub__, __rsub__ = map(_of, (float.__add__, float.__radd__, float.__sub__, float.__rsub__))
    __mul__, __rmul__, __truediv__, __rtruediv__ = map(
        _of, (float.__mul__, float.__rmul__, float.__truediv__, float.__rtruediv__)
    )
    __round__ = _of(float.__round__)
    __neg__, __abs__ = map(_of, (float.__neg__, float.__abs__))


def read(path: Path) -> Any:
    """Read a committed JSON; its numbers are figures."""
    return json.loads(path.read_text(), parse_float=Figure, parse_int=Figure)


def quoted(text: str) -> str:
    """Mark a text from a JSON, so that its numbers count as figures."""
    return f"{_OPEN}{text}{_CLOSE}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def stretch(values: Sequence[float], spec: str) -> str:
    """`least to most`, or one value if both print alike."""
    least, most = f"{min(values):{spec}}", f"{max(values):{spec}}"
    return least if least == most else f"{least} to {most}"


def readmes() -> list[Path]:
    """README.md, docs/evidence.md and every bench's README."""
    return [*_ELSEWHERE, *sorted(ROOT.glob("bench/*/README.md"))]


def origin(readme: Path) -> str:
    """When, on which code and where the results beside a bench's README were measured; empty for another folder."""
    from measured import measurement, results

    if readme.parent.parent != ROOT / "bench":
        return ""
    folder = readme.parent.relative_to(ROOT).as_posix()
    files: dict[tuple[str, str, str, str], list[str]] = {}
    for path in (path for path in results() if path.startswith(f"{folder}/")):
        of = measurement(path)
        code = "its code has changed since" if of.changed else "its code is unchanged"
        said = f"{'not later than ' if of.brought else ''}`{of.commit}`{', with changes' if of.touched else ''}"
        files.setdefault((of.date, said, of.machine, code), []).append(path.removeprefix(f"{folder}/"))
    told = []
    for (date, said, machine, code), names in sorted(files.items()):
        which = ", ".join(f"`{name}`" for name in names)
        told.append(f"{which} on {date}, {said}{f', on {quoted(machine)}' if machine else ''}: {code}")
    return f"Measured: {'; '.join(told)}." if told else ""


def told(readme: Path) -> str | None:
    """The result of this README with marks; None if it has no report.py."""
    path = _ELSEWHERE.get(readme) or readme.with_name("report.py")
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(f"told_{readme.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.path[:0] = list(sys.path), [str(path.parent), str(ROOT), str(ROOT / "bench")]
    try:
        spec.loader.exec_module(module)
        return f"{str(module.result()).strip()}\n\n{origin(readme)}".strip()
    finally:
        sys.path[:] = before


def plain(marked: str) -> str:
    """The text without marks, with wrapped paragraphs."""
    text = marked.replace(_OPEN, "").replace(_CLOSE, "")
    return "\n\n".join(
        part if part.startswith(("|", "#", "!", "-", "    ")) else _wrapped(part) for part in text.split("\n\n")
    )


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)


def parts(text: str) -> tuple[str, str, str]:
    """(text before the result, the result, text after it)."""
    before, begin, rest = text.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return (before, inside.strip("\n"), after) if begin else (text, "", "")


def numbers(text: str) -> list[str]:
    """The numbers of a text, each with the word after it; without those in code, links and list markers."""
    for pattern in (
        r"^    .*$",
        r"```.*?```",
        r"`[^`\n]*`",
        r"\]\([^)]*\)",
        r"https?://\S+",
        r"^\d+\. ",
        r"\d{4}-\d\d-\d\d",
    ):
        text = re.sub(pattern, " ", text, flags=re.MULTILINE | re.DOTALL if "```" in pattern else re.MULTILINE)
    return [found.rstrip(",") for found in _NUMBER.findall(text)]


def complaints(readme: Path, text: str, marked: str | None, declared: Sequence[str]) -> list[str]:
    """Errors in the figures of a README. marked: the result that follows from its JSON; None if it has no report.py."""
    name = readme.relative_to(ROOT).as_posix()
    before, inside, after = parts(text)
    wrong = []
    if marked is not None and inside != plain(marked):
        lines = difflib.unified_diff(
            inside.splitlines(), plain(marked).splitlines(), "it says", "its JSON says", lineterm="", n=0
        )
        wrong.append(f"{name} is not what its JSON says; `make figures` writes it again:\n" + "\n".join(lines))
    outside = numbers(before) + numbers(after) + (numbers(inside) if marked is None else [])
    loose = outside + numbers(_MARKED.sub(" ", marked or ""))
    wrong += [
        f"{name}: {number!r} comes from no JSON and is not in bench/declared.json"
        for number in loose
        if number not in declared
    ]
    wrong += [f"bench/declared.json: {name} has no {number!r} any more" for number in declared if number not in loose]
    return wrong


def main() -> int:
    declared = json.loads(DECLARED.read_text())
    wrong = []
    for readme in readmes():
        text, marked = readme.read_text(), told(readme)
        if marked is not None and "--check" not in sys.argv:
            before, _, after = parts(text)
            text = f"{before}{BEGIN}\n{plain(marked)}\n{END}{after}"
            readme.write_text(text)
        wrong += complaints(readme, text, marked, declared.get(readme.relative_to(ROOT).as_posix(), []))
    print("\n".join(wrong) or "every figure has its JSON")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
