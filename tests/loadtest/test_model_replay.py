"""`upbeat bench --url` sends a trace of several models to a running stack and says how each kept its objective."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from loadtest.cli import bench
from loadtest.model_replay import generated, named
from loadtest.traces import TraceRequest
from tests.loadtest.fake_openai_server import FakeOpenAI

SERVED: list[dict[str, Any]] = [
    {"id": "small", "max_model_len": 4096, "ttft_slo_s": 30.0, "tpot_slo_s": 5.0},
    {"id": "large", "max_model_len": 8192, "ttft_slo_s": 0, "tpot_slo_s": 0},
    {"id": "spare"},
]
BURSTGPT = """Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,GPT-4,40,3,43,API log
5.01,,ChatGPT,50,4,54,API log
5.02,,ChatGPT,60,5,65,API log
5.03,,GPT-4,70,0,70,API log
"""


@pytest.fixture
def stack() -> Iterator[FakeOpenAI]:
    """Serves on another thread, as the command has the main one."""
    loop, fake = asyncio.new_event_loop(), FakeOpenAI(models=list(SERVED))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(fake.__aenter__(), loop).result()
    yield fake
    asyncio.run_coroutine_threadsafe(fake.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, [*arguments])


def test_a_generated_trace_goes_to_the_models_that_are_served(stack: FakeOpenAI, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    ran = run(
        "--url", stack.url, "--models", "3", "--requests", "40", "--time-scale", "0.001", "--max-tokens", "5",
        "--out", str(out),
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    document = json.loads(out.read_text())
    asked = Counter(call.body["model"] for call in stack.calls("chat"))
    assert {name: of["requests"] for name, of in document["models"].items()} == dict(asked)
    assert (
        sum(asked.values()) == 40
        and set(asked) <= {"small", "large", "spare"}
        and asked["small"] == max(asked.values())
    )
    assert document["models"]["small"]["attainment"] == {"ttft": 1.0, "tpot": 1.0} == document["attainment"]
    assert all(of["attainment"]["ttft"] is None for name, of in document["models"].items() if name != "small")
    assert (document["statistics"]["requests"], document["statistics"]["models"]) == (
        40,
        3,
    ) and "models active at a time" in ran.output
    assert not stack.calls("hint") and all(call.body["ignore_eos"] for call in stack.calls("chat"))


def test_a_burstgpt_trace_keeps_its_models_apart(stack: FakeOpenAI, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(BURSTGPT)
    ran = run("--url", stack.url, "--trace", str(trace), "--time-scale", "0.01", "--ttft-s", "20", "--hints", "--json")
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert document["names"] == {"ChatGPT": "small", "GPT-4": "large"}
    assert {name: of["requests"] for name, of in document["models"].items()} == {"large": 1, "small": 2}
    assert document["models"]["large"]["slo"] == {"ttft_s": 20.0, "tpot_s": None}
    assert Counter(call.body["model_id"] for call in stack.calls("hint")) == {"small": 2, "large": 1}
    assert "outcomes" not in document


def test_a_failed_request_is_counted_and_ends_with_status_1(stack: FakeOpenAI) -> None:
    stack.fail_sessions = {"s00000"}
    ran = run("--url", stack.url, "--models", "1", "--requests", "5", "--time-scale", "0.001", "--json")
    assert ran.exit_code == 1
    document = json.loads(ran.stdout)
    assert document["models"]["small"]["failed"] == 1
    assert document["attainment"]["ttft"] == 0.8


def test_models_of_the_same_names_are_kept_and_others_go_by_their_requests() -> None:
    def trace(*models: str) -> list[TraceRequest]:
        return [TraceRequest(float(n), 1, 1, (n,), model=m) for n, m in enumerate(models)]

    assert named(trace("b", "b", "a"), ["a", "b", "c"]) == {"a": "a", "b": "b"}
    assert named(trace("x", "y", "y"), ["a", "b", "c"]) == {"y": "a", "x": "b"}
    with pytest.raises(ValueError, match="give --models with at most that"):
        named(trace("x", "y"), ["a"])


def test_a_generated_trace_has_as_many_requests_as_asked() -> None:
    found = generated(4, 5000, 1, "novita")
    assert len(found) == 5000 and {r.model for r in found} <= {"m00", "m01", "m02", "m03"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one of --trace FILE and --models N"),
        (["--trace", "t.csv", "--models", "2", "--url", "http://127.0.0.1:1"], "give one of"),
        (["--models", "2"], "give its address with --url"),
        (["--trace", "t.csv", "--ttft-s", "1"], "--ttft-s is for a running stack"),
        (["--trace", "t.csv", "--like", "novita"], "--like is for a running stack"),
        (["--trace", "t.csv", "--like", "novita", "--url", "http://127.0.0.1:1"], "--like is of generated traces"),
        (
            ["--models", "2", "--url", "http://127.0.0.1:1", "--nodes", "3"],
            "--nodes is of stacks that are started here",
        ),
        (["--models", "2", "--url", "http://127.0.0.1:1", "--like", "other"], "there are hyperbolic, novita, arena"),
        (["--models", "2", "--url", "http://127.0.0.1:1"], "lists no models"),
        (["--models", "2", "--url", "nowhere"], "lists no models"),
        (["--models", "2", "--url", "http://127.0.0.1:1", "--key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
    ],
)
def test_what_cannot_be_sent_says_why_in_one_line(arguments: list[str], says: str) -> None:
    ran = run(*arguments)
    assert ran.exit_code == 1
    assert says in " ".join(ran.output.split())
    assert "Traceback" not in ran.output


def test_a_trace_without_models_or_a_list_without_ids_is_refused(stack: FakeOpenAI, tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert "names no model" in run("--url", stack.url, "--trace", str(azure)).output
    stack.models = [{"object": "model"}]
    assert "lists no models" in run("--url", stack.url, "--models", "1").output
