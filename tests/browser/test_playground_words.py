"""The page's first line, which turns it compares, and how far it says a comparison is (gateway/playground), without a
browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
from browser_needs import ROOT, need

SCRIPT = """
const { Turns, point } = await import("data:text/javascript," + encodeURIComponent(process.argv[1]));
const { turns, compared } = JSON.parse(process.argv[2]);
const all = new Turns();
for (const turn of turns) all.add(turn);
const last = turns.at(-1);
console.log(JSON.stringify({ said: point(last, all.like(last), compared), like: all.like(last) }));
"""
PROGRESS = """
const { progress } = await import("data:text/javascript," + encodeURIComponent(process.argv[1]));
console.log(JSON.stringify(progress(...JSON.parse(process.argv[2]))));
"""
COLD: dict[str, Any] = {
    "hinted": False,
    "ttftMs": 312,
    "first": False,
    "added": 20,
    "prompt": 6000,
    "cached": 5952,
    "left": 0.1,
}
TYPED = COLD | {"hinted": True, "ttftMs": 51}


def run_script(script: str, source: str, given: str) -> Any:
    node = need(shutil.which("node"), "node")
    done = subprocess.run(
        [node, "--input-type=module", "-e", script, source, given], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def first_line(*turns: dict[str, Any], compared: bool = False) -> dict[str, Any]:
    source = (ROOT / "gateway" / "playground" / "turns.js").read_text()
    answer: dict[str, Any] = run_script(SCRIPT, source, json.dumps({"turns": turns, "compared": compared}))
    return answer


def test_a_turn_that_was_typed_is_compared_with_those_that_were_not() -> None:
    assert first_line(COLD, TYPED)["said"] == "51 ms instead of 312 ms, because you typed."
    assert first_line(TYPED, COLD)["said"] == "312 ms, because no hint came: with one it is 51 ms."
    assert first_line(TYPED, COLD, compared=True)["said"] == "51 ms instead of 312 ms, because a hint came first."


def test_no_gain_is_said_as_that() -> None:
    assert (
        first_line(COLD | {"ttftMs": 157}, TYPED | {"ttftMs": 186})["said"]
        == "No gain: 186 ms with a hint, 157 ms without."
    )


def test_medians_are_taken_of_the_other_kind_and_of_both_after_a_comparison() -> None:
    others = [COLD | {"ttftMs": ms} for ms in (100, 900, 300)]
    assert first_line(*others, TYPED)["said"].startswith("51 ms instead of 300 ms")
    assert first_line(TYPED | {"ttftMs": 31}, *others, TYPED, compared=True)["said"].startswith(
        "41 ms instead of 300 ms"
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"left": None}, "nobody else spoke since the last turn"),
        ({"left": 0.95}, "nothing of this session ever left HBM"),
        ({"first": True, "cached": 0, "left": None}, "this turn computed 6000 tokens"),
        ({"added": 900, "cached": 5056}, "this turn computed 944 tokens"),
    ],
)
def test_a_turn_that_is_not_alike_says_why_and_counts_for_nothing(change: dict[str, Any], why: str) -> None:
    assert why in first_line(COLD, TYPED | change)["said"]
    assert first_line(TYPED | change, COLD)["like"]["hinted"] is None


def test_turns_of_another_length_are_not_compared() -> None:
    assert "To compare" in first_line(COLD | {"prompt": 3000}, TYPED)["said"]


def test_what_was_computed_from_the_first_token_on_is_told_apart() -> None:
    story = COLD | {"first": True, "added": 6000, "cached": 0, "left": None, "ttftMs": 900}
    assert first_line(story, COLD, TYPED)["like"] == {
        "hinted": {"ms": 51, "count": 1},
        "without": {"ms": 312, "count": 1},
        "anew": {"ms": 900, "count": 1},
    }


@pytest.mark.parametrize(
    ("done", "done_ms", "ms", "said"),
    [
        (0, 0, 90_000, "Round 1 of 10; "),
        (2, 10_000, 0, "Round 3 of 10, about 40 s left; "),
        (2, 10_000, 12_000, "Round 3 of 10, about 30 s left; "),
        (2, 10_000, 500_000, "Round 3 of 10, about 5 s left; "),
        (1, 20_000, 0, "Round 2 of 10, about 3 min left; "),
    ],
)
def test_a_comparison_says_how_far_it_is_and_what_the_rounds_to_come_take_at_the_pace_so_far(
    done: int, done_ms: int, ms: int, said: str
) -> None:
    source = (ROOT / "gateway" / "playground" / "progress.js").read_text()
    assert run_script(PROGRESS, source, json.dumps([done, 10, done_ms, ms])) == said
