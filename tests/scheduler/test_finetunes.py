"""Which device has which fine-tuning job, and what becomes of a job when its device does."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidRequest, NotFound, RateLimited, RequestError, Unavailable
from contracts.finetune import RANGES, Job, JobState, Progress, Settings, check_job
from contracts.finetune_wire import job_from_wire, job_to_wire, progress_from_wire, progress_to_wire
from scheduler.core import finetunes as core_module
from scheduler.core.finetune_record import MOST_CHECKPOINTS, MOST_EVENTS, MOST_LOSSES, Record
from scheduler.core.finetune_stored import from_stored, to_stored
from scheduler.core.finetunes import (
    BEGIN_S,
    LOST_S,
    MOST_ENDED,
    MOST_OPEN,
    MOST_TRIES,
    MOVE_S,
    STOP_S,
    Finetunes,
    Host,
    Report,
    Start,
    Stop,
)
from tests.played_trainer import PlayedTrainer


def job(number: int = 1, tenant: str = "t", model: str = "m", created_s: float = 0.0) -> Job:
    return Job(f"ftjob-{number:08d}", tenant, model, "/data.jsonl", f"/out/{number}", created_s=created_s or number)


class World:
    """A core and its devices; `step` lets time pass, and each device report and obey."""

    def __init__(self, **spare: float) -> None:
        self.core, self.now = Finetunes(epoch_s=1000.0), 0.0
        self.kept: dict[str, int] = {}
        self.devices = {name: PlayedTrainer(amount, self.kept) for name, amount in spare.items()}
        self.hosts = {name: Host(frozenset({"m"})) for name in spare}
        self.said: list[Start | Stop] = []
        self.step(0.0)

    def submit(self, number: int = 1, **more: Any) -> Record:
        made = job(number, **more)
        assert self.core.check(made, self.hosts) is None
        return self.core.add(made, self.now)

    def report(self, name: str) -> None:
        device = self.devices[name]
        told = {p.id: p for p in device.progress()}
        self.core.reported(name, Report(device.spare(), device.refuses(), told), self.now)

    def step(self, seconds: float = 0.5, advance: int = 0) -> list[Start | Stop]:
        self.now += seconds
        for name, device in self.devices.items():
            device.advance(advance)
            if self.hosts[name].here:
                self.report(name)
        commands = self.core.tick(self.hosts, self.now)
        self.core.validate()
        for command in commands:
            device = self.devices[command.node]
            if isinstance(command, Start):
                device.start(command.job)
            else:
                device.stop(command.job_id, command.cancelled)
                if not command.cancelled:
                    device.told.pop(command.job_id, None)  # as `runtime.training` hides it
        self.said += commands
        return commands

    def kill(self, name: str) -> None:
        """The worker dies, and a new one comes at once."""
        self.core.left(name)
        self.devices[name] = PlayedTrainer(self.devices[name].spare(), self.kept)

    def cut(self, name: str) -> None:
        """Nothing is heard of the device; what it does goes on."""
        self.core.left(name)
        self.hosts[name] = replace(self.hosts[name], here=False, takes=False)


def messages(record: Record) -> str:
    return " | ".join(event.message for event in record.events)


# ---- where a job goes ----------------------------------------------------------------------------------------------
def test_a_job_goes_to_the_device_that_has_most_to_spare_and_ends_there() -> None:
    w = World(a=0.2, b=0.7, c=0.4)
    record = w.submit()
    assert record.state is JobState.QUEUED and record.events[0].at_s == 1000.0
    assert w.step() == [Start("b", record.job)]
    w.step()
    assert record.state is JobState.RUNNING and record.device == "b" and record.started_s == 1000.5
    w.step(advance=10)
    assert (record.state, record.device, record.ended_s) == (JobState.SUCCEEDED, "", 1000.0 + w.now)
    assert [c.step for c in record.checkpoints] == [10] or [c.step for c in record.checkpoints] == [5, 10]
    assert messages(record).endswith("succeeded") and "starts on b" in messages(record)


def test_a_device_without_the_model_or_that_refuses_gets_no_job() -> None:
    w = World(a=0.2, b=0.9, c=0.9, d=-1.0)
    w.hosts["b"] = Host(frozenset({"other"}))
    w.devices["c"].why = "its memory is too small"
    w.step()
    record = w.submit()
    assert w.step() == [Start("a", record.job)]


def test_a_device_has_one_job_at_a_time_and_the_others_wait_the_oldest_first() -> None:
    w = World(a=0.5)
    first, third, second = w.submit(1), w.submit(3), w.submit(2)
    w.step()
    w.step()
    assert [r.state for r in (first, second, third)] == [JobState.RUNNING, JobState.QUEUED, JobState.QUEUED]
    w.step(advance=10)
    assert second.device == "a" and not third.device


def test_tenants_take_turns_however_many_jobs_one_has() -> None:
    w = World(a=0.5, b=0.5)
    many = [w.submit(n, tenant="many") for n in range(1, 6)]
    few = w.submit(9, tenant="few")
    w.step()
    assert few.device and sum(bool(r.device) for r in many) == 1, "each has a device"
    w.step(advance=10)
    assert few.state is JobState.SUCCEEDED
    again = w.submit(10, tenant="few")
    w.step(advance=10)
    w.step(advance=10)
    w.step()
    assert again.device or again.ended, "it does not wait for all of the others"


def test_a_job_whose_model_no_free_device_has_does_not_hold_up_the_others() -> None:
    w = World(a=0.5, b=0.5)
    w.hosts["b"] = Host(frozenset({"n"}))
    w.submit(1)
    blocked, other = w.submit(2), w.submit(3, model="n")
    w.step()
    assert not blocked.device and other.device == "b"


# ---- what is refused -----------------------------------------------------------------------------------------------
def refused(w: World, made: Job) -> RequestError:
    with pytest.raises(RequestError) as error:
        w.core.check(made, w.hosts)
    return error.value


def test_a_fleet_that_does_not_train_says_what_to_set() -> None:
    w = World()
    w.hosts["a"] = Host(frozenset({"m"}))
    error = refused(w, job())
    assert isinstance(error, InvalidRequest) and "worker.harvest: auto" in error.message and error.param == "model"
    w = World(a=0.5)
    w.devices["a"].why = "it lacks memory"
    w.step()
    assert "a: it lacks memory" in refused(w, job()).message
    assert isinstance(refused(w, job(model="n")), Unavailable)


def test_the_same_job_again_is_known_and_another_tenants_id_is_refused() -> None:
    w = World(a=0.5)
    record = w.submit()
    assert w.core.check(record.job, w.hosts) is record
    assert refused(w, replace(record.job, tenant="other")).param == "id"


def test_two_jobs_cannot_write_into_one_directory_until_the_first_has_ended() -> None:
    w = World(a=0.5)
    w.submit(1)
    second = replace(job(2), out="/out/1")
    assert refused(w, second).param == "out"
    for _ in range(3):
        w.step(advance=10)
    assert w.core.check(second, w.hosts) is None


def test_a_tenant_has_so_many_open_jobs_and_others_have_theirs() -> None:
    w = World(a=0.5)
    for number in range(MOST_OPEN):
        w.submit(number)
    assert isinstance(refused(w, job(999)), RateLimited)
    assert w.core.check(job(999, tenant="other"), w.hosts) is None


def test_the_oldest_ended_jobs_of_a_tenant_are_forgotten() -> None:
    w = World(a=0.5)
    for number in range(MOST_ENDED + 5):
        w.submit(number)
        w.core.cancel(job(number).id, "t", w.now)
    w.submit(9999)
    kept = w.core.listed("t")
    assert len(kept) == MOST_ENDED + 1 and job(0).id not in w.core.records and job(0).id in w.core.changed


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"id": "../../x"}, "id"),
        ({"id": "ftjob-../x1234567"}, "id"),
        ({"suffix": "a/b"}, "suffix"),
        ({"suffix": ""}, "suffix"),
        ({"model": "m" * 125}, "suffix"),
        ({"data": "data.jsonl"}, "data"),
        ({"out": "/a/../b"}, "out"),
        ({"out": "/a\0b"}, "out"),
        ({"validation": "x"}, "validation"),
        ({"note": "x" * (33 << 10)}, "note"),
    ],
)
def test_a_field_that_is_wrong_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_job(replace(job(), **change))
    assert error.value.param == param


@given(st.sampled_from(sorted(RANGES)), st.floats() | st.integers())
def test_a_setting_out_of_its_range_is_named_and_others_pass(name: str, value: float) -> None:
    changed = replace(job(), settings=replace(Settings(), **{name: value}))
    least, most = RANGES[name]
    if math.isfinite(value) and least <= value <= most:
        check_job(changed)
        return
    with pytest.raises(InvalidRequest) as error:
        check_job(changed)
    assert error.value.param == name


# ---- a job moves ---------------------------------------------------------------------------------------------------
def test_a_job_leaves_a_node_that_drains_and_begins_elsewhere_only_when_it_has_left() -> None:
    w = World(a=0.9, b=0.5)
    record = w.submit()
    for _ in range(2):
        w.step()
    w.step(advance=6)
    w.hosts["a"] = replace(w.hosts["a"], takes=False, keeps=False)
    assert w.step() == [Stop("a", record.job.id, False)]
    assert record.device == "a" and record.leaving
    assert w.step() == [Start("b", record.job)]
    w.step()
    assert record.progress.step == 5, "from its last checkpoint"
    assert "moves from a, which drains" in messages(record) and record.tries == 0


def test_a_job_moves_when_another_device_has_clearly_more_for_a_minute_and_not_before() -> None:
    w = World(a=0.5, b=0.1)
    record = w.submit()
    w.step()
    w.step()
    w.devices["a"].set_spare(0.05)
    w.devices["b"].set_spare(0.2)
    w.step(MOVE_S)
    w.step(MOVE_S)
    assert record.device == "a", "0.15 more is not clearly more"
    w.devices["b"].set_spare(0.3)
    w.step()
    w.step(MOVE_S - 1)
    w.devices["a"].set_spare(0.2)
    w.step()
    w.devices["a"].set_spare(0.05)
    w.step()
    assert not w.step(MOVE_S - 1), "it must be so all the time"
    assert w.step(2.0) == [Stop("a", record.job.id, False)]
    w.step()
    w.step()
    assert record.device == "b" and record.state is JobState.RUNNING


def test_a_job_leaves_a_device_that_serves_its_model_no_more() -> None:
    w = World(a=0.9, b=0.5)
    record = w.submit()
    w.step()
    w.step()
    w.hosts["a"] = Host(frozenset({"n"}))
    w.step()
    w.step()
    assert record.device == "b" and "does not serve its model" in messages(record)


# ---- nodes die -----------------------------------------------------------------------------------------------------
def test_a_job_of_a_killed_worker_goes_on_there_after_a_while_when_there_is_no_other() -> None:
    w = World(a=0.9)
    record = w.submit()
    w.step()
    w.step()
    w.step(advance=6)
    w.kill("a")
    w.step()
    assert record.state is JobState.QUEUED and "the worker of a was restarted" in record.progress.waits
    assert not record.device
    w.step(30.0)
    w.step()
    assert record.state is JobState.RUNNING and record.progress.step == 5


def test_a_device_that_is_away_keeps_its_job_for_a_while() -> None:
    w = World(a=0.9, b=0.5)
    record = w.submit()
    w.step()
    w.step()
    w.cut("a")
    w.step()
    w.step(LOST_S - 1)
    assert record.device == "a"
    w.hosts["a"] = Host(frozenset({"m"}))
    w.step()
    w.step(LOST_S)
    assert record.device == "a" and record.tries == 0 and w.devices["a"].started == [record.job.id]


def test_a_lost_job_goes_elsewhere_and_who_comes_back_with_it_is_stopped() -> None:
    w = World(a=0.9, b=0.5)
    record = w.submit()
    w.step()
    w.step()
    w.cut("a")
    w.step()
    w.step(LOST_S)
    w.step(LOST_S)
    w.step()
    assert record.device == "b" and "a does not answer any more" in messages(record)
    w.hosts["a"] = Host(frozenset({"m"}))
    assert w.step() == [Stop("a", record.job.id, False)]
    assert record.device == "b" and not w.devices["a"].jobs
    assert not w.step(STOP_S)


def test_a_job_that_nobody_has_by_the_book_is_where_it_runs() -> None:
    w = World(a=0.9, b=0.5)
    record = w.submit()
    w.step()
    w.step()
    w.cut("a")
    w.cut("b")
    w.step()
    w.step(LOST_S)
    assert not record.device
    w.hosts["a"] = Host(frozenset({"m"}))
    w.step()
    assert record.device == "a" and record.state is JobState.RUNNING and len(w.devices["a"].started) == 1


def test_a_device_that_does_not_begin_is_given_up() -> None:
    w = World(a=0.9, b=0.5)
    w.devices["a"].start = lambda job: None  # type: ignore[method-assign]
    record = w.submit()
    w.step()
    w.step(BEGIN_S - 1)
    assert record.device == "a", "its command may be on its way"
    w.step(1.0)
    assert not record.device and "a does not begin it" in messages(record)
    w.step(10.0)
    assert record.device == "b", "rather elsewhere"


def test_a_device_that_begins_a_job_too_late_keeps_only_the_one_that_it_has_by_the_book() -> None:
    w = World(a=0.9)
    begin, w.devices["a"].start = w.devices["a"].start, lambda job: None  # type: ignore[method-assign]
    first, second = w.submit(1), w.submit(2)
    w.step()
    w.step(BEGIN_S)
    assert (first.device, second.device) == ("", "a")
    for late in (first, second):
        begin(late.job)
    assert w.step() == [Stop("a", first.job.id, False)]
    assert (first.device, second.device) == ("", "a") and list(w.devices["a"].jobs) == [second.job.id]


# ---- jobs fail -----------------------------------------------------------------------------------------------------
def test_a_job_that_fails_for_its_own_reason_has_failed_and_says_why() -> None:
    w = World(a=0.9, b=0.5)
    record = w.submit()
    w.step()
    w.devices["a"].fail(record.job.id, "line 3: no message of the assistant", retry=False)
    w.step()
    assert (record.state, record.progress.error) == (JobState.FAILED, "line 3: no message of the assistant")
    assert record.events[-1].level == "error" and not w.step(100.0)


def test_a_job_that_fails_for_a_reason_of_its_node_is_tried_elsewhere_and_at_last_given_up() -> None:
    w = World(a=0.9, b=0.5)
    record = w.submit()
    tried = []
    for _ in range(400):
        for command in w.step(1.0):
            if isinstance(command, Start):
                tried.append(command.node)
                w.devices[command.node].fail(record.job.id, "the trainer has died", retry=True)
    assert record.state is JobState.FAILED and "the trainer has died; given up after 5 tries" in record.progress.error
    assert tried == ["a", "b", "a", "b", "a"] and len(tried) == MOST_TRIES


def test_tries_are_counted_since_the_last_checkpoint() -> None:
    w = World(a=0.9)
    record = w.submit()
    for _ in range(3):
        w.step(60.0)
        w.devices["a"].fail(record.job.id, "the trainer has died", retry=True)
        w.step()
    assert record.tries == 3
    w.step(60.0)
    w.step(advance=5)
    assert record.tries == 0 and record.checkpoints[-1].step == 5


# ---- jobs are cancelled --------------------------------------------------------------------------------------------
def test_a_cancelled_job_ends_at_once_and_its_device_is_free_when_it_has_stopped() -> None:
    w = World(a=0.9)
    record, next_one = w.submit(1), w.submit(2)
    w.step()
    w.step()
    w.core.cancel(record.job.id, "t", w.now)
    assert record.state is JobState.CANCELLED
    assert w.step() == [Stop("a", record.job.id, True)]
    assert record.device == "a" and not next_one.device
    assert w.step() == [Start("a", next_one.job)]
    assert record.state is JobState.CANCELLED and not record.device


def test_a_job_that_waits_is_cancelled_without_anybodys_help_and_twice_is_the_same() -> None:
    w = World(a=-1.0)
    record = w.submit()
    for _ in range(2):
        assert w.core.cancel(record.job.id, "t", w.now).state is JobState.CANCELLED
    assert not w.step()


def test_a_job_that_has_succeeded_cannot_be_cancelled() -> None:
    w = World(a=0.9)
    record = w.submit()
    w.step()
    w.step(advance=10)
    with pytest.raises(InvalidRequest, match="has succeeded"):
        w.core.cancel(record.job.id, "t", w.now)


def test_a_tenant_sees_its_own_jobs_only() -> None:
    w = World(a=0.9)
    w.submit(1, tenant="x")
    w.submit(2, tenant="y")
    assert [r.job.tenant for r in w.core.listed("x")] == ["x"] and len(w.core.listed()) == 2
    for call in (lambda: w.core.get(job(1).id, "y"), lambda: w.core.cancel(job(1).id, "y", 0.0)):
        with pytest.raises(NotFound):
            call()
    assert w.core.get(job(1).id).job.tenant == "x"


# ---- what is kept --------------------------------------------------------------------------------------------------
def test_a_record_stays_small_however_long_its_job_is() -> None:
    record = Record(job(), Progress(job().id, JobState.RUNNING))
    for step in range(1, 20_000):
        at = tuple(range(max(step - 3, 1), step + 1))
        record.learn(Progress(job().id, JobState.RUNNING, step, 20_000, 1.0 / step, checkpoints=at), float(step))
    assert len(record.events) == MOST_EVENTS and len(record.checkpoints) == MOST_CHECKPOINTS
    steps = [loss.step for loss in record.losses]
    assert MOST_LOSSES // 2 <= len(steps) <= MOST_LOSSES and steps == sorted(set(steps))
    assert steps[0] == 1 and steps[-1] == 19_999
    assert record.events[-1].number > MOST_EVENTS and len(json.dumps(to_stored(record))) < 200_000


def test_what_is_stored_comes_back_as_it_was() -> None:
    w = World(a=0.9)
    record = w.submit()
    w.step()
    w.step(advance=6)
    back = from_stored(json.loads(json.dumps(to_stored(record), allow_nan=False)))
    assert (back.job, back.device, back.events, back.checkpoints) == (
        record.job,
        "a",
        record.events,
        record.checkpoints,
    )
    assert repr(back.progress) == repr(record.progress) and repr(back.losses) == repr(record.losses)


@pytest.mark.parametrize("damage", [None, [], {}, {"format": 2}, {"format": 1, "job": {}}, {"format": 1, "job": 3}])
def test_a_file_that_is_damaged_is_no_record(damage: Any) -> None:
    with pytest.raises(ValueError, match=r"format|no record"):
        from_stored(damage)


def test_jobs_and_progress_cross_the_wire_unchanged() -> None:
    sent = replace(
        job(), settings=Settings(rank=4, alpha=2.5, seed=(1 << 63) - 1, tpot_ms=40.0), note="{}", register=True
    )
    assert job_from_wire(job_to_wire(sent)) == sent
    told = Progress(
        sent.id, JobState.FAILED, 3, 9, 0.5, float("nan"), 10, 1.5, 2, 4, 1, 2, 0.04, (1, 3), "e", "w", True
    )
    assert repr(progress_from_wire(progress_to_wire(told))) == repr(told)


def test_a_restarted_scheduler_loses_nothing_and_begins_nothing_twice() -> None:
    w = World(a=0.9, b=0.5)
    running, ends, waiting = w.submit(1), w.submit(2), w.submit(3)
    w.step()
    w.step()
    stored = [json.dumps(to_stored(r)) for r in (running, ends, waiting)]
    w.devices["b"].advance(10)
    w.core = Finetunes(epoch_s=1000.0)
    for text in stored:
        w.core.restore(from_stored(json.loads(text)))
    w.core.validate()
    w.said.clear()
    w.step()
    assert w.core.records[running.job.id].device == "a"
    assert w.core.records[ends.job.id].state is JobState.SUCCEEDED
    assert w.said == [Start("b", waiting.job)]


def test_the_module_says_its_numbers() -> None:
    assert core_module.__doc__ is not None and all(name in core_module.__doc__ for name in ("MOVE_S", "LOST_S"))
