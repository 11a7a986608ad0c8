"""What a job came to is served, over real gRPC: files, commands to workers, the jobs' events, and a scheduler that is
killed meanwhile."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.v1 import scheduler_pb2 as pb
from runtime.adopted_models import adopted, directory_of, file_name
from tests.finetune_stack import FinetuneStack, until

NAME = "m:adapter"


@pytest.fixture
async def make(tmp_path: Path, free_ports: Callable[[int], int]) -> AsyncIterator[Any]:
    made: list[FinetuneStack] = []

    async def one(nodes: int = 2, **more: Any) -> FinetuneStack:
        stack = FinetuneStack(tmp_path / "data", free_ports(50), nodes, **more)
        made.append(stack)
        await stack.start()
        return stack

    yield one
    for stack in made:
        await stack.stop()


async def train(s: FinetuneStack, number: int = 1, *, merged: bool = True, **more: Any) -> None:
    """A job that succeeds."""
    job = s.job(number, register=True, **more)
    if merged:
        (Path(job.out) / "merged").mkdir(parents=True)
        (Path(job.out) / "merged" / "config.json").write_text(json.dumps({"upbeat_adapter": "a" * 64}))
    await s.stubs[0].SubmitFinetune(job)
    await _ends(s, number)


async def _ends(s: FinetuneStack, number: int) -> None:
    async def succeeded() -> bool:
        for trainer in s.trainers:
            assert trainer is not None
            trainer.advance(20)
        return (await s.get(number)).progress.state == "succeeded"

    await until(succeeded)


async def says(s: FinetuneStack, *wanted: str, number: int = 1) -> list[str]:
    """Wait for events; all of them."""

    async def said() -> bool:
        told.clear()
        told.extend(event.message for event in (await s.get(number)).events)
        return set(wanted) <= set(told)

    told: list[str] = []
    try:
        await until(said)
    except TimeoutError:
        pytest.fail(f"{wanted} not in {told}")
    return told


async def test_a_registered_model_is_served_by_one_worker_after_the_other(make: Any) -> None:
    s = await make()
    await train(s)
    told = await says(s, f"served as {NAME} on node-0", f"served as {NAME} on node-1")
    assert sorted(s.restarted) == [0, 1]
    first, second = s.restarted
    order = [f"served as {NAME} on node-{first}", f"node-{second} is started again to serve {NAME}"]
    assert told.index(order[0]) < told.index(order[1])
    [model] = adopted(s.config).values()
    assert model.name == NAME and model.entry.path == Path((await s.get()).job.out) / "merged"


async def test_a_job_that_does_not_register_restarts_nothing(make: Any) -> None:
    s = await make()
    await s.stubs[0].SubmitFinetune(s.job())
    await s.runs()
    for trainer in s.trainers:
        trainer.advance(20)
    await s.runs("succeeded")
    await s.services[0].adoptions.tick()
    assert not adopted(s.config) and not directory_of(s.config).exists() and not s.restarted


async def test_a_model_that_is_not_whole_is_not_served_and_the_job_says_so(make: Any) -> None:
    s = await make()
    await train(s, merged=False)

    async def told() -> bool:
        return any("cannot be served" in event.message for event in (await s.get()).events)

    await until(told)
    assert not s.restarted and not adopted(s.config)


async def test_a_worker_that_leaves_the_model_out_is_restarted_once_and_the_job_says_why(make: Any) -> None:
    s = await make()
    s.left_out[0][NAME] = "no room"  # as its next start finds
    await train(s)
    await says(s, f"node-0 does not serve {NAME}: no room", f"served as {NAME} on node-1")
    assert sorted(s.restarted) == [0, 1]


async def test_a_killed_scheduler_goes_on_without_starting_a_worker_twice(make: Any) -> None:
    s = await make()
    await train(s)
    await says(s, f"served as {NAME} on node-0", f"served as {NAME} on node-1")
    await s.services[0].finetunes.write()
    await s.kill_scheduler()
    await s.start_scheduler(0)
    await until(s.serve)
    for _ in range(3):
        await s.services[0].adoptions.tick()
    assert sorted(s.restarted) == [0, 1]
    assert [e.message for e in (await s.get()).events].count(f"served as {NAME} on node-0") == 1


async def test_a_removed_file_ends_the_rollout(make: Any) -> None:
    s = await make(nodes=1)
    s.services[0].adoptions.rollout.tick = lambda *_: ([], [])  # it waits
    await train(s)
    await says(s, f"will be served as {NAME}")
    (directory_of(s.config) / file_name(NAME)).unlink()
    del s.services[0].adoptions.rollout.tick
    s.services[0].adoptions._read_s = float("-inf")
    for _ in range(3):
        await s.services[0].adoptions.tick()
    assert not s.restarted
    assert NAME not in s.services[0].control.fleet.registered


async def test_a_file_that_vanishes_while_a_worker_restarts_stops_nothing(make: Any) -> None:
    s = await make(nodes=1)
    await train(s)
    await says(s, f"node-0 is started again to serve {NAME}")
    (directory_of(s.config) / file_name(NAME)).unlink()
    adoptions = s.services[0].adoptions
    adoptions._read_s = float("-inf")

    async def over() -> bool:
        return not adoptions.rollout.clearing

    await until(over)
    await s.runs("succeeded")


async def test_two_jobs_cannot_have_one_name(make: Any) -> None:
    s = await make()
    await train(s)
    with pytest.raises(Exception, match="is another job's model"):
        await s.stubs[0].SubmitFinetune(s.job(2, register=True))
    other = s.job(3, register=True, suffix="other")
    other.out = (await s.get()).job.out
    with pytest.raises(Exception, match="another job writes there"):
        await s.stubs[0].SubmitFinetune(other)


async def test_a_model_is_removed_by_its_tenant_and_its_name_is_free_again(make: Any) -> None:
    s = await make()
    await train(s)
    await says(s, f"served as {NAME} on node-0", f"served as {NAME} on node-1")
    for tenant, name in (("other", NAME), ("t", "m"), ("t", "m:none")):
        with pytest.raises(Exception, match="no model"):
            await s.stubs[0].RemoveModel(pb.RemoveModelRequest(tenant=tenant, model=name))
    await s.stubs[0].RemoveModel(pb.RemoveModelRequest(tenant="t", model=NAME))
    await says(s, f"node-0 does not serve {NAME}", f"node-1 does not serve {NAME}")
    assert sorted(s.restarted) == [0, 0, 1, 1] and not adopted(s.config)
    with pytest.raises(Exception, match="no model"):
        await s.stubs[0].RemoveModel(pb.RemoveModelRequest(tenant="t", model=NAME))
    await train(s, 2)
    await says(s, f"served as {NAME} on node-0", f"served as {NAME} on node-1", number=2)
