"""Jobs on a device: their memory is counted and taken back at once, and whatever happens, they learn the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contracts.finetune import Job, JobState
from runtime import niceness
from tests.worker.engine_harness import tiny_model
from tests.worker.harvest.beside import TrainingDevice, adapter, examples, job, losses
from worker.engine.training import harvesting
from worker.harvest.words import Word

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model(tmp_path_factory.mktemp("model"))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return directory


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that had all layers in memory, and was never paused."""
    place = tmp_path_factory.mktemp("undisturbed")
    device, done = TrainingDevice(model, place), job(place)
    device.harvesting.start(done)
    assert device.finish().state is JobState.SUCCEEDED
    return done


@pytest.fixture
def device(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingDevice]:
    monkeypatch.setattr(harvesting, "_AGAIN_S", 0.1)
    monkeypatch.setattr(niceness, "TRAINER", 0)  # tests that run beside this one would leave it nothing
    made = TrainingDevice(model, tmp_path)
    yield made
    made.close()


def same(done: Job, undisturbed: Job) -> None:
    assert losses(done) == losses(undisturbed)
    ours, theirs = adapter(done), adapter(undisturbed)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def step(device: TrainingDevice, at_least: int) -> None:
    device.run(lambda: device.progress.step >= at_least or device.progress.state.ended)
    assert device.progress.state is JobState.RUNNING


def test_a_job_learns_and_says_how_far_it_is(undisturbed: Job) -> None:
    assert len(losses(undisturbed)) == 12
    assert losses(undisturbed)[-1] < losses(undisturbed)[0]


def test_pauses_and_windows_of_any_size_change_no_bit(device: TrainingDevice, undisturbed: Job, tmp_path: Path) -> None:
    done = job(tmp_path)
    device.harvesting.start(done)
    for at in range(1, 11):
        step(device, at)
        device.leave_room_for(2 + at % 3)
        run = device.harvesting._run
        assert run is not None and run.trainer is not None
        run.trainer.let(at % 3)
        time.sleep(0.02)
        device.harvesting._let = None
    assert device.finish().state is JobState.SUCCEEDED
    assert {seen.window for seen in device.seen} >= {2, 3, 4}
    same(done, undisturbed)


def test_a_job_whose_memory_serving_takes_goes_on_from_its_checkpoint(
    device: TrainingDevice, undisturbed: Job, tmp_path: Path
) -> None:
    done = job(tmp_path)
    device.harvesting.start(done)
    step(device, 6)
    device.balloon.loan.end()
    device.harvesting.make_way()
    assert device.memory.free == device.memory.total, "at once"
    assert device.progress.state is JobState.QUEUED and device.progress.waits == "serving needs the memory"
    assert device.finish().state is JobState.SUCCEEDED
    same(done, undisturbed)


def test_a_killed_trainer_costs_the_steps_since_its_checkpoint(
    device: TrainingDevice, undisturbed: Job, tmp_path: Path
) -> None:
    done = job(tmp_path)
    device.harvesting.start(done)
    step(device, 6)
    os.kill(device.harvesting._run.trainer._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    assert device.finish().state is JobState.SUCCEEDED
    assert any("crashed" in seen.waits for seen in device.seen)
    same(done, undisturbed)


def test_a_trainer_that_does_not_return_memory_is_ended_and_the_job_goes_on(
    device: TrainingDevice, undisturbed: Job, tmp_path: Path
) -> None:
    done = job(tmp_path)
    device.harvesting.start(done)
    step(device, 5)
    trainer = device.harvesting._run.trainer  # type: ignore[union-attr]
    assert trainer is not None
    os.kill(trainer._process.pid, signal.SIGSTOP)
    device.balloon.loan.give(device.balloon.loan.layer)
    before = device.memory.free
    began = time.monotonic()
    device.harvesting.make_way()
    assert time.monotonic() - began < 2 and trainer.ended
    assert device.memory.free > before
    assert device.finish().state is JobState.SUCCEEDED
    same(done, undisturbed)


def test_a_job_that_moves_leaves_a_checkpoint_and_another_device_goes_on(
    device: TrainingDevice, model: Path, undisturbed: Job, tmp_path: Path
) -> None:
    done = job(tmp_path)
    device.harvesting.start(done)
    step(device, 6)
    device.harvesting.stop(done.id, cancelled=False)
    device.run(lambda: not device.harvesting.progress())
    assert device.memory.free == device.memory.total
    other = TrainingDevice(model, tmp_path)
    other.harvesting.start(done)
    found = other.finish()
    assert found.state is JobState.SUCCEEDED
    assert min(seen.step for seen in other.seen if seen.state is JobState.RUNNING and seen.steps) >= 6
    same(done, undisturbed)


def test_a_cancelled_job_ends_soon_and_another_may_begin(device: TrainingDevice, tmp_path: Path) -> None:
    first = job(tmp_path, "b", epochs=1000)
    device.harvesting.start(first)
    step(device, 1)
    device.harvesting.stop(first.id, cancelled=True)
    assert device.finish().state is JobState.CANCELLED
    trainer = device.harvesting._run
    assert trainer is None


def test_a_job_that_never_fits_fails_with_what_to_change(model: Path, tmp_path: Path) -> None:
    device = TrainingDevice(model, tmp_path, mib=8)
    device.harvesting.start(job(tmp_path))
    found = device.finish()
    assert found.state is JobState.FAILED
    assert "MiB of the device" in found.error and "raise kv.hbm_gib" in found.error


def test_bad_data_fails_the_job_with_its_line(device: TrainingDevice, tmp_path: Path) -> None:
    wrong = job(tmp_path)
    Path(wrong.data).write_text(examples(tmp_path / "data.jsonl").read_text() + '{"messages": 5}\n')
    device.harvesting.start(wrong)
    found = device.finish()
    assert found.state is JobState.FAILED and found.error.startswith("line 9:") and not found.retry


def test_a_model_that_is_not_served_here_is_refused(device: TrainingDevice, tmp_path: Path) -> None:
    device.harvesting.start(replace(job(tmp_path), model="other"))
    found = device.finish()
    assert found.state is JobState.FAILED and "other" in found.error


def test_units_end_within_their_time(device: TrainingDevice, tmp_path: Path) -> None:
    device.harvesting.start(job(tmp_path))
    step(device, 3)
    words = device.harvesting._run.trainer.words  # type: ignore[union-attr]
    assert words[Word.UNITS] > 100
    device.harvesting.stop(device.progress.id, cancelled=True)
    device.finish()
