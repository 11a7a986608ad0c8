"""`/v1/fine_tuning/jobs` with the official client: over a real scheduler, and a worker that trains in no time."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from finetune_harness import CHAT, DATA, KEYS, Tuning, tuning

from tests.finetune_stack import until


def content(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.fixture
async def t(tmp_path: Path, free_ports: Callable[[int], int]) -> AsyncIterator[Tuning]:
    async with tuning(tmp_path, free_ports) as running:
        yield running


async def test_a_job_runs_to_its_end_and_its_result_files_can_be_read(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    async with tuning(tmp_path, free_ports, tenants=1) as t:
        file_id = await t.file()
        job = await t.a.fine_tuning.jobs.create(
            model="m",
            training_file=file_id,
            validation_file=file_id,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 2.0}},
            },
            seed=7,
            suffix="mine",
            metadata={"for": "a test"},
        )
        assert (job.status, job.model, job.seed, job.training_file) == ("queued", "m", 7, file_id)
        assert (job.fine_tuned_model, job.result_files, job.finished_at) == (None, [], None)
        assert job.hyperparameters.n_epochs == 2 and job.metadata == {"for": "a test"}
        await t.is_(job.id, "running")
        trainer = t.stack.trainers[0]
        assert trainer is not None
        told = trainer.jobs[job.id]
        assert (told.settings.epochs, told.settings.batch_size, told.settings.learning_rate) == (2, 4, 2e-4)
        assert content(told.data) == DATA == content(told.validation)
        await t.a.files.delete(file_id)
        assert content(told.data) == DATA, "the job goes on without its file"
        trainer.advance(10)
        done = await t.is_(job.id, "succeeded")
        assert done.fine_tuned_model == f"m:{told.suffix}" and told.suffix.startswith("mine-")
        assert done.trained_tokens == 1000 and done.finished_at and done.error is None
        files = {f.filename: f for f in [await t.a.files.retrieve(each) for each in done.result_files]}
        assert set(files) == {"adapter_config.json", "adapter_model.safetensors", "step_metrics.csv"}
        assert {f.purpose for f in files.values()} == {"fine-tune-results"}
        config = await t.a.files.content(files["adapter_config.json"].id)
        assert json.loads(config.content) == {"peft_type": "LORA"}
        metrics = (await t.a.files.content(files["step_metrics.csv"].id)).text.splitlines()
        assert metrics[0] == "step,train_loss,valid_loss" and metrics[-1].startswith("10,0.4")
        assert (await t.a.fine_tuning.jobs.retrieve(job.id)).result_files == done.result_files


async def test_events_and_checkpoints_come_page_by_page_the_newest_first(t: Tuning) -> None:
    job = await t.job()
    await t.is_(job.id, "running")
    t.stack.trainers[0].advance(5)  # type: ignore[union-attr]

    async def kept() -> bool:
        return bool((await t.a.fine_tuning.jobs.checkpoints.list(job.id)).data)

    await until(kept)
    t.stack.trainers[0].advance(5)  # type: ignore[union-attr]
    await t.is_(job.id, "succeeded")
    found = [c async for c in t.a.fine_tuning.jobs.checkpoints.list(job.id, limit=1)]
    assert [c.step_number for c in found] == [10, 5]
    assert found[1].metrics.train_loss == pytest.approx(0.8) and found[1].metrics.valid_loss == pytest.approx(1.0)
    assert found[0].fine_tuning_job_id == job.id
    said = [e.message async for e in t.a.fine_tuning.jobs.list_events(job.id, limit=2)]
    assert said[0] == "succeeded" and said[-1].startswith("created") and "starts on node-0" in said
    first = await t.a.fine_tuning.jobs.list_events(job.id, limit=1)
    assert first.has_more and first.data[0].level == "info"


async def test_jobs_are_listed_the_newest_first_and_cancelled(t: Tuning) -> None:
    jobs = [await t.job() for _ in range(3)]
    listed = [job.id async for job in t.a.fine_tuning.jobs.list(limit=2)]
    assert listed == [job.id for job in reversed(jobs)]
    assert (await t.a.fine_tuning.jobs.cancel(jobs[0].id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="after"):
        await t.a.fine_tuning.jobs.list(after="ftjob-unknown1")
    for wrong in ({"limit": 0}, {"limit": 101}, {"metadata": {"a": "b"}}):
        with pytest.raises(openai.BadRequestError):
            await t.a.fine_tuning.jobs.list(**wrong)  # type: ignore[arg-type]


async def test_a_tenant_sees_and_uses_only_its_own(t: Tuning) -> None:
    job = await t.job()
    file_id = job.training_file
    jobs, files = t.b.fine_tuning.jobs, t.b.files
    calls: list[Any] = [jobs.retrieve, jobs.cancel, jobs.list_events, jobs.checkpoints.list]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as error:
            await call(job.id)
        assert error.value.code == "fine_tuning_job_not_found"
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file_id)
    with pytest.raises(openai.BadRequestError) as refused:
        await jobs.create(model="m", training_file=file_id)
    assert refused.value.param == "training_file" and refused.value.code == "file_not_found"
    assert not (await jobs.list()).data and not (await files.list()).data
    assert (await t.a.fine_tuning.jobs.retrieve(job.id)).status != "cancelled"


async def test_a_model_of_one_tenant_is_not_served_to_the_others(t: Tuning) -> None:
    job = await t.job()
    await t.is_(job.id, "running")
    assert not t.stack.trainers[0].jobs[job.id].register  # type: ignore[union-attr]
    t.stack.trainers[0].advance(10)  # type: ignore[union-attr]
    assert (await t.is_(job.id, "succeeded")).fine_tuned_model is None
    await t.a.fine_tuning.jobs.retrieve(job.id)
    assert not any(job.id in path and "files" not in path for path in t.kept()), "its directory is gone"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 3: "),
        (b"[]", "line 3: "),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "line 3: "),
        (b'{"messages": [{"role": "nobody", "content": "a"}]}', "line 3: "),
        (b'{"a": ' * 100_000, "line 3: "),
        (b"\xff\xfe", "line 3: "),
        (b'{"text": "' + b"x" * (8 << 20) + b'"}', "line 3: "),
    ],
)
async def test_bad_data_is_refused_with_its_line_before_anything_starts(t: Tuning, line: bytes, said: str) -> None:
    good = json.dumps(CHAT).encode()
    file_id = await t.file(b"\n".join([good, b"", line, good]))
    with pytest.raises(openai.BadRequestError) as error:
        await t.a.fine_tuning.jobs.create(model="m", training_file=file_id)
    assert error.value.param == "training_file" and said in error.value.message
    assert error.value.code == "invalid_training_data"
    assert not (await t.a.fine_tuning.jobs.list()).data and not any("adapters" in path for path in t.kept())


async def test_a_large_file_is_checked_while_others_are_answered(t: Tuning) -> None:
    file_id = await t.file((json.dumps(CHAT).encode() + b"\n") * 200_000 + b"{")
    creating = asyncio.ensure_future(t.a.fine_tuning.jobs.create(model="m", training_file=file_id))
    longest, loop = 0.0, asyncio.get_running_loop()
    while not creating.done():
        began = loop.time()
        await asyncio.sleep(0.01)
        longest = max(longest, loop.time() - began)
    with pytest.raises(openai.BadRequestError, match="line 200001: "):
        await creating
    assert longest < 2.0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": "nobody"}, "model"),
        ({"model": None}, "model"),
        ({"training_file": "file-" + "0" * 32}, "training_file"),
        ({"training_file": "../../secret"}, "training_file"),
        ({"training_file": "/etc/passwd"}, "training_file"),
        ({"validation_file": "file-none"}, "validation_file"),
        ({"suffix": "a/b"}, "suffix"),
        ({"suffix": "x" * 41}, "suffix"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"n_epochs": "many"}}, "hyperparameters.n_epochs"),
        ({"hyperparameters": {"batch_size": True}}, "hyperparameters.batch_size"),
        ({"hyperparameters": {"learning_rate_multiplier": 1e9}}, "hyperparameters.learning_rate_multiplier"),
        ({"hyperparameters": {"beta": 1}}, "hyperparameters.beta"),
        ({"method": {"type": "dpo", "dpo": {}}}, "method"),
        ({"method": {"type": "reinforcement"}}, "method"),
        ({"integrations": [{"type": "wandb"}]}, "integrations"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_a_field_that_is_wrong_or_unsupported_is_named(t: Tuning, change: dict[str, Any], param: str) -> None:
    body = {"model": "m", "training_file": await t.file()} | change
    said = {"Authorization": f"Bearer {KEYS['a']}"}
    async with t.http.post(f"{t.url}/v1/fine_tuning/jobs", json=body, headers=said) as r:
        answer = await r.json()
    assert r.status in (400, 404), answer
    assert (answer["error"]["param"] or "").startswith(param), answer
    assert not (await t.a.fine_tuning.jobs.list()).data


async def test_both_places_of_hyperparameters_work_but_not_at_once(t: Tuning) -> None:
    job = await t.job(hyperparameters={"n_epochs": 5, "batch_size": "auto"}, integrations=None)
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (5, 8)
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
    with pytest.raises(openai.BadRequestError) as error:
        await t.job(hyperparameters={"n_epochs": 5}, method=method)
    assert error.value.param == "hyperparameters"


async def test_a_failed_job_says_why_and_leaves_nothing(t: Tuning) -> None:
    job = await t.job()
    await t.is_(job.id, "running")
    t.stack.trainers[0].fail(job.id, "the adapter does not fit the device", retry=False)  # type: ignore[union-attr]
    failed = await t.is_(job.id, "failed")
    assert failed.error.message == "the adapter does not fit the device" and failed.result_files == []
    await t.job()
    assert not any(job.id in path for path in t.kept())


async def test_a_fleet_that_does_not_train_refuses_and_says_what_to_set(t: Tuning) -> None:
    t.stack.trainers[0].why = "it computes with vLLM"  # type: ignore[union-attr]
    file_id = await t.file()

    async def refuses() -> bool:
        try:
            await t.a.fine_tuning.jobs.create(model="m", training_file=file_id)
        except openai.BadRequestError as e:
            return e.param == "model" and "it computes with vLLM" in e.message
        return False

    await until(refuses)


async def test_while_the_first_scheduler_is_away_jobs_are_unavailable_and_files_are_not(t: Tuning) -> None:
    job = await t.job()
    await t.stack.kill_scheduler()
    with pytest.raises(openai.InternalServerError) as error:
        await t.a.fine_tuning.jobs.retrieve(job.id)
    assert error.value.status_code == 503
    assert (await t.a.files.list()).data
    await t.stack.start_scheduler(0)

    async def back() -> bool:
        try:
            return (await t.a.fine_tuning.jobs.retrieve(job.id)).status == "running"
        except openai.InternalServerError:
            return False

    await until(back)


async def test_directories_without_a_job_go_when_they_are_old(t: Tuning) -> None:
    for name, age_s in (("ftjob-00000000old0", 10_000), ("ftjob-00000000new0", 0)):
        place = t.data / "adapters" / "a" / name
        place.mkdir(parents=True)
        (place / "training.jsonl").write_bytes(DATA)
        os.utime(place, (time.time() - age_s,) * 2)
    await t.job()
    assert not (t.data / "adapters" / "a" / "ftjob-00000000old0").exists()
    assert (t.data / "adapters" / "a" / "ftjob-00000000new0").exists()
    shutil.rmtree(t.data / "adapters")
