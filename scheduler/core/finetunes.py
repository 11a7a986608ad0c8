"""Which device runs which fine-tuning job: events and their time go in, commands to workers come out of `tick`.

Rules:
1. A device has one job at most. A job goes to the device that serves its model and has most decode time to spare.
2. Among tenants, who has fewest running jobs is first, then who was served longest ago; within a tenant the oldest job.
3. A job moves when its device drains or loses its model, or when the device has little to spare and another clearly
   more for `MOVE_S`. It is placed again only when the device says that it has it no more.
4. A device that is away for `LOST_S` has lost its job. So has one that reports without it: its worker was restarted.
5. A job that fails for a reason of its node is tried again, later and rather elsewhere, up to `MOST_TRIES` times
   without a new checkpoint between them. One that fails for a reason of its own has failed.
6. A device is told to stop what it should not run. What it runs while the book has the job nowhere is where the job is:
   so nothing is lost or begun twice when the scheduler restarts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contracts.errors import InvalidRequest, NotFound, RateLimited, Unavailable
from contracts.finetune import Job, JobState, Progress, check_job
from scheduler.core.finetune_record import Record

#: Seconds until a device that is away has lost its job, until one must say that it has begun, and between two orders to
#: stop.
LOST_S, BEGIN_S, STOP_S = 20.0, 20.0, 5.0
#: A job moves from a device with less to spare than `LITTLE` to one with `CLEARLY` more, after `MOVE_S` seconds of it.
LITTLE, CLEARLY, MOVE_S = 0.1, 0.2, 60.0
#: Failures for reasons of nodes, and seconds to wait after the first one; twice as long after each further one.
MOST_TRIES, AGAIN_S = 5, 5.0
#: Of one tenant: jobs that have not ended, and jobs that have and are remembered.
MOST_OPEN, MOST_ENDED = 100, 200


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of jobs. spare, refuses: as `Trains` has it."""

    spare: float
    refuses: str
    jobs: Mapping[str, Progress]


@dataclass(frozen=True, slots=True)
class Host:
    """A device now. models: that it serves with our engine. here: it reports. takes: new work. keeps: what it has may
    go on."""

    models: frozenset[str]
    here: bool = True
    takes: bool = True
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class Start:
    """To a device's worker: begin the job, or go on with it."""

    node: str
    job: Job


@dataclass(frozen=True, slots=True)
class Stop:
    """To a device's worker: end the job, as `Trains.stop` says."""

    node: str
    job_id: str
    cancelled: bool


@dataclass(slots=True)
class _Trainer:
    """A device's last report; None: it is away. stopped: by job, when it was last told to stop."""

    report: Report | None = None
    stopped: dict[str, float] = field(default_factory=dict)


_AWAY = Host(frozenset(), here=False, takes=False, keeps=False)


def _fitting(record: Record, free: Mapping[str, Report], hosts: Mapping[str, Host]) -> dict[str, Report]:
    """Those of the free devices that could begin this job: they serve its model, and have forgotten former tries."""
    job = record.job
    return {n: told for n, told in free.items() if job.model in hosts[n].models and job.id not in told.jobs}


class Finetunes:
    """See the module. Methods mutate it. changed: ids of records whose place or state has changed since the shell has
    stored them, forgotten ones among them; advanced: those that have got on only."""

    def __init__(self, epoch_s: float = 0.0) -> None:
        """epoch_s: seconds since the epoch at time 0 of the scheduler's clock."""
        self.records: dict[str, Record] = {}
        self.changed: set[str] = set()
        self.advanced: set[str] = set()
        self._epoch_s = epoch_s
        self._trainers: dict[str, _Trainer] = {}
        self._served: dict[str, float] = {}  #: by tenant: when a job of it last started

    # ---- users -------------------------------------------------------------------------------------------------
    def check(self, job: Job, hosts: Mapping[str, Host]) -> Record | None:
        """The record of a job that is known already. Raises RequestError when the job cannot be taken: a wrong field,
        no device that trains its model, another job with the same directory or name, too many jobs of its tenant."""
        check_job(job)
        if (known := self.records.get(job.id)) is not None:
            if known.job.tenant != job.tenant:
                raise InvalidRequest("id: another job has it; give another one", param="id")
            return known
        self._check_trains(job.model, hosts)
        open_ = [r for r in self.records.values() if not r.ended or r.device]
        served = [r for r in self.records.values() if r.serves or (r.job.register and not r.ended)]
        if any(r.job.out == job.out for r in [*open_, *served]):
            raise InvalidRequest(f"out = {job.out!r}: another job writes there; give another directory", param="out")
        if job.register and any(r.job.fine_tuned_model == job.fine_tuned_model for r in served):
            raise InvalidRequest(
                f"suffix: {job.fine_tuned_model} is another job's model; give another one", param="suffix"
            )
        if sum(r.job.tenant == job.tenant and not r.ended for r in open_) >= MOST_OPEN:
            raise RateLimited(f"{MOST_OPEN} fine-tuning jobs of yours wait or run; cancel some, or wait for their end")
        return None

    def _check_trains(self, model: str, hosts: Mapping[str, Host]) -> None:
        have = [name for name, host in hosts.items() if model in host.models and host.here]
        if not have:
            raise Unavailable(f"no node serves the model {model!r} at the moment; try again")
        told = {name: t.report for name in have if (t := self._trainers.get(name)) is not None and t.report is not None}
        if any(not report.refuses for report in told.values()):
            return
        why = "; ".join(f"{name}: {report.refuses}" for name, report in sorted(told.items()))
        raise InvalidRequest(
            f"no node that serves {model!r} takes fine-tuning jobs"
            + (f" ({why})" if why else "; set worker.harvest: auto on one that does"),
            param="model",
            code="unsupported_model",
        )

    def add(self, job: Job, now: float) -> Record:
        """Take the job, which `check` has let pass."""
        record = Record(job, Progress(job.id, JobState.QUEUED, waits="for a node"))
        record.note(self._epoch_s + now, f"created: {job.fine_tuned_model}")
        self.records[job.id] = record
        self.changed.add(job.id)
        self._forget_old(job.tenant)
        return record

    def restore(self, record: Record) -> None:
        """A record that was stored."""
        self.records[record.job.id] = record
        self._served[record.job.tenant] = max(self._served.get(record.job.tenant, 0.0), record.started_s)

    def get(self, job_id: str, tenant: str = "") -> Record:
        """tenant: empty for any. Raises NotFound."""
        record = self.records.get(job_id)
        if record is None or tenant not in ("", record.job.tenant):
            raise NotFound(f"there is no fine-tuning job {job_id[:80]!r}", param="id", code="fine_tuning_job_not_found")
        return record

    def listed(self, tenant: str = "") -> list[Record]:
        """The newest first."""
        found = [r for r in self.records.values() if tenant in ("", r.job.tenant)]
        return sorted(found, key=lambda r: (-r.job.created_s, r.job.id))

    def cancel(self, job_id: str, tenant: str, now: float) -> Record:
        """End the job, whose device stops it soon. Raises NotFound, and InvalidRequest for one that has ended
        otherwise."""
        record = self.get(job_id, tenant)
        if record.ended and record.state is not JobState.CANCELLED:
            raise InvalidRequest(f"the job {job_id} has {record.state}; only one that waits or runs can be cancelled")
        if not record.ended:
            self._end(record, JobState.CANCELLED, now, "cancelled")
        return record

    def note(self, record: Record, message: str, now: float, level: str = "info") -> None:
        """An event of the job."""
        record.note(self._epoch_s + now, message, level)
        self.changed.add(record.job.id)

    # ---- workers -----------------------------------------------------------------------------------------------
    def reported(self, device: str, report: Report, now: float) -> None:
        """A worker reports all that it has."""
        self._trainer(device).report = report
        for told in report.jobs.values():
            record = self.records.get(told.id)
            if record is None or record.ended or record.device not in ("", device):
                continue
            if not record.device and not self._found(record, told, device, now):
                continue
            before = record.state, len(record.events)
            self._take(record, told, now)
            (self.advanced if before == (record.state, len(record.events)) else self.changed).add(told.id)

    def _found(self, record: Record, told: Progress, device: str, now: float) -> bool:
        """A device has a job that the book has nowhere. Whether it may go on there."""
        if told.state.ended:
            return told.state is JobState.SUCCEEDED  # else of a try that is over
        if any(r.device == device for r in self.records.values()):
            return False
        record.device, record.sent_s, record.worse_s = device, None, None
        record.note(self._epoch_s + now, f"runs on {device}")
        self.changed.add(told.id)
        return True

    def _take(self, record: Record, told: Progress, now: float) -> None:
        record.sent_s = record.lost_s = None
        if not told.state.ended:
            self._learn(record, told, now)
        elif told.state is JobState.SUCCEEDED:
            self._learn(record, replace(told, state=JobState.RUNNING), now)
            self._end(record, JobState.SUCCEEDED, now, "succeeded")
            record.free()
        elif told.state is JobState.FAILED and not told.retry:
            self._learn(record, replace(told, state=JobState.RUNNING), now)
            self._end(record, JobState.FAILED, now, told.error or "it failed, and its worker does not say why")
            record.free()
        elif not record.leaving:
            self._again(record, told.error or f"{record.device} has stopped it", now)

    def _learn(self, record: Record, told: Progress, now: float) -> None:
        record.learn(told, self._epoch_s + now)

    def left(self, device: str) -> None:
        """The worker's stream ended."""
        self._trainer(device).report = None

    # ---- time --------------------------------------------------------------------------------------------------
    def tick(self, hosts: Mapping[str, Host], now: float) -> list[Start | Stop]:
        """Time has passed, or devices have changed. hosts: all devices that are known."""
        for record in self.records.values():
            if record.device:
                self._follow(record, hosts.get(record.device, _AWAY), hosts, now)
        commands: list[Start | Stop] = []
        for name, trainer in self._trainers.items():
            commands += self._stops(name, trainer, now)
        return [*commands, *self._starts(hosts, now)]

    def _follow(self, record: Record, host: Host, hosts: Mapping[str, Host], now: float) -> None:
        device, report = record.device, self._trainer(record.device).report
        if report is None or not host.here:
            record.lost_s = now if record.lost_s is None else record.lost_s
            if now - record.lost_s >= LOST_S:
                self._gone(record, f"{device} does not answer any more", now, failed=not record.leaving)
            return
        record.lost_s = None
        told = report.jobs.get(record.job.id)
        if told is not None:
            record.sent_s = None
        if told is None:
            if record.sent_s is not None and now - record.sent_s < BEGIN_S:
                return  # it may be about to begin
            why = f"the worker of {device} was restarted" if record.sent_s is None else f"{device} does not begin it"
            self._gone(record, why, now, failed=not record.leaving)
        elif record.ended or record.leaving:
            if told.state.ended:
                self._gone(record, "", now, failed=False)
        elif not host.keeps or record.job.model not in host.models:
            self._leave(record, "drains" if not host.keeps else "does not serve its model any more", now)
        elif not self._has_better(record, report, hosts):
            record.worse_s = None
        else:
            record.worse_s = now if record.worse_s is None else record.worse_s
            if now - record.worse_s >= MOVE_S:
                self._leave(record, "has little decode time to spare", now)

    def _has_better(self, record: Record, report: Report, hosts: Mapping[str, Host]) -> bool:
        if report.spare >= LITTLE:
            return False
        free = _fitting(record, self._free(hosts), hosts)
        return any(told.spare >= max(report.spare, 0.0) + CLEARLY for told in free.values())

    def _leave(self, record: Record, why: str, now: float) -> None:
        record.leaving, record.worse_s = why, None
        record.note(self._epoch_s + now, f"moves from {record.device}, which {why}")
        self.changed.add(record.job.id)

    def _gone(self, record: Record, why: str, now: float, *, failed: bool = True) -> None:
        """Its device has it no more."""
        self.changed.add(record.job.id)
        if failed and not record.ended:
            self._again(record, why, now)
            return
        record.free()
        if not record.ended:
            record.rest("for a node")

    def _again(self, record: Record, why: str, now: float) -> None:
        """It failed for a reason of its node."""
        record.avoid = record.device
        record.free()
        record.tries += 1
        self.changed.add(record.job.id)
        if record.tries >= MOST_TRIES:
            self._end(record, JobState.FAILED, now, f"{why}; given up after {record.tries} tries without a checkpoint")
            return
        wait_s = AGAIN_S * 2 ** (record.tries - 1)
        record.not_before_s = now + wait_s
        record.note(self._epoch_s + now, f"{why}; tries again in {wait_s:.0f} s, from its last checkpoint", "warn")
        record.rest(f"for another try: {why}"[:300])

    def _end(self, record: Record, state: JobState, now: float, message: str) -> None:
        failed = state is JobState.FAILED
        record.progress = replace(record.progress, state=state, waits="", error=message if failed else "", split=0)
        record.ended_s, record.leaving, record.worse_s = self._epoch_s + now, "", None
        record.note(record.ended_s, f"failed: {message}" if failed else message, "error" if failed else "info")
        self.changed.add(record.job.id)

    # ---- commands ----------------------------------------------------------------------------------------------
    def _stops(self, device: str, trainer: _Trainer, now: float) -> list[Stop]:
        """For what it should not run, and for what it should forget because the job may begin there again."""
        told = trainer.report.jobs.values() if trainer.report is not None else ()
        found = []
        for progress in told:
            record = self.records.get(progress.id)
            mine = record is not None and record.placed and record.device == device
            over = progress.state.ended and (record is None or record.ended)
            if mine or over or now - trainer.stopped.get(progress.id, float("-inf")) < STOP_S:
                continue
            trainer.stopped[progress.id] = now
            cancelled = record is not None and record.state is JobState.CANCELLED
            found.append(Stop(device, progress.id, cancelled))
        trainer.stopped = {job: at_s for job, at_s in trainer.stopped.items() if now - at_s < STOP_S}
        return found

    def _starts(self, hosts: Mapping[str, Host], now: float) -> list[Start]:
        found: list[Start] = []
        free = self._free(hosts)
        if not free:
            return found
        waiting = [r for r in self.records.values() if not r.ended and not r.device and now >= r.not_before_s]
        running = Counter(r.job.tenant for r in self.records.values() if r.placed)
        while waiting and free:
            waiting.sort(key=lambda r: self._turn(r, running))
            record = next((r for r in waiting if _fitting(r, free, hosts)), None)
            if record is None:
                break
            waiting.remove(record)
            fitting = _fitting(record, free, hosts)
            device = max(fitting, key=lambda name: (name != record.avoid, fitting[name].spare, name))
            del free[device]
            running[record.job.tenant] += 1
            found.append(self._start(record, device, now))
        return found

    def _start(self, record: Record, device: str, now: float) -> Start:
        record.device, record.sent_s, record.lost_s = device, now, None
        record.progress = replace(record.progress, waits=f"for {device} to begin")
        at_s = self._epoch_s + now
        record.started_s = record.started_s or at_s
        record.note(at_s, f"starts on {device}")
        self._served[record.job.tenant] = at_s
        self.changed.add(record.job.id)
        return Start(device, record.job)

    def _turn(self, record: Record, running: Counter[str]) -> tuple[int, float, float, str]:
        job = record.job
        return running[job.tenant], self._served.get(job.tenant, 0.0), job.created_s, job.id

    def _free(self, hosts: Mapping[str, Host]) -> dict[str, Report]:
        """The last reports of devices that could begin some job now."""
        busy = {r.device for r in self.records.values() if r.device}
        found = {}
        for name, trainer in self._trainers.items():
            host, report = hosts.get(name, _AWAY), trainer.report
            if report is None or name in busy or not host.here or not host.takes:
                continue
            if not report.refuses and report.spare >= 0 and all(told.state.ended for told in report.jobs.values()):
                found[name] = report
        return found

    def _trainer(self, device: str) -> _Trainer:
        return self._trainers.setdefault(device, _Trainer())

    def _forget_old(self, tenant: str) -> None:
        """Forget a tenant's oldest ended jobs beyond `MOST_ENDED`, but none whose model is served."""
        ended = [r for r in self.listed() if r.job.tenant == tenant and r.ended and not r.device and not r.serves]
        for record in ended[MOST_ENDED:]:
            del self.records[record.job.id]
            self.changed.add(record.job.id)

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        devices = [r.device for r in self.records.values() if r.device]
        assert len(devices) == len(set(devices)), "a device has two jobs"
        for job_id, record in self.records.items():
            assert record.job.id == record.progress.id == job_id
            assert not record.leaving or (record.device and not record.ended)
            assert record.sent_s is None or record.device
            assert bool(record.ended_s) == record.ended
            assert record.tries < MOST_TRIES or record.ended
