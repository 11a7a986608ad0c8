"""bench/matched: every target has the same requests, a lost one is no figure, and intervals decide."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from loadtest.compare.cli import watched
from loadtest.compare.load import read_workload
from loadtest.compare.settings import TargetFile

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "matched"))

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import claimed
import fixed_set
import intervals
import matching
import router
import tuning
import write_figures
from matching import CLAIMED, Draws, figures, interval, verdicts

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "DRAWS", 200)


FAKE = {
    "name": "fake",
    "command": [sys.executable, str(HERE / "fake_openai_server.py"), "up", "--port", "${port}"],
    "ready": "http://127.0.0.1:${port}/ready",
    "serves": "http://127.0.0.1:${port}",
    "ready_s": 60,
}


def row(repeat: int, session: str, turn: int, seconds: float, error: str | None = None) -> dict[str, Any]:
    """A request of eleven tokens that takes `seconds`, half of them to the first."""
    times = {"sent_s": 10.0 * turn, "ttft_s": seconds / 2, "end_s": 10.0 * turn + seconds}
    return {"repeat": repeat, "session": session, "turn": turn, "output_tokens": 11, "error": error} | times


def rows(times: float, repeats: int = 5, seed: int = 1) -> list[dict[str, Any]]:
    """Twenty conversations of three turns in each repeat, `times` as slow as with one."""
    chance = np.random.default_rng(seed)
    return [
        row(repeat, f"c{n}", turn, times * float(chance.uniform(0.5, 2)))
        for repeat in range(repeats)
        for n in range(20)
        for turn in range(3)
    ]


def found(**targets: list[dict[str, Any]]) -> dict[str, Any]:
    planned = {matching.key_of(r) for r in next(iter(targets.values()))}
    return figures(targets, planned, "ours", seed=1)


def test_a_ratio_of_matched_requests_has_a_narrow_interval_though_requests_differ_much() -> None:
    of = found(ours=rows(1.0), theirs=rows(1.25))
    ratio = of["theirs"]["ours_over_it"]["end to end, mean"]
    assert ratio["value"] == 0.8 and ratio["interval"] == [0.8, 0.8], "the same draw for both"
    low, high = of["ours"]["figures"]["end to end, mean"]["interval"]
    assert low < of["ours"]["figures"]["end to end, mean"]["value"] < high
    assert {v["verdict"] for v in verdicts(of, "ours", ["theirs"])} == {"ahead"}
    assert {v["verdict"] for v in verdicts(found(ours=rows(1.25), theirs=rows(1.0)), "ours", ["theirs"])} == {"behind"}


def test_an_interval_around_one_and_too_few_repeats_decide_nothing() -> None:
    alike = found(ours=rows(1.0, seed=1), theirs=rows(1.0, seed=2))
    assert {v["verdict"] for v in verdicts(alike, "ours", ["theirs"])} == {"undecided"}
    few = found(ours=rows(1.0, repeats=4), theirs=rows(2.0, repeats=4))
    assert {v["verdict"] for v in verdicts(few, "ours", ["theirs"])} == {"undecided"}


def test_the_peer_that_is_best_in_a_figure_is_the_one_of_its_verdict() -> None:
    slow_starts = [r | {"ttft_s": r["ttft_s"] * 1.9} for r in rows(1.0)]
    of = found(ours=rows(2.0), slow_starts=slow_starts, slow=rows(1.5))
    chosen = {v["metric"]: v["peer"] for v in verdicts(of, "ours", ["slow_starts", "slow"])}
    assert chosen["end to end, mean"] == "slow_starts" and chosen["TTFT, mean"] == "slow"


def test_a_target_that_lost_or_failed_a_request_has_no_figures() -> None:
    lost, failed = rows(0.1)[:-1], [*rows(0.1)[:-1], row(4, "c19", 2, 0.1, "HTTP 500")]
    of = found(ours=rows(1.0), lost=lost, failed=failed)
    assert of["lost"] == {"error": "1 of 300 requests have no answer: not sent"}
    assert of["failed"] == {"error": "1 of 300 requests have no answer: HTTP 500"}
    assert [v["verdict"] for v in verdicts(of, "ours", ["lost", "failed"])] == ["not measured"] * len(CLAIMED)


def test_draws_take_whole_conversations() -> None:
    keys = sorted((repeat, session, turn) for repeat in (0, 1) for session in ("a", "b") for turn in (0, 1, 2))
    for at in Draws(keys, seed=3, count=50).indices:
        drawn = [keys[i] for i in at]
        for repeat, session, _ in drawn:
            turns = [t for r, s, t in drawn if (r, s) == (repeat, session)]
            assert turns.count(0) == turns.count(1) == turns.count(2)


def test_the_interval_of_a_mean_is_about_two_standard_errors_wide() -> None:
    chance = np.random.default_rng(5)
    values = [row(0, f"c{n}", 0, float(v)) for n, v in enumerate(chance.normal(10, 1, 400))]
    _, drawn = Draws([matching.key_of(r) for r in values], seed=1, count=1000).of(matching.METRICS[0], values)
    low, high = interval(drawn)
    assert 0.15 < high - low < 0.25


def test_first_and_returning_turns_and_several_objectives_are_apart() -> None:
    of = found(ours=[row(0, "a", turn, 4.0 if turn == 0 else 1.0) for turn in range(4)])["ours"]
    value = {name: f["value"] for name, f in of["figures"].items()}
    assert value["TTFT of first turns, mean"] == 2.0 and value["TTFT of returning turns, p95"] == 0.5
    assert of["attainment"]["TTFT 1 s, TPOT 0.05 s"] == 0.75 and of["attainment"]["TTFT 5 s, TPOT 0.2 s"] == 1.0
    assert of["output tokens/s"] == [round(44 / 31, 3)]


def test_every_setting_is_searched_with_the_others_at_their_best() -> None:
    best = tuning.Choice(256, instances=1)
    assert tuning.next_choices("batched_tokens", (128, 256), best) == [tuning.Choice(128, instances=1), best]
    assert tuning.next_choices("balance", ("sticky", "least-busy"), best) == [best], "one server has no balance"
    measured = {tuning.Choice(128): {"a": 1.0, "b": 5.0}, best: {"a": 2.0, "b": 9.0}, tuning.Choice(9): {}}
    assert tuning.best_by_metric(measured, {"a": True, "b": False}) == {"a": tuning.Choice(128), "b": best}
    names = {
        f"{name} {tuning.Choice(b, s, i, balance).label}"
        for name in tuning.PEERS
        for b in tuning.SWEPT["batched_tokens"]
        for s in tuning.SWEPT["sequences"]
        for i in tuning.SWEPT["instances"]
        for balance in tuning.swept(name)["balance"]
    }
    assert len(names) == 30 * (3 * 3 + 2 * 4) and max(map(len, names)) <= 48, "names of targets"


def test_a_router_serves_instead_of_the_servers_behind_it() -> None:
    server = {"name": "vllm", "count": 2, "command": ["serve"], "serves": "http://127.0.0.1:${port}"}
    given = {
        "start": [{"name": "lmcache", "command": ["keep"]}, server],
        "balance": "sticky",
        "versions": {"vllm": "1"},
    }
    made = TargetFile(**router.before(given, "cache_aware", python=Path("python")))
    assert [(each.name, bool(each.serves)) for each in made.start] == [
        ("lmcache", False),
        ("vllm", False),
        ("router", True),
    ]
    at = made.start[-1].command.index("--worker-urls")
    assert made.start[-1].command[at + 1 :] == [f"http://127.0.0.1:${{port_vllm_{n}}}" for n in range(2)]
    assert server["serves"] and tuning.first_choice("vllm-router").balance in tuning.swept("vllm-router")["balance"]
    assert tuning.first_choice("vllm").balance in tuning.swept("vllm")["balance"] == tuning.SWEPT["balance"]


def test_a_comparison_leaves_every_request_of_the_fixed_set(tmp_path: Path) -> None:
    given = fixed_set.section(HERE / "fixtures" / "generated.jsonl", 12, [40.0, 80.0], 600, None, 1)
    load = read_workload(given)
    assert [round(fixed_set.natural_rate(load) / scale) for scale in given.time_scales] == [40, 80]
    targets = [
        TargetFile.model_validate({"name": name, "start": [FAKE]}) for name in ("ours", "peer b512 s0 2x sticky")
    ]
    made = watched(targets, load, 2, Console(file=io.StringIO()))
    of = fixed_set.loads(made, "ours", ["peer b512 s0 2x sticky"])
    assert list(of) == [point.label for point in load.points]
    for each in of.values():
        assert each["repeats"] == 2 and each["targets"]["ours"]["requests"] == 24 and len(each["verdicts"]) == 4
        assert {verdict["verdict"] for verdict in each["verdicts"]} == {"undecided"}
    path = tmp_path / "outcomes.csv.gz"
    assert fixed_set.write_outcomes(path, made) == 2 * 2 * 24
    before = path.read_bytes()
    lines = list(csv.DictReader(io.StringIO(gzip.decompress(before).decode())))
    assert len(lines) == 96 and {line["target"] for line in lines} == {target.name for target in targets}
    assert all(float(line["end_s"]) >= float(line["sent_s"]) and line["error"] == "" for line in lines)
    fixed_set.write_outcomes(path, made)
    assert path.read_bytes() == before


def test_a_verdict_is_a_claim_that_its_interval_decides() -> None:
    of = found(ours=rows(1.0), peer=rows(1.25))
    document = {"loads": {"x": {"targets": of, "verdicts": verdicts(of, "ours", ["peer"])}}}
    for ratio in (claimed.matched("TTFT, p95", "x")(document), claimed.matched("TTFT, p95", "x", "peer")(document)):
        assert ratio == intervals.Estimate(0.8, 0.8, 0.8, "300 requests, 5 repeats", decides=True)
    few = found(ours=rows(1.0, repeats=4), peer=rows(1.25, repeats=4))
    document = {"loads": {"x": {"targets": few, "verdicts": verdicts(few, "ours", ["peer"])}}}
    assert intervals.holds(claimed.matched("TTFT, mean", "x")(document), 1.0, below=True) is None


def test_a_readme_tells_values_intervals_verdicts_and_settings_without_a_loose_number(tmp_path: Path) -> None:
    of = found(ours=rows(1.0), **{"vllm b512 s0 2x sticky": rows(1.25), "broken": rows(1.0)[:-1]})
    load = {"source": "x.jsonl", "time_scales": [2.5], "length_scale": 0.031, "requests": 60, "sessions": 20, "seed": 1}
    one = {"requests_per_s": 0.5, "targets": of, "verdicts": verdicts(of, "ours", ["vllm b512 s0 2x sticky", "broken"])}
    document = {
        "load": load,
        "loads": {"times × 2.5": one},
        "settings": {"repeats": 5},
        "tuned_on": {"source": "generated", "seed": 7},
    }
    best = {"vllm": {CLAIMED[0]: {"batched_tokens": 512, "sequences": 0, "instances": 2, "balance": "sticky"}}}
    tuned = {"found": {"vllm": [{}, {}]}, "best": best | {"upbeat-vllm": {"batched_tokens": 256}}}
    for name, data in (("result.json", document), ("tuned.json", tuned)):
        (tmp_path / name).write_text(json.dumps(data))
    (tmp_path / "report.py").write_text((HERE.parents[1] / "bench" / "matched" / "report.py").read_text())
    marked = write_figures.told(tmp_path / "README.md")
    assert marked is not None
    text = write_figures.plain(marked)
    assert write_figures.numbers(write_figures._MARKED.sub(" ", marked)) == []
    assert "| 0.5 requests/s | end to end, mean | `vllm b512 s0 2x sticky` | 0.80 (0.80 to 0.80) | ahead |" in text
    assert (
        "| `broken` | failed |" in text
        and "lengths × 0.031, times × 2.5, conversations of three turns and more" in text
    )
