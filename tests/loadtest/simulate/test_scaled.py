"""A simulated fleet that a policy grows and shrinks: what it pays, what it loses, and what is printed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.main import commands
from contracts.ids import SessionKey
from loadtest.figures import Slo
from loadtest.simulate import scale_cli
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.scale_report import node_seconds, stretch_s, stretches, whole
from loadtest.simulate.scaled import Ran, ScaledRun, run_scaled
from loadtest.simulate.users import Script, ScriptedTurn
from scheduler.core.scale_policy import Policy

TRACE = Path(__file__).parents[1] / "fixtures" / "generated.jsonl"
SLO = Slo(2.0, 0.05)
#: Without an SLO: it is missed while nodes start, and would keep them for five minutes.
POLICY = Policy(min_nodes=1, max_nodes=3, up_window_s=0.0, down_window_s=30.0, down_step_s=10.0, slo=0.0)
#: Its DRAM holds all conversations, so that the policy may take nodes away.
KIND = replace(PRESETS["a100-llama-3.1-8b"], dram_bytes=240e9)
RUN = ScaledRun(KIND, 1, POLICY, SLO, startup_s=20.0, pieces=(1, 1024))


def wave() -> list[Script]:
    """A rush of long prompts for a minute, then one turn of each conversation now and then."""
    return [
        Script(
            SessionKey("t", f"s{n}"),
            (ScriptedTurn(16_000, 16, 0.1, n * 1.0), ScriptedTurn(1_000, 16, 0.1, 200.0 + 3.0 * n)),
        )
        for n in range(60)
    ]


@pytest.fixture(scope="module")
def ran() -> Ran:
    return run_scaled(RUN, wave())


def test_the_fleet_grows_with_the_load_shrinks_after_it_and_loses_no_turn(ran: Ran) -> None:
    sizes = [nodes for _, nodes in ran.fleet.paid]
    assert sizes[0] == 1 and max(sizes) == 3 and len(ran.fleet.nodes) < 3, sizes
    assert len(ran.requests) == 120 and all(r.end_s >= r.first_s >= r.sent_s for r in ran.requests)
    assert {r.node for r in ran.requests} >= {"node-0", "node-1", "node-2"}
    ordered_s = next(at_s for at_s, nodes in ran.fleet.paid if nodes > 1)
    first = min(r.sent_s for r in ran.requests if r.node == "node-1")
    assert first >= ordered_s + RUN.startup_s


def test_sessions_of_a_node_that_left_move(ran: Ran) -> None:
    moved, left = ran.fleet.moves.at_s, ran.fleet.moves.left_at_s
    assert 0 < len(left) <= len(moved) and sorted(moved) == moved
    assert {r.node for r in ran.requests if r.sent_s >= left[-1]} <= set(ran.fleet.nodes)


def test_equal_runs_are_equal(ran: Ran) -> None:
    short = [replace(script, turns=script.turns[:1]) for script in wave()[:20]]
    one, other = run_scaled(RUN, short), run_scaled(RUN, short)
    assert [(r.node, r.end_s) for r in one.requests] == [(r.node, r.end_s) for r in other.requests]
    assert one.fleet.looks == other.fleet.looks


def test_stretches_add_up_to_the_whole(ran: Ran) -> None:
    length_s = stretch_s(ran.until_s)
    parts, total = stretches(ran, SLO, ran.until_s, length_s), whole(ran, SLO, ran.until_s)
    assert sum(part["requests"] for part in parts) == total["requests"] == 120
    assert sum(part["caches_moved"] for part in parts) == total["caches_moved"]
    hours = sum(part["nodes"] * (part["end_s"] - part["begin_s"]) for part in parts) / 3600
    assert hours == pytest.approx(total["node_hours"], rel=0.01)
    assert all(before["end_s"] == after["begin_s"] for before, after in pairwise(parts))
    assert total["unfinished"] == 0


def test_nodes_are_paid_for_between_changes() -> None:
    paid = [(0.0, 1), (10.0, 3), (20.0, 2)]
    assert node_seconds(paid, 0.0, 30.0) == 10 + 30 + 20
    assert node_seconds(paid, 5.0, 12.0) == 5 + 6
    assert stretch_s(59.0) == 60.0 and stretch_s(3600.0) == 300.0


def test_the_command_prints_that_it_is_simulated_and_compares_with_a_fixed_fleet(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--minutes", "1", "--length-scale", "0.2", "--max", "2", "--fixed", "2", "--no-hints")
    done = CliRunner().invoke(
        commands, ["autoscale", "--simulate", str(TRACE), *arguments, "--json", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert document["simulated"] is True and document["note"].startswith("SIMULATED")
    policy, fixed = document["policies"]["configured"], document["fixed"]
    assert policy["policy"]["max_nodes"] == 2 and fixed["size"] == 2
    assert policy["node_hours"] <= fixed["node_hours"] and policy["requests"] == fixed["requests"] > 20
    assert len(policy["stretches"]) == len(fixed["stretches"])
    page = io.StringIO()
    scale_cli.show(document, Console(file=page, width=120))
    shown = page.getvalue()
    assert shown.startswith("SIMULATED in virtual time") and "Not modelled" in shown
    assert "2 nodes all the time" in shown and "node-hours" in shown and "caches moved" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--simulate", "no-such-trace.jsonl"], "No such file"),
        (["--simulate", str(TRACE), "--policy", "greedy"], "unknown policy 'greedy'"),
        (["--simulate", str(TRACE), "--min", "4", "--max", "2"], "min_nodes 4"),
        (["--simulate", str(TRACE), "--preset", "abacus"], "unknown preset"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(arguments: list[str], expected: str) -> None:
    done = CliRunner().invoke(commands, ["autoscale", *arguments])
    assert done.exit_code == 1 and expected in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--startup-s", "9"], "--startup-s is of a simulation"),
        (["--max", "9"], "--max is of a simulation"),
        (["--simulate", str(TRACE), "--minutes", "0"], "--minutes 0.0 must be above 0"),
        (["--simulate", str(TRACE), "--length-scale", "2"], "must be at most 1"),
        (["--simulate", str(TRACE), "--startup-s", "-1"], "must be between 0 and 86400"),
    ],
)
def test_a_flag_that_makes_no_sense_is_named(arguments: list[str], expected: str) -> None:
    done = CliRunner().invoke(commands, ["autoscale", *arguments])
    assert done.exit_code != 0 and expected in str(done.exception)
