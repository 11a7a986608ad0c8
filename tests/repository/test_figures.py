"""Every number of README.md and bench/*/README.md follows from a committed JSON, or is declared to be none of ours
(bench/write_figures.py)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import write_figures

ROOT = write_figures.ROOT
DECLARED = json.loads(write_figures.DECLARED.read_text())
READMES = {path.relative_to(ROOT).as_posix(): path for path in write_figures.readmes()}
BENCHES = [name for name in READMES if name.startswith("bench/")]
TRACED = ROOT / "bench" / "policies" / "README.md"


def wrong(readme: Path, text: str, marked: str | None = None) -> list[str]:
    """What is said against a README with this text."""
    name = readme.relative_to(ROOT).as_posix()
    return write_figures.complaints(
        readme, text, write_figures.told(readme) if marked is None else marked, DECLARED.get(name, [])
    )


@pytest.mark.parametrize("name", READMES)
def test_every_number_follows_from_a_json_or_is_declared(name: str) -> None:
    found = wrong(READMES[name], READMES[name].read_text())
    assert not found, "\n".join(found)


def test_what_a_figure_comes_from_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "bench", "models/demo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        committed = set(listed.stdout.split())
        assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("bench/*/*.json")} <= committed


def test_a_changed_number_of_a_result_is_named() -> None:
    row, changed = (f"| returning turns, mean | 0.343 s | 0.085 s | {value} s |" for value in ("0.064", "0.054"))
    text = TRACED.read_text()
    assert row in text
    (said,) = wrong(TRACED, text.replace(row, changed))
    assert f"-{changed}" in said and f"+{row}" in said


def test_a_number_in_prose_outside_the_result_is_named() -> None:
    assert wrong(TRACED, TRACED.read_text() + "\nIt is 2.6 x as fast.\n") == [
        "bench/policies/README.md: '2.6 x' comes from no JSON and is not in bench/declared.json"
    ]


def test_a_number_that_is_written_into_a_result_by_hand_is_named() -> None:
    marked = f"{write_figures.told(TRACED)}\n\nThat is 2.6 x as fast."
    before, _, after = write_figures.parts(TRACED.read_text())
    text = f"{before}{write_figures.BEGIN}\n{write_figures.plain(marked)}\n{write_figures.END}{after}"
    assert wrong(TRACED, text, marked) == [
        "bench/policies/README.md: '2.6 x' comes from no JSON and is not in bench/declared.json"
    ]


def test_a_changed_json_is_seen(tmp_path: Path) -> None:
    """The number moves with it, also through a ratio."""
    for name in ("report.py", "README.md", "result.json"):
        (tmp_path / name).write_text((TRACED.parent / name).read_text())
    document = json.loads((tmp_path / "result.json").read_text())
    document["policies"]["balanced"]["ttft_first_turns_s"]["mean"] *= 1.5
    (tmp_path / "result.json").write_text(json.dumps(document))
    told = write_figures.told(tmp_path / "README.md")
    assert told is not None
    lines = [line for line in write_figures.plain(told).splitlines() if line not in TRACED.read_text().splitlines()]
    assert any("| first turns, mean |" in line and "0.464 s" in line for line in lines) and any(
        "63 % over" in line for line in lines
    )


def test_a_figure_remains_one_in_arithmetic() -> None:
    a, b = write_figures.Figure(3), write_figures.Figure(2)
    for value in (
        a / b,
        1 / a,
        100 * (1 - a / b),
        -a,
        abs(a),
        round(a, 1),
        min(a, b),
        max([a, b]),
        sum([a, b]),
        a + 1,
        2 - b,
    ):
        assert write_figures.numbers(write_figures._MARKED.sub(" ", f"{value:.1f} s")) == [], value
    assert write_figures.numbers("but 1.5 s is none") == ["1.5 s"]


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_says_its_question_its_command_and_its_result(name: str) -> None:
    text = READMES[name].read_text()
    assert re.search(r"\A# [^\n]*\?$|^The question: ", text, re.MULTILINE), "no question"
    assert f"    {Path(name).parent.as_posix()}/run" in text, "no command"
    _, inside, _ = write_figures.parts(text)
    assert inside or re.search("not measured yet|never been run", text, re.IGNORECASE), "no result"
    answer, _, looks = inside.partition("\n### Quick looks\n")
    assert "--quick" not in answer, "a quick look is no result"
    assert "**" not in looks, "a quick look is no headline"
    assert not re.search(r"^\|.*normalised", inside, re.MULTILINE), (
        "a latency over the tokens of short answers says little"
    )


@pytest.mark.parametrize("name", READMES)
def test_a_production_trace_is_named_with_its_scale_in_the_same_line(name: str) -> None:
    for line in READMES[name].read_text().splitlines():
        if "production trace" in line:
            assert re.search(r"lengths × 0\.\d+, times × 0\.\d+, conversations of three turns and more", line), line
