"""`upbeat finetune` over a real scheduler and a worker that trains in no time, and what it draws."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from upbeat_here import upbeat

from cli.finetune_view import as_data, job_table, loss_chart, picture
from contracts.v1 import scheduler_pb2 as pb
from tests.finetune_stack import FinetuneStack, until

PROGRAM = str(Path(sys.executable).with_name("upbeat"))
GOOD = json.dumps({"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]})


@pytest.fixture
async def s(tmp_path: Path, free_ports: Callable[[int], int]) -> AsyncIterator[FinetuneStack]:
    stack = FinetuneStack(tmp_path / "data", free_ports(50), 1)
    await stack.start()
    yield stack
    await stack.stop()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text(f"{GOOD}\n\n{GOOD}\n")
    return file


async def run(s: FinetuneStack, *words: object) -> asyncio.subprocess.Process:
    said = os.environ | {"UPBEAT_SCHEDULER": s.config.scheduler_addresses[0]}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        PROGRAM, "finetune", *map(str, words), stdout=pipe, stderr=pipe, env=said
    )


async def done(s: FinetuneStack, *words: object) -> tuple[int, str, str]:
    """Exit status, output and error of a command that ends."""
    program = await run(s, *words)
    out, err = await asyncio.wait_for(program.communicate(), 60)
    return program.returncode or 0, out.decode(), err.decode()


async def running(s: FinetuneStack) -> str:
    """The id of the one job, when it runs."""
    trainer = s.trainers[0]
    assert trainer is not None

    async def begun() -> bool:
        return bool(trainer.started)

    await until(begun)
    return trainer.started[-1]


async def test_a_job_is_submitted_with_its_settings_and_shown_until_it_ends(
    s: FinetuneStack, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = ("--rank", 4, "--epochs", 2, "--seed", 7, "--tpot-ms", 40, "--suffix", "mine", "--register")
    program = await run(s, "--model", "m", "--data", data, "--validation", data, "--out", out, *flags)
    job_id = await running(s)
    trainer = s.trainers[0]
    assert trainer is not None
    job = trainer.jobs[job_id]
    assert (job.data, job.validation, job.out) == (str(data), str(data), str(out)) and job.tenant == ""
    assert (job.settings.rank, job.settings.epochs, job.settings.seed, job.settings.tpot_ms) == (4, 2, 7, 40.0)
    assert job.fine_tuned_model == "m:mine" and job.register
    for _ in range(10):
        trainer.advance(1)
        await asyncio.sleep(0.15)
    said, err = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode == 0, err
    text = said.decode()
    assert "starts on node-0" in text and "checkpoint at step 5: loss" in text and "succeeded" in text
    assert "step             10 of 10" in text and "█" in text and str(out) in text


async def test_jobs_are_listed_shown_and_cancelled_also_as_json(s: FinetuneStack, data: Path, tmp_path: Path) -> None:
    assert "no fine-tuning jobs yet" in (await done(s, "list"))[1]
    program = await run(s, "--model", "m", "--data", data, "--out", tmp_path / "out", "--json")
    job_id = await running(s)
    status, out, _ = await done(s, "list")
    assert status == 0 and [job_id, "m:adapter"] == out.splitlines()[1].split()[:2]
    status, out, _ = await done(s, "show", job_id, "--json")
    shown = json.loads(out)
    assert shown["job"]["id"] == job_id and shown["progress"]["loss"] is None
    assert "created: m:adapter" in (await done(s, "show", job_id))[1]
    assert (await done(s, "cancel", job_id)) == (0, f"cancelled: {job_id}\n", "")
    lines, _ = await asyncio.wait_for(program.communicate(), 60)
    states = [json.loads(line)["progress"]["state"] for line in lines.splitlines()]
    assert states[-1] == "cancelled" and program.returncode == 1
    assert json.loads((await done(s, "list", "--json"))[1])["data"][0]["progress"]["state"] == "cancelled"


async def test_ctrl_c_leaves_the_job_running_and_says_how_to_look_and_to_cancel(
    s: FinetuneStack, data: Path, tmp_path: Path
) -> None:
    program = await run(s, "--model", "m", "--data", data, "--out", tmp_path / "out")
    job_id = await running(s)
    assert program.stdout is not None and job_id in (await program.stdout.readline()).decode()
    program.send_signal(signal.SIGINT)
    out, _ = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode == 130
    assert f"upbeat finetune show {job_id}" in out.decode() and f"upbeat finetune cancel {job_id}" in out.decode()
    assert s.trainers[0].jobs  # type: ignore[union-attr]


async def test_what_the_scheduler_refuses_is_one_line(s: FinetuneStack, data: Path, tmp_path: Path) -> None:
    asked = ("--data", data, "--out", tmp_path / "out")
    for words, expected, said in (
        (("--model", "nobody", *asked), 1, "no node serves the model 'nobody'"),
        (("show", "ftjob-unknown00"), 5, "`upbeat finetune list` lists those"),
        (("cancel", "ftjob-unknown00"), 5, "no fine-tuning job"),
    ):
        status, out, err = await done(s, *words)
        assert (status, out) == (expected, "") and len(err.splitlines()) == 1 and said in err, err


def test_what_is_wrong_is_said_before_anybody_is_asked(tmp_path: Path, data: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{GOOD}\n{{}}\n")
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("")
    out = str(tmp_path / "out")
    asked = ["--model", "m", "--data", str(data), "--out", out]
    for words, said in (
        ([], "--model, --data and --out start a job"),
        (["--model", "m"], "--model, --data and --out start a job"),
        (["--model", "m", "--data", str(bad), "--out", out], "bad.jsonl: line 2: "),
        (["--model", "m", "--data", str(tmp_path / "none"), "--out", out], "cannot be read"),
        (["--model", "m", "--data", str(data), "--out", str(full)], "holds something; give a new directory"),
        ([*asked, "--validation", str(bad)], "--validation"),
        ([*asked, "--rank", "0"], "--rank: rank = 0: give a number from 1 to 256"),
        ([*asked, "--learning-rate", "nan"], "--learning-rate: "),
        ([*asked, "--suffix", "a/b"], "--suffix: "),
        ([*asked, "--epochs", "many"], "'many' is not a whole number"),
    ):
        ended = upbeat("finetune", *words)
        assert ended.returncode == 2 and said in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr


def test_a_scheduler_that_does_not_answer_is_named() -> None:
    ended = upbeat("finetune", "list", "--scheduler", "127.0.0.1:9")
    assert ended.returncode == 3 and "127.0.0.1:9 does not answer" in ended.stderr
    assert upbeat("finetune", "list", "--url", "http://127.0.0.1:9").returncode == 3


# ---- what is drawn -------------------------------------------------------------------------------------------------
def found(**progress: Any) -> pb.Finetune:
    nan = float("nan")
    told = {"state": "running", "step": 3, "steps": 9, "loss": 0.25, "validation_loss": nan, "tokens": 300} | progress
    return pb.Finetune(
        job=pb.FinetuneJob(id="ftjob-00000001", model="m", suffix="s", out="/out", settings={"tpot_ms": 40.0}),
        progress=pb.FinetuneProgress(id="ftjob-00000001", **told),
        node="node-1",
        losses=[pb.FinetuneLoss(step=n, loss=1 / n, validation_loss=nan) for n in range(1, 30)],
    )


def drawn(what: Any, width: int = 80) -> str:
    screen = Console(file=StringIO(), width=width, highlight=False, markup=False)
    screen.print(what)
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue()


def test_a_running_job_shows_what_serving_keeps_its_window_and_its_split() -> None:
    text = drawn(picture(found(tokens_per_s=50.0, tpot_s=0.0375, window=2, layers=24, split=1, shares=4), 80))
    for said in ("3 of 9", "0.2500", "300 tokens, 50 a second", "37.5 ms a token, target 40 ms", "2 of 24", "1 of 4"):
        assert said in text, text
    assert "error" not in text and "waits" not in text
    assert "the disk is full" in drawn(picture(found(state="failed", error="the disk is full"), 80))
    assert "for a node" in drawn(picture(found(state="queued", waits="for a node"), 80))


def test_pictures_and_lists_fit_eighty_columns_and_narrow_ones() -> None:
    for width in (80, 40):
        for line in [
            *drawn(picture(found(), width), width).splitlines(),
            *drawn(job_table([found()]), width).splitlines(),
        ]:
            assert len(line) <= width


def test_what_was_not_measured_is_null_in_json() -> None:
    data = as_data(found(loss=float("nan")))
    assert data["progress"]["loss"] is None and data["losses"][0]["validation_loss"] is None
    json.dumps(data, allow_nan=False)


def test_a_falling_loss_is_drawn_from_the_top_left_to_the_bottom_right() -> None:
    lines = loss_chart([(n, 100 - n) for n in range(1, 73)], 80)
    assert lines[0].strip().startswith("99.000 █") and "28.000" in lines[-2]
    assert "█" not in lines[0][30:] and lines[-1].strip() == "steps 1 to 72"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(allow_nan=True)), max_size=40), st.integers(20, 200))
def test_any_losses_can_be_drawn(points: list[tuple[int, float]], width: int) -> None:
    lines = loss_chart(sorted(points), width)
    assert len(lines) in (0, 7)
