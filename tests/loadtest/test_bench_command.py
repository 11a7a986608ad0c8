"""`upbeat bench` from the trace to the table, against a stand-in for the stack."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from loadtest.cli import bench, compare

HERE = Path(__file__).parent
FIXTURE = HERE / "fixtures" / "generated.jsonl"
LAUNCHER = [sys.executable, str(HERE / "fake_openai_server.py")]


def test_all_policies_get_the_same_sessions_and_only_balanced_sends_hints(tmp_path: Path) -> None:
    text = io.StringIO()
    document = compare(
        trace=FIXTURE,
        policy="recompute,sticky,balanced",
        requests=30,
        time_scale=0.001,
        min_turns=3,
        model=tmp_path,
        max_context_tokens=1000,
        launcher=LAUNCHER,
        console=Console(file=text, width=120),
    )
    assert list(document["policies"]) == ["recompute", "sticky", "balanced"]
    runs = document["policies"].values()
    assert all((run["requests"], run["failed"]) == (30, 0) for run in runs)
    sent = [
        sorted((o["session"], o["turn"], o["planned_s"], o["output_tokens"]) for o in run["outcomes"]) for run in runs
    ]
    assert sent[0] == sent[1] == sent[2]
    assert [run["hints"]["accepted"] for run in runs] == [0, 0, 30]
    assert all(run["ttft_returning_turns_s"]["count"] + run["ttft_first_turns_s"]["count"] == 30 for run in runs)
    assert document["settings"]["seed"] == 1 and document["trace"] == "generated.jsonl"
    assert not document["interrupted"]
    assert "TTFT, returning turns: p95 (s)" in text.getvalue() and "30 requests" in text.getvalue()
    json.dumps(document)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--trace", str(FIXTURE), "--policy", "random"], "unknown policy 'random'"),
        (["--trace", str(FIXTURE), "--min-turns", "99"], "no session of at least 99 turns"),
        (["--trace", str(FIXTURE), "--model", "nowhere"], "no such directory"),
    ],
)
def test_what_cannot_be_run_says_why_in_one_line(arguments: list[str], says: str) -> None:
    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output
