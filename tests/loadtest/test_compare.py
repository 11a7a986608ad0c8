"""A comparison asks every target the same things in turns, and keeps what was measured whatever happens."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from contracts.errors import ConfigError
from loadtest.compare.cli import compare, watched
from loadtest.compare.load import read_workload
from loadtest.compare.run import Comparison
from loadtest.compare.settings import TargetFile, WorkloadSection, load_target, load_workload, one_workload
from loadtest.compare.summary import interleaved, ratios, summarised
from loadtest.compare.targets import policy_of
from loadtest.html_report import html_report

HERE = Path(__file__).parent
FIXTURE = HERE / "fixtures" / "generated.jsonl"
FAKE = {
    "name": "fake",
    "command": [sys.executable, str(HERE / "fake_openai_server.py"), "up", "--port", "${port}"],
    "ready": "http://127.0.0.1:${port}/ready",
    "serves": "http://127.0.0.1:${port}",
    "ready_s": 60,
}
LOAD = {"trace": str(FIXTURE), "requests": 12, "min_turns": 3, "time_scales": [0.001], "length_scale": 0.02}


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def section(**changed: Any) -> WorkloadSection:
    return WorkloadSection.model_validate(LOAD | changed)


def test_targets_get_the_same_requests_in_turns_and_a_report_says_so() -> None:
    targets = [
        TargetFile.model_validate({"name": "one", "start": [FAKE]}),
        TargetFile.model_validate({"name": "two", "start": [FAKE | {"count": 2}], "balance": "sticky"}),
    ]
    text = io.StringIO()
    made = watched(targets, read_workload(section(time_scales=[0.002, 0.001])), 2, Console(file=text, width=120))
    document = made.document()
    json.dumps(document)
    assert not made.errors and not made.interrupted
    for label in ("times × 0.002", "times × 0.001"):
        runs = {name: target["points"][label]["runs"] for name, target in document["targets"].items()}
        for repeat in (0, 1):
            sent = [
                sorted((o["session"], o["turn"], o["prompt_tokens"]) for o in runs[name][repeat]["outcomes"])
                for name in ("one", "two")
            ]
            assert sent[0] == sent[1] and len(sent[0]) == 12
        words = [sorted(o["prompt_tokens"] for o in runs["one"][repeat]["outcomes"]) for repeat in (0, 1)]
        assert words[0] != words[1], "repeats say other words"
        assert {o["node"] for o in runs["two"][0]["outcomes"]} == {"instance-0", "instance-1"}
    summary = document["targets"]["two"]["points"]["times × 0.001"]
    assert summary["summary"]["requests"] == {"median": 12.0, "min": 12.0, "max": 12.0}
    assert summary["ratios"]["requests"]["median"] == 1.0
    assert "normalised latency, mean (ms)" in text.getvalue() and "times × 0.002" in text.getvalue()
    page = html_report(document, "one & two")
    assert page.startswith("<!doctype html>") and "one &amp; two" in page and "<svg" in page and "polyline" in page
    assert "http-equiv" not in page and "<script" not in page and "src=" not in page, "the report needs nothing else"


def test_a_target_that_does_not_start_is_noted_and_the_others_go_on() -> None:
    broken = [
        {
            "name": "x",
            "command": [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"],
            "ready": "http://127.0.0.1:9",
            "serves": "http://x",
        }
    ]
    targets = [
        TargetFile.model_validate({"name": "broken", "start": broken}),
        TargetFile.model_validate({"name": "works", "start": [FAKE]}),
    ]
    text = io.StringIO()
    made = watched(targets, read_workload(section()), 1, Console(file=text, width=200))
    assert "ended with status 3" in made.errors["broken"] and "no luck" in made.errors["broken"]
    assert made.runs["works"]["times × 0.001"][0]["failed"] == 0
    assert "no luck" in html_report(made.document(), "t")


def test_a_comparison_goes_on_with_what_is_missing() -> None:
    target, load = TargetFile.model_validate({"name": "one", "start": [FAKE]}), read_workload(section())
    told: list[int] = []
    first = watched(
        [target], load, 1, Console(file=io.StringIO()), kept=lambda made: told.append(len(made.runs["one"]))
    )
    run = first.runs["one"]["times × 0.001"][0]
    text = io.StringIO()
    again = Comparison([target], load, 2, {"one": {"times × 0.001": [run]}})
    made = watched([target], load, 2, Console(file=text), before=again)
    found = made.runs["one"]["times × 0.001"]
    assert told == [1] and found[0] is run and [r["repeat"] for r in found] == [0, 1]
    assert "step 2 of 2" in text.getvalue() and "step 1 of 2" not in text.getvalue()


def test_a_target_that_takes_too_long_is_asked_no_more() -> None:
    target = TargetFile.model_validate({"name": "one", "start": [FAKE]})
    load = read_workload(section(time_scales=[0.002, 0.001], give_up_s=1e-6))
    made = watched([target], load, 2, Console(file=io.StringIO()))
    assert not made.errors and not made.interrupted
    assert [run["repeat"] for run in made.runs["one"]["times × 0.002"]] == [0, 1] and "times × 0.001" not in made.runs[
        "one"
    ]


def test_no_turn_begins_when_the_time_is_over() -> None:
    target = TargetFile.model_validate({"name": "one", "start": [FAKE]})
    made = watched([target], read_workload(section()), 2, Console(file=io.StringIO()), seconds=1e-3)
    assert made.interrupted and len(made.runs["one"]["times × 0.001"]) == 1


def test_programs_end_with_the_comparison(tmp_path: Path) -> None:
    target = TargetFile.model_validate({"name": "one", "start": [FAKE]})
    watched([target], read_workload(section()), 1, Console(file=io.StringIO()))
    mine = [p for p in psutil.Process().children(recursive=True) if "fake_openai_server" in " ".join(p.cmdline())]
    assert not mine


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    target = write(tmp_path / "t.yaml", {"start": [FAKE]})
    # Everybody's first turn at once, and the others in an hour.
    load = write(tmp_path / "w.yaml", LOAD | {"time_scales": [0.001, 500.0], "requests": 30})
    out, page = tmp_path / "o.json", tmp_path / "o.html"
    command = [sys.executable, "-c", "import typer; from loadtest.compare.cli import compare; typer.run(compare)"]
    process = subprocess.Popen(
        [*command, str(target), "--workload", str(load), "--out", str(out), "--html", str(page)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        log: list[bytes] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: log.extend(process.stdout or []), daemon=True)
        reader.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not _asked(process.pid):
            time.sleep(0.1)
        time.sleep(3.0)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, b"".join(log).decode()
    finally:
        process.kill()
    document = json.loads(out.read_text())
    assert document["interrupted"]
    points = document["targets"]["t"]["points"]
    assert len(points["times × 0.001"]["runs"][0]["outcomes"]) == 30
    assert "times × 500" not in points or points["times × 500"]["runs"][0]["partial"]
    assert "Cut off" in page.read_text()


def _asked(pid: int) -> bool:
    """Whether its stand-in for a server runs."""
    return any("fake_openai_server" in " ".join(p.cmdline()) for p in psutil.Process(pid).children(recursive=True))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"url": "ftp://x"}, "http://127.0.0.1:8000"),
        ({"url": "http://x", "upbeat": {}}, "has url and upbeat"),
        ({"url": "http://x", "hnits": True}, "hnits = 'True': is no key here"),
        ({"upbeat": {"nodes": 0}}, "upbeat.nodes = '0': Input should be greater than or equal to 1"),
        ({"start": [{"name": "x", "command": ["true"]}]}, "no process of start has serves"),
        (
            {"url": "http://x", "balance": "random"},
            "balance = 'random': Input should be 'round-robin', 'sticky', 'sticky-least-busy' or 'least-busy'",
        ),
        ({"url": "http://x", "workload": {"loop": "closed", "trace": "t"}}, "users are given with loop: closed"),
        (
            {"url": "http://x", "workload": {"begin_within_s": 3, "trace": "t", "length_scale": 1}},
            "begin_within_s is of users in a closed loop",
        ),
        ({"url": "http://x", "workload": {}}, "one of trace, generate and agents; this one has none"),
        ({"url": "http://x", "workload": {"trace": "t"}}, "give length_scale, max_context_tokens or model_directory"),
    ],
)
def test_a_wrong_value_names_file_key_value_and_remedy(tmp_path: Path, data: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "wrong.yaml", data)
    with pytest.raises(ConfigError, match=r"wrong\.yaml") as e:
        load_target(path)
    assert says in str(e.value)


def test_files_that_are_no_targets_say_so(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("[1]")
    (tmp_path / "bad.yaml").write_text("a: [")
    for name, says in (
        ("list.yaml", "must hold a mapping"),
        ("bad.yaml", "is not YAML"),
        ("none.yaml", "No such file"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_target(tmp_path / name)


def test_paths_are_seen_from_their_file_and_names_come_from_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml", {"upbeat": {"model": "m"}, "workload": {"trace": "t.jsonl", "model_directory": "m"}}
    )
    target = load_target(path)
    assert target.name == "mine" and target.upbeat is not None and target.workload is not None
    assert (target.upbeat.model, target.workload.trace, target.workload.model_directory) == (
        tmp_path / "m",
        tmp_path / "t.jsonl",
        tmp_path / "m",
    )
    assert load_workload(path) == target.workload
    assert load_target(write(tmp_path / "u.yaml", {"url": "http://x", "model": "name"})).model == "name"


def test_the_workload_is_the_one_given_or_the_one_agreed_on() -> None:
    one, two = ({"url": "http://x", "workload": LOAD | {"requests": n}} for n in (1, 2))
    a, b, none = (
        TargetFile.model_validate(d | {"name": n}) for n, d in (("a", one), ("b", two), ("c", {"url": "http://x"}))
    )
    assert one_workload([a, none], None) == a.workload
    assert one_workload([a, b], section()) == section()
    with pytest.raises(ConfigError, match="workloads of a and b differ"):
        one_workload([a, b], None)
    with pytest.raises(ConfigError, match="give --workload FILE"):
        one_workload([none], None)


def test_a_policy_is_a_preset_or_a_placement() -> None:
    def found(**upbeat: Any) -> tuple[str, bool, bool]:
        policy = policy_of(TargetFile.model_validate({"upbeat": upbeat}))
        return policy.placement, policy.cache, policy.hints

    assert found() == ("balanced", True, True)
    assert found(policy="recompute") == ("balanced", False, False)
    assert found(policy="balanced", hints=False) == ("balanced", True, False)
    assert found(policy="round-robin") == ("round-robin", True, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"trace": None, "generate": {"sessions": 30, "burstiness": 0.3, "lengths": "zipf"}},
        {"trace": None, "agents": {"projects": 3, "files": 2}},
        {"prefill_heavy": {"prompt_tokens": 300}, "length_scale": 1.0},
        {
            "requests": 60,
            "min_turns": 1,
            "urgent": 0.5,
            "tenants": {"a": 1, "b": 3},
            "models": {"x": 1, "y": 1},
            "hints": {"missed": 0.5, "spurious": 0.5},
        },
        {"loop": "closed", "users": [2, 3]},
        {"loop": "closed", "users": [2, 3], "begin_within_s": 7.5},
        {"loop": "closed", "users": [2, 3], "requests_per_user": 3, "requests": 60},
    ],
)
def test_every_kind_of_workload_becomes_a_plan_that_its_seed_fixes(changed: dict[str, Any]) -> None:
    load = read_workload(section(**changed))
    point = load.points[0]
    assert load.plan(point, 1) == read_workload(section(**changed)).plan(point, 1) != load.plan(point, 2)
    turns = [t for s in load.plan(point) for t in s.turns]
    assert turns and all(t.says[-1]["content"] and t.answer_tokens for t in turns)
    if "urgent" in changed:
        sessions = load.plan(point)
        assert {s.tenant for s in sessions} == {"a", "b"} and {s.model for s in sessions} == {"x", "y"}
        assert {s.priority for s in sessions} == {0, -1} and any(t.hint is None for t in turns)
    if "prefill_heavy" in changed:
        assert {len(t.text.split()) for t in turns} == {300} and {t.answer_tokens for t in turns} == {2}
    if "requests_per_user" in changed:
        held = [load.plan(p) for p in load.points]
        assert [sum(len(s.turns) for s in sessions) >= 3 * n for sessions, n in zip(held, (2, 3), strict=True)] == [
            True,
            True,
        ]
        assert len(held[0]) < len(held[1]) <= len(load.sessions)
    if "begin_within_s" in changed:
        assert load.loop(point).spread_s == 7.5
    elif "users" in changed:
        assert load.loop(point).spread_s == 10.0 * point.time_scale
    if "users" in changed:
        assert [p.label for p in load.points] == ["2 users", "3 users"]


def test_medians_spread_and_ratios_are_of_runs_of_one_repeat() -> None:
    def run(repeat: int, ttft_s: float) -> dict[str, Any]:
        return {"repeat": repeat, "ttft_s": {"mean": ttft_s}, "failed": 0}

    base, other = [run(0, 1.0), run(1, 4.0), run(2, 2.0)], [run(0, 2.0), run(1, 4.0), run(2, 8.0)]
    assert summarised(base)["TTFT, mean"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert ratios(base, other)["TTFT, mean"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert "failed" not in ratios(base, other), "nothing is a multiple of none"


def test_every_repeat_has_every_target_once_and_begins_with_another() -> None:
    assert interleaved(["a", "b", "c"], 2) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert interleaved([], 2) == []


def test_the_command_ends_with_a_status_that_says_what_went_wrong(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(compare)
    target = write(tmp_path / "t.yaml", {"url": "http://127.0.0.1:9", "model": "m", "workload": LOAD})
    wrong = CliRunner().invoke(app, [str(write(tmp_path / "w.yaml", {"url": 1}))])
    assert wrong.exit_code == 2 and "w.yaml" in wrong.output and "Traceback" not in wrong.output
    twice = CliRunner().invoke(app, [str(target), str(target)])
    assert twice.exit_code == 2 and "two targets are called 't'" in twice.output
    silent = CliRunner().invoke(app, [str(target), "--json"])
    assert silent.exit_code == 1
    missing = CliRunner().invoke(
        app, [str(write(tmp_path / "n.yaml", {"url": "http://x", "workload": LOAD | {"trace": "none"}}))]
    )
    assert missing.exit_code == 1 and "none" in missing.output
