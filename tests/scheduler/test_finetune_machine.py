"""Random lives of fine-tuning jobs: workers die, are cut off and come back, nodes drain, commands are lost, trainers
fail, and the scheduler is restarted from its files. No job is lost, none is on two devices by the book, and what has
ended stays so."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from contracts.errors import RequestError
from contracts.finetune import Job, JobState
from scheduler.core.finetune_stored import from_stored, to_stored
from scheduler.core.finetunes import Finetunes, Host, Report, Start, Stop
from tests.played_trainer import PlayedTrainer

DEVICES = ["a", "b", "c/0"]


class FinetuneMachine(RuleBasedStateMachine):
    """See the module."""

    devices, jobs = st.sampled_from(DEVICES), st.integers(1, 5)

    def __init__(self) -> None:
        super().__init__()
        self.core, self.now = Finetunes(), 1.0
        self.kept: dict[str, int] = {}
        self.trainers = {name: PlayedTrainer(0.5, self.kept) for name in DEVICES}
        self.hosts = {name: Host(frozenset({"m"} if name != "b" else {"m", "n"})) for name in DEVICES}
        self.commands: dict[str, deque[Start | Stop]] = defaultdict(deque)
        self.hidden: dict[str, set[str]] = defaultdict(set)
        self.submitted: set[str] = set()
        self.ended: dict[str, JobState] = {}
        self.files: dict[str, str] = {}
        for name in DEVICES:
            self.report(name)
        for number in (1, 2):
            self.submit(number, "t", "m")
        self.live(2)

    @rule(rounds=st.integers(1, 4))
    def live(self, rounds: int) -> None:
        """All is well for a moment."""
        for _ in range(rounds):
            self.tick(0.5)
            for name in DEVICES:
                while self.commands[name] and self.hosts[name].here:
                    self.obey(name)
                self.report(name)

    # ---- users -------------------------------------------------------------------------------------------------
    @rule(number=jobs, tenant=st.sampled_from("tu"), model=st.sampled_from("mn"))
    def submit(self, number: int, tenant: str, model: str) -> None:
        job = Job(f"ftjob-{number:08d}", tenant, model, "/d", f"/o/{number}", created_s=self.now)
        try:
            if self.core.check(job, self.hosts) is None:
                self.files[job.id] = json.dumps(to_stored(Finetunes().add(job, self.now)))
                self.core.add(job, self.now)
                self.submitted.add(job.id)
        except RequestError:
            pass

    @rule(number=jobs)
    def cancel(self, number: int) -> None:
        try:
            self.core.cancel(f"ftjob-{number:08d}", "", self.now)
        except RequestError:
            return
        self.store()

    # ---- devices -----------------------------------------------------------------------------------------------
    @rule(name=devices)
    def report(self, name: str) -> None:
        if not self.hosts[name].here:
            return
        trainer, hidden = self.trainers[name], self.hidden[name]
        told = {p.id: p for p in trainer.progress() if not (p.state.ended and p.id in hidden)}
        self.core.reported(name, Report(trainer.spare(), trainer.refuses(), told), self.now)

    @rule(name=devices, steps=st.integers(1, 6))
    def advance(self, name: str, steps: int) -> None:
        self.trainers[name].advance(steps)

    @rule(name=devices)
    def obey(self, name: str) -> None:
        if not self.commands[name] or not self.hosts[name].here:
            return
        command = self.commands[name].popleft()
        if isinstance(command, Start):
            self.trainers[name].start(command.job)
            self.hidden[name].discard(command.job.id)
        else:
            self.trainers[name].stop(command.job_id, command.cancelled)
            if not command.cancelled:
                self.hidden[name].add(command.job_id)

    @rule(name=devices, retry=st.booleans())
    def fail(self, name: str, retry: bool) -> None:
        for job_id in list(self.trainers[name].jobs):
            self.trainers[name].fail(job_id, "it failed", retry=retry)

    @rule(name=devices, spare=st.sampled_from([-1.0, 0.0, 0.05, 0.4, 0.9]))
    def load(self, name: str, spare: float) -> None:
        self.trainers[name].set_spare(spare)

    @rule(name=devices, keeps=st.booleans())
    def drain(self, name: str, keeps: bool) -> None:
        self.hosts[name] = replace(self.hosts[name], takes=keeps and self.hosts[name].here, keeps=keeps)

    @rule(name=devices)
    def cut(self, name: str) -> None:
        self.commands[name].clear()
        self.core.left(name)
        self.hosts[name] = replace(self.hosts[name], here=False, takes=False)

    @rule(name=devices)
    def heal(self, name: str) -> None:
        self.hosts[name] = replace(self.hosts[name], here=True, takes=self.hosts[name].keeps)
        self.report(name)

    @rule(name=devices)
    def kill(self, name: str) -> None:
        self.cut(name)
        self.trainers[name] = PlayedTrainer(0.5, self.kept)
        self.hidden[name].clear()

    # ---- the scheduler -----------------------------------------------------------------------------------------
    @rule(dt=st.sampled_from([0.5, 0.5, 3.0, 25.0, 70.0]))
    def tick(self, dt: float) -> None:
        self.now += dt
        for command in self.core.tick(self.hosts, self.now):
            record = self.core.records.get(command.job_id if isinstance(command, Stop) else command.job.id)
            if isinstance(command, Start):
                assert record is not None and record.device == command.node and not record.ended
                assert "n" not in record.job.model or command.node == "b"
            else:
                assert record is None or not record.placed or record.device != command.node
            self.commands[command.node].append(command)
        self.store()

    def store(self) -> None:
        for job_id in self.core.changed | self.core.advanced:
            self.files[job_id] = json.dumps(to_stored(self.core.records[job_id]), allow_nan=False)
        self.core.changed, self.core.advanced = set(), set()

    @rule(stored=st.booleans())
    def restart(self, stored: bool) -> None:
        """stored: it was stopped; else killed, with what its last tick has not written."""
        if stored:
            self.store()
        self.core = Finetunes()
        for text in self.files.values():
            self.core.restore(from_stored(json.loads(text)))
        for name in DEVICES:
            self.commands[name].clear()
            self.report(name)

    # ---- what holds --------------------------------------------------------------------------------------------
    @invariant()
    def the_book_is_consistent_and_complete(self) -> None:
        self.core.validate()
        assert self.submitted == self.core.records.keys()

    @invariant()
    def what_has_ended_stays_so(self) -> None:
        for job_id, text in self.files.items():
            state = JobState(json.loads(text)["progress"]["state"])
            if state.ended:
                assert self.ended.setdefault(job_id, state) is state
                assert self.core.records[job_id].state is state

    def teardown(self) -> None:
        """When all is well again, every job ends, and no device has one that it should not."""
        for name in DEVICES:
            self.hosts[name] = replace(self.hosts[name], here=True, takes=True, keeps=True)
            self.trainers[name].set_spare(0.5)
        for _ in range(12):
            self.tick(2.0)
            self.live(1)
        for name, trainer in self.trainers.items():
            by_the_book = {job_id for job_id, r in self.core.records.items() if r.placed and r.device == name}
            assert trainer.jobs.keys() <= by_the_book, f"{name} trains what it should not"
        for _ in range(400):
            for name in DEVICES:
                self.trainers[name].advance(3)
            self.live(1)
            self.tick(2.0)
        for record in self.core.records.values():
            assert record.ended and not record.device, (record.state, record.progress.waits, record.events[-3:])
        assert not any(trainer.jobs for trainer in self.trainers.values())
        self.what_has_ended_stays_so()


TestFinetuneMachine = FinetuneMachine.TestCase
TestFinetuneMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
