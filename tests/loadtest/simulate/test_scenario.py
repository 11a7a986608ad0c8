"""Whole runs: equal seeds give equal runs, every request ends once, nothing is lost, and the policies compare as they
must."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from contracts.ids import DEFAULT_TENANT
from loadtest.habits import Habits
from loadtest.simulate.fleet import VARIANTS
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.results import loads_of, peak_to_median
from loadtest.simulate.scenario import Outcome, Run, scripts, simulate, trace_sessions
from loadtest.simulate.users import Script

KIND = PRESETS["a100-llama-3.1-8b"]
RUN = Run(KIND, 4, VARIANTS["balanced"], users=60, seconds=120.0, warm_up_s=10.0)


def said(sessions: int = 600, **options: float) -> list[Script]:
    return scripts(trace_sessions(None, sessions=sessions), max_tokens=100_000, **options)  # type: ignore[arg-type]


def times(outcome: Outcome) -> list[tuple[str, str, float, float]]:
    return [(r.request_id, r.node, r.first_s, r.end_s) for r in outcome.users.requests]


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    habits = Habits(missed=0.2, spurious=0.5, late=0.1, early=0.1, expected=False)
    run = replace(RUN, users=30, seconds=60.0, habits={DEFAULT_TENANT: habits})
    a, b = simulate(run, said()), simulate(run, said())
    assert times(a) == times(b)
    assert {**a.figures, "real_s": 0} == {**b.figures, "real_s": 0}
    assert times(simulate(replace(run, seed=2), said())) != times(a)


@pytest.mark.parametrize(("users", "seconds"), [(30, 60.0), pytest.param(60, 120.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_request_ends_once_and_in_order_under_every_policy(variant: str, users: int, seconds: float) -> None:
    habits = {DEFAULT_TENANT: Habits(spurious=0.5, expected=False)}
    found = simulate(replace(RUN, users=users, seconds=seconds, variant=VARIANTS[variant], habits=habits), said())
    requests = found.users.requests
    assert len({r.request_id for r in requests}) == len(requests) == found.users.ended > 0.8 * users
    assert all(r.sent_s <= r.first_s <= r.end_s for r in requests)
    assert found.figures["unfinished"] == 0
    assert all(r.cached_tokens <= r.history_tokens for r in requests)
    assert (sum(r.cached_tokens for r in requests) == 0) == (variant in ("recompute", "llumnix"))
    assert all(not node.outstanding for node in found.fleet.nodes.values())
    turns: dict[str, list[int]] = {}
    for r in sorted(requests, key=lambda r: r.sent_s):
        turns.setdefault(r.session.session_id, []).append(r.turn)
    assert all(order == list(range(len(order))) for order in turns.values())


def test_clients_say_nothing_of_how_long_answers_will_be_whether_they_hint_or_not() -> None:
    found = simulate(replace(RUN, users=20, seconds=60.0), said()).users.requests
    assert found and all(r.expected_tokens is None for r in found)


def test_small_tiers_stay_within_their_capacity_and_everybody_is_still_served() -> None:
    token = KIND.shape.token_bytes
    tight = replace(KIND, hbm_bytes=60_000.0 * token, dram_bytes=40_000.0 * token, ssd_bytes=50_000.0 * token)
    run = replace(RUN, kind=tight, habits={DEFAULT_TENANT: Habits(spurious=2.0, expected=False)})
    # validates every part at the end
    found = simulate(run, scripts(trace_sessions(None, sessions=600), max_tokens=50_000))
    assert found.figures["unfinished"] == 0 and found.figures["moved_bytes"]["blob"] > 0


def test_a_trace_is_replayed_at_its_times() -> None:
    sessions = said(40)
    found = simulate(replace(RUN, users=0, seconds=float("inf"), warm_up_s=0.0), sessions)
    assert found.users.ended == sum(len(s.turns) for s in sessions)
    first = {s.session: s.turns[0].arrival_s for s in sessions}
    assert all(r.sent_s == pytest.approx(max(first[r.session], 0.0)) for r in found.users.requests if r.turn == 0)


def test_habits_are_kept() -> None:
    def hints(**habits: float) -> tuple[int, int]:
        found = simulate(replace(RUN, habits={DEFAULT_TENANT: Habits(**habits, expected=False)}), said())
        return found.fleet.hints, len(found.users.requests)

    sent, requests = hints()
    assert sent >= requests, "a request whose hint was sent may come after the end"
    assert hints(missed=1.0)[0] == 0
    half, requests = hints(missed=0.5)
    assert 0.4 * requests < half < 0.62 * requests
    more, requests = hints(spurious=0.9)
    assert more > 1.3 * requests


@pytest.mark.parametrize(
    ("users", "variant"),
    [
        pytest.param(250, "balanced-no-hints", marks=[pytest.mark.slow, pytest.mark.sample]),
        *(
            pytest.param(users, variant, marks=pytest.mark.slow)
            for users, variant in [(60, "balanced-no-hints"), (500, "balanced-no-hints")]
            + [(users, "balanced") for users in (60, 250, 500)]
        ),
    ],
)
def test_balanced_is_never_worse_than_sticky(users: int, variant: str) -> None:
    """Mean over seeds of latency over output tokens; what is left of chance is a hundredth."""
    ratios = []
    for seed in (1, 2, 3):
        load = scripts(trace_sessions(None, sessions=1500, seed=seed), seed=seed, max_tokens=100_000)
        run = replace(RUN, users=users, seed=seed, seconds=150.0, warm_up_s=30.0)
        ours, theirs = (simulate(replace(run, variant=VARIANTS[v]), load).figures for v in (variant, "sticky"))
        ratios.append(ours["normalised_s"]["mean"] / theirs["normalised_s"]["mean"])
    assert np.mean(ratios) <= 1.01, ratios


@pytest.mark.slow
@pytest.mark.sample
def test_hints_win_where_dram_does_not_hold_every_session() -> None:
    run = replace(RUN, nodes=2, users=200, seconds=150.0, warm_up_s=30.0, kind=replace(KIND, dram_bytes=8e9))
    load = said(1000)
    with_hints, without, sticky = (
        simulate(replace(run, variant=VARIANTS[v]), load).figures for v in ("balanced", "balanced-no-hints", "sticky")
    )
    for other in (without, sticky):
        assert with_hints["ttft_returning_turns_s"]["mean"] < 0.8 * other["ttft_returning_turns_s"]["mean"]
        assert with_hints["normalised_s"]["mean"] < other["normalised_s"]["mean"]


@pytest.mark.slow
def test_a_flood_of_hints_of_one_tenant_does_not_move_the_others_p99() -> None:
    load = scripts(trace_sessions(None, sessions=4000), max_tokens=100_000, tenants=4)
    run = Run(KIND, 8, VARIANTS["balanced"], users=256, seconds=400.0, warm_up_s=60.0)

    def others_p99_s(habits: Habits) -> float:
        found = simulate(replace(run, habits={"tenant-0": habits}), load)
        waits = [
            r.first_s - r.sent_s
            for r in found.users.requests
            if r.session.tenant != "tenant-0" and r.sent_s > run.warm_up_s
        ]
        return float(np.percentile(waits, 99))

    assert others_p99_s(Habits(spurious=100.0, expected=False)) <= 1.05 * others_p99_s(Habits(expected=False))


def test_peak_to_median_by_hand() -> None:
    found = peak_to_median([[3.0, 1.0, 1.0], [2.0, 2.0, 4.0], [0.0, 0.0, 0.5]])
    assert found["over_time"] == pytest.approx((3 + 4 + 0.5) / (1 + 2 + 0))
    assert (found["mean"], found["max"], found["whole_run"]) == (2.5, 3.0, 4.0)
    assert peak_to_median([]) == {"moments": 0}
    spans = [(0.0, 10.0, 0), (5.0, 15.0, 1), (0.0, 20.0, 1)]
    assert loads_of(spans, 2, 10.0) == [[1.0, 1.5], [0.0, 1.5], [0.0, 0.0]]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_policies_are_rows_that_fit_the_window_each_figure_once(columns: int) -> None:
    from rich.console import Console

    from loadtest.simulate.cli import _FIGURES, table

    large = {
        "mean": 1234.567891,
        "p50": 1234.567891,
        "p99": 98765.432191,
        "over_time": 12.3,
        "max": 999.9,
        "sent": 1234567,
        "moved": 1234567,
    }
    figures: dict[str, object] = {}
    for _, path, _, _ in _FIGURES:
        figures[path[0]] = large if len(path) > 1 else 0.5
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(table(dict.fromkeys(VARIANTS, figures), "8 nodes of a100-llama-3.1-8b, 64 users, seed 1"))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    values = {
        name: [word for line in lines if line.split()[:1] == [name] for word in line.split()[1:]] for name in VARIANTS
    }
    assert all(len(found) == len(_FIGURES) for found in values.values()), (
        "one value a figure, whole, in one line of its policy"
    )
    assert all("1234567" in found and "98765432.2" in found for found in values.values())
    assert " ".join(lines).count("TTFT") == sum(heading.startswith("TTFT") for heading, *_ in _FIGURES), (
        "each heading once"
    )


def test_seven_policies_of_the_command_fit_80_columns() -> None:
    from typer import Typer

    from loadtest.simulate.cli import run

    app = Typer()
    app.command()(run)
    seven = ["balanced", "balanced-no-hints", "sticky", "recompute", "cache-aware", "random", "infercept-migration"]
    few = ["--users", "20", "--minutes", "0.5", "--nodes", "2", "--sessions", "60", "--policy", ",".join(seven)]
    shown = CliRunner().invoke(app, few, env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert max(map(len, lines)) <= 80
    starts = [line.split()[0] for line in lines if line.split() and line.split()[0] in seven]
    assert starts == seven * (len(starts) // 7) and 2 <= len(starts) // 7 <= 6


def test_the_command_shows_a_table_prints_json_and_names_what_is_wrong(tmp_path) -> None:
    from typer import Typer

    from loadtest.simulate.cli import run

    app = Typer()
    app.command()(run)
    few = ["--users", "20", "--minutes", "1", "--nodes", "2", "--sessions", "60", "--policy", "balanced,sticky"]
    shown = CliRunner().invoke(app, few)
    assert (
        shown.exit_code == 0
        and "TTFT" in shown.output
        and any(line.startswith("sticky ") for line in shown.output.splitlines())
    )
    printed = CliRunner().invoke(app, [*few, "--json", "--out", str(tmp_path / "r.json")])
    assert printed.exit_code == 0
    document = json.loads(printed.stdout)
    assert document == json.loads((tmp_path / "r.json").read_text())
    assert document["settings"]["seed"] == 1 and document["policies"]["balanced"]["requests"] > 5
    wrong = CliRunner().invoke(app, ["--policy", "stocky"])
    assert wrong.exit_code == 1
