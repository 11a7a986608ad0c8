"""Fine-tuning jobs over real gRPC: workers' reporters, a scheduler that is killed and started again, and its files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.errors import InvalidRequest
from contracts.finetune import Job, Settings, check_place
from contracts.v1 import scheduler_pb2 as pb
from gateway.core.refusals import refusal
from tests.finetune_stack import FinetuneStack, until


async def refused(call: Any) -> tuple[int, str, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    found = refusal(error.value.details() or "")
    assert found is not None, error.value.details()
    return found.status, found.message, found.param


@pytest.fixture
async def make(tmp_path: Path, free_ports: Callable[[int], int]) -> AsyncIterator[Any]:
    made: list[FinetuneStack] = []

    async def one(nodes: int = 2, schedulers: int = 1, harvests: bool = True) -> FinetuneStack:
        stack = FinetuneStack(tmp_path / "data", free_ports(50), nodes, schedulers)
        if not harvests:
            stack.trainers = [None] * nodes
        made.append(stack)
        await stack.start()
        return stack

    yield one
    for stack in made:
        await stack.stop()


async def test_a_job_runs_where_most_is_spare_and_its_record_says_how_it_went(make: Any) -> None:
    s = await make()
    submitted = await s.stubs[0].SubmitFinetune(s.job(settings=Settings(rank=4)))
    assert submitted.progress.state == "queued" and submitted.events[0].message == "created: m:adapter"
    await s.runs()
    assert (await s.get()).node == "node-0" and s.trainers[0].jobs["ftjob-00000001"].settings.rank == 4
    s.trainers[0].advance(7)

    async def seven() -> bool:
        return (await s.get()).progress.step == 7

    await until(seven)
    found = await s.get()
    assert [c.step for c in found.checkpoints] == [5] and found.losses[-1].loss == pytest.approx(4 / 7)
    s.trainers[0].advance(7)
    await s.runs("succeeded")
    kept = json.loads((s.config.data / "finetune" / "ftjob-00000001.json").read_text())
    assert kept["job"]["settings"]["rank"] == 4


async def test_a_killed_scheduler_finds_its_jobs_where_they_are(make: Any) -> None:
    s = await make()
    for number in (1, 2, 3):
        await s.stubs[0].SubmitFinetune(s.job(number))
    await s.runs()
    await s.kill_scheduler()
    s.trainers[0].advance(3)
    await s.start_scheduler(0)

    async def found() -> bool:
        return (await s.get()).progress.step == 3

    await until(found)
    assert [t.started for t in s.trainers] == [["ftjob-00000001"], ["ftjob-00000002"]]
    assert (await s.get(3)).progress.state == "queued"
    s.trainers[1].advance(10)

    async def third() -> bool:
        return (await s.get(3)).node == "node-1"

    await until(third)


async def test_a_cancelled_job_is_stopped_and_a_repeated_submission_is_the_same_job(make: Any) -> None:
    s = await make(nodes=1)
    await s.stubs[0].SubmitFinetune(s.job())
    assert (await s.stubs[0].SubmitFinetune(s.job())).job.id == "ftjob-00000001"
    await s.runs()
    gone = await s.stubs[0].CancelFinetune(pb.FinetuneName(tenant="t", id="ftjob-00000001"))
    assert gone.progress.state == "cancelled"

    async def stopped() -> bool:
        return s.trainers[0].stopped == [("ftjob-00000001", True)] and not (await s.get()).node

    await until(stopped)


async def test_jobs_are_listed_by_page_and_tenant(make: Any) -> None:
    s = await make(nodes=1)
    for number in range(1, 4):
        await s.stubs[0].SubmitFinetune(s.job(number))
    first = await s.stubs[0].ListFinetunes(pb.ListFinetunesRequest(tenant="t", limit=2))
    assert [f.job.id[-1] for f in first.finetunes] == ["1", "2"] and first.more and not first.finetunes[0].events
    after = pb.ListFinetunesRequest(tenant="t", limit=2, after=first.finetunes[-1].job.id)
    rest = await s.stubs[0].ListFinetunes(after)
    assert [f.job.id[-1] for f in rest.finetunes] == ["3"] and not rest.more
    assert not (await s.stubs[0].ListFinetunes(pb.ListFinetunesRequest(tenant="u"))).finetunes
    assert (await s.stubs[0].ListFinetunes(pb.ListFinetunesRequest(after="ftjob-none"))).unknown_after


async def test_what_cannot_be_taken_is_refused_with_the_reason(make: Any, tmp_path: Path) -> None:
    s = await make(nodes=1)
    status, message, param = await refused(s.stubs[0].SubmitFinetune(s.job(settings=Settings(rank=1000))))
    assert (status, param) == (400, "rank") and "1 to 256" in message
    assert (await refused(s.get(7)))[0] == 404
    s.config.data.mkdir(parents=True, exist_ok=True)
    (s.config.data / "finetune").write_text("no directory")
    status, message, _ = await refused(s.stubs[0].SubmitFinetune(s.job()))
    assert status == 503 and "cannot be kept" in message
    assert (await refused(s.get()))[0] == 404, "what is not kept does not run"


async def test_a_fleet_whose_nodes_do_not_train_refuses_jobs_and_says_what_to_set(make: Any) -> None:
    s = await make(nodes=1, harvests=False)
    status, message, param = await refused(s.stubs[0].SubmitFinetune(s.job()))
    assert (status, param) == (400, "model") and "worker.harvest: auto" in message


async def test_the_first_scheduler_has_the_jobs_and_the_others_say_so(make: Any) -> None:
    s = await make(nodes=1, schedulers=2)
    await s.stubs[0].SubmitFinetune(s.job())
    await s.runs()
    assert "first scheduler" in (await refused(s.stubs[1].SubmitFinetune(s.job(2))))[1]
    assert s.trainers[0].started == ["ftjob-00000001"] and not s.trainers[0].stopped


async def test_a_file_that_is_damaged_is_left_alone_and_the_others_are_read(make: Any) -> None:
    s = await make(nodes=1)
    await s.stubs[0].SubmitFinetune(s.job())
    await s.kill_scheduler()
    bad = s.config.data / "finetune" / "ftjob-99999999.json"
    bad.write_text("{")
    await s.start_scheduler(0)
    await s.runs()
    assert bad.read_text() == "{"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("out", "/etc"),
        ("out", "{data}/adapters/t/another-job/out"),
        ("out", "{data}/files/t/ftjob-00000001/out"),
        ("data", "/var/secrets.jsonl"),
        ("validation", "{data}/adapters/u/ftjob-00000001/validation.jsonl"),
    ],
)
def test_a_gateways_job_reads_and_writes_in_its_own_folder(field: str, value: str, tmp_path: Path) -> None:
    place = f"{tmp_path}/adapters/t/ftjob-00000001"
    job = Job("ftjob-00000001", "t", "m", f"{place}/training.jsonl", f"{place}/out", f"{place}/validation.jsonl")
    check_place(job, tmp_path)
    with pytest.raises(InvalidRequest) as told:
        check_place(replace(job, **{field: value.format(data=tmp_path)}), tmp_path)
    assert told.value.param == field
