"""What a worker does when schedulers speak of fine-tuning jobs, and what it says of them."""

from __future__ import annotations

from contracts.finetune import Job, JobState
from contracts.finetune_wire import job_to_wire
from contracts.v1 import scheduler_pb2 as pb
from runtime.training import Training
from tests.played_trainer import PlayedTrainer

JOB = Job("ftjob-00000001", "t", "m", "/data.jsonl", "/out")


def start() -> pb.FinetuneCommand:
    return pb.FinetuneCommand(start=job_to_wire(JOB))


def stop(cancelled: bool) -> pb.FinetuneCommand:
    return pb.FinetuneCommand(stop=pb.StopFinetune(id=JOB.id, cancelled=cancelled))


def states(training: Training) -> list[str]:
    return [job.state for job in training.report().jobs]


async def test_a_job_is_begun_as_it_was_submitted_and_reported_at_once() -> None:
    trainer = PlayedTrainer(0.25, {})
    training = Training(trainer)
    await training.obey(start())
    assert trainer.jobs == {JOB.id: JOB} and states(training) == ["running"]
    assert training.report().spare == 0.25 and training.report().refuses == ""
    trainer.why = "no memory"
    assert training.report().refuses == "no memory"


async def test_a_cancelled_job_is_said_to_be_and_one_that_goes_on_elsewhere_is_forgotten() -> None:
    trainer = PlayedTrainer(kept={})
    training = Training(trainer)
    await training.obey(start())
    await training.obey(stop(cancelled=False))
    assert states(training) == []
    await training.obey(start())
    await training.obey(stop(cancelled=True))
    assert states(training) == ["cancelled"]


async def test_a_failed_try_is_forgotten_when_the_scheduler_says_so_and_the_next_one_is_told() -> None:
    trainer = PlayedTrainer(kept={})
    training = Training(trainer)
    await training.obey(start())
    trainer.fail(JOB.id, "the trainer has died", retry=True)
    (told,) = training.report().jobs
    assert (told.state, told.error, told.retry) == (JobState.FAILED, "the trainer has died", True)
    await training.obey(stop(cancelled=False))
    assert states(training) == [], "though the trainer still knows of it"
    await training.obey(start())
    assert states(training) == ["running"]


async def test_a_trainer_that_raises_does_not_end_the_worker() -> None:
    trainer = PlayedTrainer(kept={})
    trainer.start = lambda job: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    training = Training(trainer)
    await training.obey(start())
    assert states(training) == []
