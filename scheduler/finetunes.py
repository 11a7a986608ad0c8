"""The calls that submit, show and cancel fine-tuning jobs, and the files that keep them across restarts.

The first scheduler of a fleet has all jobs; the others refuse the calls and send no commands, though workers report to
all. Files: DATA/finetune/ID.json, each replaced atomically. A job is written before its call is answered and before it
starts, a change of its place or state at the next tick, its progress every few seconds. What a crash loses of that, the
workers' reports say again.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.errors import InvalidRequest, NotFound, Unavailable
from contracts.finetune import Job, Progress, check_place
from contracts.finetune_wire import job_from_wire, job_to_wire, progress_from_wire, progress_to_wire
from contracts.models import ModelWire
from contracts.v1 import scheduler_pb2
from runtime import telemetry
from runtime.clock import Clock
from scheduler.core.device import Device
from scheduler.core.finetune_record import Record
from scheduler.core.finetune_stored import from_stored, to_stored
from scheduler.core.finetunes import Finetunes, Host, Report, Start, Stop
from scheduler.core.fleet import Fleet
from scheduler.reports import Reports

log = telemetry.logger("scheduler.finetunes")
#: Seconds between two writes of jobs that have only got on.
_WRITE_EVERY_S = 5.0
#: Jobs of a page at most.
_MOST_LISTED = 100


class FinetuneJobs:
    """See the module."""

    def __init__(self, fleet: Fleet, reports: Reports, directory: Path, clock: Clock, *, owns: bool) -> None:
        """owns: this is the first scheduler."""
        self.core = Finetunes(clock.wall() - clock.now())
        self._fleet, self._reports, self._directory, self._clock, self._owns = fleet, reports, directory, clock, owns
        self._submitting, self._writing = asyncio.Lock(), asyncio.Lock()
        self._written_s = clock.now()
        #: The device whose worker is about to be started again: it has no job now. Empty: none.
        self.clearing: Callable[[], str] = lambda: ""
        if owns:
            reports.finetunes_reported, reports.trainer_left = self._reported, self.core.left

    # ---- files -------------------------------------------------------------------------------------------------
    async def load(self) -> None:
        """Read every file. One that cannot be read is logged and kept."""
        for path, text in await asyncio.to_thread(_read_all, self._directory) if self._owns else ():
            try:
                self.core.restore(from_stored(json.loads(text)))
            except (ValueError, RecursionError) as e:
                log.warning("a fine-tuning job's file is not understood", path=str(path), error=str(e))

    async def write(self, *, progress: bool = True) -> None:
        """Write what has changed; progress: also jobs that have only got on. Failures are logged and retried by the
        next call."""
        async with self._writing:
            core = self.core
            changed, core.changed = core.changed, set()
            if progress:
                changed |= core.advanced
                core.advanced = set()
            for job_id in sorted(changed):
                record = core.records.get(job_id)
                try:
                    await self._store(job_id, record)
                except OSError as e:
                    core.advanced.add(job_id)
                    log.warning("a fine-tuning job cannot be kept", job=job_id, error=str(e))

    async def _store(self, job_id: str, record: Record | None) -> None:
        data = to_stored(record) if record is not None else None
        await asyncio.to_thread(_replace, self._directory / f"{job_id}.json", data)

    # ---- time --------------------------------------------------------------------------------------------------
    async def tick(self, *, gathering: bool) -> None:
        """Decide and tell the workers; write what has changed. gathering: the fleet is not known yet."""
        if not self._owns:
            return
        now = self._clock.now()
        if not gathering:
            for command in self.core.tick(self._hosts(), now):
                self._tell(command)
        due = now - self._written_s >= _WRITE_EVERY_S
        self._written_s = now if due else self._written_s
        if self.core.changed or (due and self.core.advanced):
            await self.write(progress=due)

    def _tell(self, command: Start | Stop) -> None:
        sent = scheduler_pb2.FinetuneCommand()
        if isinstance(command, Start):
            sent.start.CopyFrom(job_to_wire(command.job))
            log.info("a fine-tuning job starts", job=command.job.id, node=command.node)
        else:
            sent.stop.CopyFrom(scheduler_pb2.StopFinetune(id=command.job_id, cancelled=command.cancelled))
            log.info("a fine-tuning job is stopped", job=command.job_id, node=command.node)
        self._reports.command_worker(command.node, scheduler_pb2.WorkerCommand(finetune=sent))

    def _hosts(self) -> dict[str, Host]:
        now, clearing = self._clock.now(), self.clearing()
        return {name: _host(device, now, name == clearing) for name, device in self._fleet.devices.items()}

    def _reported(self, device: str, message: scheduler_pb2.FinetuneReport) -> None:
        jobs: dict[str, Progress] = {}
        for told in message.jobs:
            try:
                jobs[told.id] = progress_from_wire(told)
            except ValueError:
                log.warning("a worker reports a job in a state that is not known", node=device, state=told.state[:40])
        spare = message.spare if math.isfinite(message.spare) else -1.0
        self.core.reported(device, Report(spare, message.refuses[:300], jobs), self._clock.now())

    # ---- calls -------------------------------------------------------------------------------------------------
    async def submit(self, message: scheduler_pb2.FinetuneJob, data: Path | None = None) -> scheduler_pb2.Finetune:
        """Take a job, and store it; one that is known already is answered as it is. data: where the jobs of this caller
        must lie (`check_place`); None: anywhere. Raises RequestError."""
        self._check_owns()
        job = job_from_wire(message)
        if data is not None:
            check_place(job, data)
        async with self._submitting:
            known = self.core.check(job, self._hosts())
            if known is not None:
                return record_to_wire(known)
            if job.register and job.fine_tuned_model in self._fleet.registered:
                raise InvalidRequest(
                    f"suffix: there is a model {job.fine_tuned_model} already; give another one", param="suffix"
                )
            # A caller that leaves now must not leave a file without its job.
            return record_to_wire(await asyncio.shield(asyncio.ensure_future(self._take(job))))

    async def _take(self, job: Job) -> Record:
        """Store the job, then let it begin. Raises Unavailable."""
        clock = self._clock
        try:
            await self._store(job.id, Finetunes(clock.wall() - clock.now()).add(job, clock.now()))
        except OSError as e:
            raise Unavailable(f"the job cannot be kept on the scheduler's disk: {e.strerror or e}; try again") from None
        return self.core.add(job, clock.now())

    async def list(self, request: scheduler_pb2.ListFinetunesRequest) -> scheduler_pb2.ListFinetunesReply:
        """A page of a tenant's jobs, or of all, the newest first."""
        self._check_owns()
        found = self.core.listed(request.tenant)
        if request.after:
            at = next((n for n, record in enumerate(found, 1) if record.job.id == request.after), None)
            if at is None:
                return scheduler_pb2.ListFinetunesReply(unknown_after=True)
            found = found[at:]
        limit = min(request.limit or 20, _MOST_LISTED)
        page = [record_to_wire(record, whole=False) for record in found[:limit]]
        return scheduler_pb2.ListFinetunesReply(finetunes=page, more=len(found) > limit)

    async def get(self, name: scheduler_pb2.FinetuneName) -> scheduler_pb2.Finetune:
        """One job with its events, losses and checkpoints. Raises NotFound."""
        self._check_owns()
        return record_to_wire(self.core.get(name.id, name.tenant))

    async def cancel(self, name: scheduler_pb2.FinetuneName) -> scheduler_pb2.Finetune:
        """End a job, and store that. Raises NotFound, and InvalidRequest for one that has ended."""
        self._check_owns()
        record = self.core.cancel(name.id, name.tenant, self._clock.now())
        await self.write(progress=False)
        return record_to_wire(record)

    def _check_owns(self) -> None:
        if not self._owns:
            raise NotFound("fine-tuning jobs are kept by the first scheduler of the configuration; ask that one")


def _host(device: Device, now: float, clearing: bool) -> Host:
    state = device.state(now)
    return Host(
        frozenset(model.name for model in device.models if model.wire is ModelWire.FRAMES),
        here=device.worker_here and not device.dead,
        takes=state == "serving" and not clearing,
        keeps=not (device.draining or clearing),
    )


def record_to_wire(record: Record, *, whole: bool = True) -> scheduler_pb2.Finetune:
    """whole: with events, losses and checkpoints."""
    m = scheduler_pb2.Finetune(
        job=job_to_wire(record.job),
        progress=progress_to_wire(record.progress),
        node=record.device,
        started_s=record.started_s,
        ended_s=record.ended_s,
    )
    if whole:
        for event in record.events:
            m.events.add(number=event.number, at_s=event.at_s, level=event.level, message=event.message)
        for loss in record.losses:
            m.losses.add(step=loss.step, loss=loss.loss, validation_loss=loss.validation_loss)
        for c in record.checkpoints:
            m.checkpoints.add(step=c.step, at_s=c.at_s, loss=c.loss, validation_loss=c.validation_loss)
    return m


def _read_all(directory: Path) -> list[tuple[Path, str]]:
    found = []
    for path in sorted(directory.glob("ftjob-*.json")):
        try:
            found.append((path, path.read_text()))
        except (OSError, UnicodeDecodeError) as e:
            log.warning("a fine-tuning job's file cannot be read", path=str(path), error=str(e))
    return found


def _replace(path: Path, data: dict[str, Any] | None) -> None:
    """Replace the file atomically, or remove it for None. Raises OSError."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
