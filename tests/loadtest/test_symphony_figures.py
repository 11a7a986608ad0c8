"""bench/symphony: the loads are what they are said to be, curves are read right, and every figure draws what its data
says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.symphony import loads, pictures, real
from bench.symphony.curves import at_equal, crossings
from bench.symphony.figures import FIGURES, Load, figure_5
from bench.symphony.figures import Bench as Settings
from loadtest.simulate.cells import Cell
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.fleet import Variant

RESULTS = Path(__file__).parents[2] / "bench" / "symphony" / "results"


class Small(Settings):
    """Every run with so few users, for so short a time, on two nodes, that a figure takes a moment."""

    seconds = (40.0, 20.0)

    def run(self, kind: NodeKind, users: int, variant: Variant, load: Load | None = None, **more: Any) -> Cell:
        return super().run(kind, 24, variant, load, **(more | {"nodes": 2, "span_s": self.seconds}))

    def on_gpus(self, found: Cell, span_s: tuple[float, float] | None = None) -> Any:
        return super().on_gpus(found, self.seconds)


def row(system: str, users: int, seconds: float) -> dict[str, object]:
    return {"system": system, "users": users, "tpot_s": seconds, "normalised_s": seconds}


def test_conversations_are_as_published() -> None:
    found = figure_5(Settings(True, 1, lambda line: None))
    assert found["multi_turn_share"] == pytest.approx(0.734, abs=0.04)
    assert found["mean_turns"] == pytest.approx(5.75, rel=0.15)
    assert found["mean_session_tokens"] == pytest.approx(2200, rel=0.15)
    shares = [r["wasted_share"] for r in found["rows"]]
    assert shares[0] == 0.0 and shares[2] > 0.5 and shares[7] > shares[2]


def test_everybody_has_enough_to_say_and_the_same_for_every_system() -> None:
    said = loads.sharegpt_like(5, 300.0, 20_000, seed=3, urgent=0.5)
    assert (
        said
        == loads.sharegpt_like(5, 300.0, 20_000, seed=3, urgent=0.5)
        != loads.sharegpt_like(5, 300.0, 20_000, seed=4, urgent=0.5)
    )
    for person in range(5):
        assert sum(loads._least_s(t) for s in said[person::5] for t in s.turns) > 300.0
    assert {s.priority for s in said} == {-1, 0}
    assert all(sum(t.new_tokens + t.answer_tokens for t in s.turns) <= 20_000 for s in said)
    assert {(t.new_tokens, t.answer_tokens) for s in loads.prefill_heavy(2, 60.0, 20_000, 1) for t in s.turns[1:]} == {
        (1024, 1)
    }


def test_a_person_is_met_in_the_middle_of_a_conversation() -> None:
    rng = random.Random(1)
    firsts = [loads.in_the_middle(rng, loads.chat_turn, 50_000)[0].new_tokens for _ in range(300)]
    assert sum(firsts) / len(firsts) > 5 * loads.PROMPT_TOKENS


def test_crossings_and_equal_points_by_hand() -> None:
    rows = [
        row("infercept", 10, 1.0),
        row("infercept", 20, 4.0),
        row("balanced", 10, 2.0),
        row("balanced", 20, 3.0),
        row("balanced", 40, 5.0),
    ]
    (turn,) = crossings([r for r in rows if r["users"] != 40])
    assert turn == {"between_users": [10, 20], "faster_after": "balanced", "faster_before": "infercept"}
    (equal,) = at_equal(rows)
    assert (equal["users"], equal["ours"], equal["at_least"]) == (20, 30, False)


@pytest.mark.parametrize("name", ["1", "1-busy", "14", "15", "20", "21"])  # the others are curves like 14
def test_a_figure_runs(name: str) -> None:
    said: list[str] = []
    found = FIGURES[name](Small(True, 1, said.append))
    assert said and json.loads(json.dumps(found))
    if name in ("1", "1-busy", "15"):
        assert all(len(its.get("most", its.get("each_gpu_mean"))) == 2 for its in found["systems"].values())


@pytest.mark.parametrize(
    "name", sorted({p.stem.removeprefix("figure-") for p in RESULTS.glob("figure-*.json")} - {"11", "13", "17"})
)
def test_a_figure_that_was_run_can_be_drawn(name: str, tmp_path: Path) -> None:
    # 11 and 13 are drawn as 12, 17 as 14
    assert set(pictures.DRAWN) == {name.removesuffix("-busy") for name in FIGURES}
    pictures.draw(
        name, json.loads((RESULTS / f"figure-{name}.json").read_text()), tmp_path / "figure.png", dots_per_inch=40
    )
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_for_real_is_read_from_other_benches() -> None:
    assert {p.name for p in real.BENCH.iterdir()} >= set(real.SHOWN)
    assert len(real.table().rows) == len(real.SHOWN)


def test_the_report_has_figures_of_busy_users_as_soon_as_they_were_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parents[1]))
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import report_busy
    import report_tables

    monkeypatch.setattr(report_tables, "HERE", tmp_path)
    assert report_busy.busy() == ""
    (tmp_path / "results").mkdir()
    for number in (1, 11, 12, 15, 17):
        copied = tmp_path / "results" / f"figure-{number}-busy.json"
        copied.write_text((RESULTS / f"figure-{number}.json").read_text())
        assert f"![figure {number}](pictures/figure-{number}-busy.png)" in report_busy.busy()
    assert report_busy.busy().count("| --- |") >= 4, "a table of each but figure 1"
