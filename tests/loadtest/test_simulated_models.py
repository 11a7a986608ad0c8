"""`upbeat simulate --models N`: models that share simulated devices, and how each kept its objective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from loadtest.many_models import generate
from loadtest.simulate.cli import run
from loadtest.simulated_models import ModelTrace, parse_sharings
from loadtest.traces import TraceRequest

BURSTGPT = """Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,GPT-4,40,3,43,API log
5.01,,ChatGPT,50,4,54,API log
9.02,,ChatGPT,60,5,65,API log
"""


def simulate(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(run)
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "160"})


def test_each_model_has_its_requests_and_its_attainment_and_equal_seeds_give_equal_runs(tmp_path: Path) -> None:
    flags = ("--models", "5", "--minutes", "8", "--nodes", "2", "--sharing", "elastic,prism", "--seed", "3", "--json")
    first, again = (simulate(*flags, "--out", str(tmp_path / name)) for name in ("first", "again"))
    assert first.exit_code == again.exit_code == 0, first.output
    found, repeated = (json.loads((tmp_path / name).read_text())["sharing"] for name in ("first", "again"))
    asked = generate(5, 480.0, 3)
    for name in ("elastic", "prism"):
        models = found[name]["models"]
        assert {m: of["requests"] for m, of in models.items()} == {
            f"m{n:02d}": sum(r.model == f"m{n:02d}" for r in asked) for n in range(5)
        }
        assert models == repeated[name]["models"] and found[name]["failed"] == 0
        assert 0.0 < found[name]["attainment"]["ttft"] <= 1.0
        assert sum(of["requests"] for of in models.values()) == found[name]["requests"] == len(asked) > 10


def test_a_tight_objective_is_kept_less_often(tmp_path: Path) -> None:
    shares = []
    for ttft_s in ("0.02", "5"):
        ran = simulate("--models", "3", "--minutes", "8", "--nodes", "1", "--seed", "3", "--ttft-s", ttft_s, "--json")
        assert ran.exit_code == 0, ran.output
        shares.append(json.loads(ran.stdout)["sharing"]["prism"]["attainment"]["ttft"])
    assert shares == [0.0, 1.0], "HTTP alone takes 30 ms"


def test_a_trace_names_its_models(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    ran = simulate("--trace", str(path), "--sharing", "prism", "--nodes", "1")
    assert ran.exit_code == 0, ran.output
    assert "GPT-4" in ran.output and "ChatGPT" in ran.output and "prism: TTFT" in ran.output
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert "names no model" in simulate("--trace", str(azure), "--sharing", "prism").output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--models", "3", "--trace", "x.csv"], "give one of --trace FILE and --models N"),
        (["--sharing", "prism"], "--sharing needs models"),
        (["--models", "3", "--policy", "sticky"], "--policy is of fleets with one model"),
        (["--models", "3", "--hbm-gib", "4"], "--hbm-gib is of fleets with one model"),
        (["--ttft-s", "1"], "--ttft-s is of several models"),
        (["--sharing", "prism", "--trace", "x.csv", "--like", "novita"], "--like is of generated traces"),
        (["--models", "3", "--sharing", "fair"], "--sharing fair: there are static, elastic, swap, prism"),
        (["--models", "3", "--sharing", ","], "--sharing is empty"),
        (["--models", "3", "--like", "nobody"], "like = 'nobody'"),
        (["--models", "40", "--nodes", "1", "--sharing", "elastic"], "do not fit on 1 devices"),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(flags: list[str], said: str) -> None:
    ran = simulate(*flags)
    assert ran.exit_code == 1 and said in " ".join(ran.output.split()), ran.output


def test_weights_that_stay_go_to_devices_with_room_and_the_busiest_models_are_apart() -> None:
    requests = [TraceRequest(float(n), 100, 100, (n,), model="ab"[n % 2]) for n in range(20)]
    trace = ModelTrace.of(requests, ["a", "b", "c"], length_scale=1000.0)
    first, second = trace.where(2)
    assert not ({trace.names["a"], trace.names["b"]} <= set(first)) and len(first) + len(second) == 3
    assert max(r.input_tokens + r.output_tokens for r in trace.requests) <= 16_384
    with pytest.raises(ValueError, match="not among its models"):
        ModelTrace.of(requests, ["a"])
    assert parse_sharings("prism, static") == ["static", "prism"]
