"""Has what fine-tuning jobs came to served: writes the files of adopted models, and has workers started again one by
one (`core.rollout`). Only the first scheduler does so. What was done is kept with the jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from contracts.errors import ConfigError, NotFound, Unavailable
from contracts.finetune import JobState
from contracts.models import ModelWire
from contracts.v1 import scheduler_pb2
from runtime import telemetry
from runtime.adopted_models import adopt, adopted, remove
from runtime.clock import Clock
from runtime.config import Config
from runtime.registry import registered
from scheduler.core.device import Device
from scheduler.core.finetune_record import Record
from scheduler.core.finetunes import Finetunes
from scheduler.core.fleet import Fleet
from scheduler.core.rollout import Adoption, Rollout, Seat
from scheduler.reports import Reports

log = telemetry.logger("scheduler.adoptions")
#: Directory of the merged model in a job's.
_MERGED = "merged"
#: Seconds between two readings of the files, and until a file that could not be written is tried again.
_READ_EVERY_S, _AGAIN_S = 5.0, 30.0


class Adoptions:
    """See the module."""

    def __init__(self, config: Config, core: Finetunes, fleet: Fleet, reports: Reports, clock: Clock) -> None:
        self._config, self._core, self._fleet, self._reports, self._clock = config, core, fleet, reports, clock
        self.rollout = Rollout()
        self._names = frozenset[str]()
        self._read_s = self._failed_s = float("-inf")

    async def tick(self) -> None:
        """Adopt what has succeeded, and go on with the rollout."""
        now = self._clock.now()
        for record in [r for r in self._core.records.values() if _due(r)]:
            if now - self._failed_s >= _AGAIN_S:
                await self._adopt(record)
        if now - self._read_s >= _READ_EVERY_S:
            self._read_s = now
            self._names = frozenset(await asyncio.to_thread(adopted, self._config))
            self._fleet.registered = frozenset(registered(self._config)) | self._names
        records = [r for r in self._core.records.values() if r.adoption is not None and self._counts(r.adoption)]
        # Of two with one name, the later one hears the events.
        records.sort(key=lambda r: r.adoption is None or not r.adoption.gone)
        named = {r.adoption.name: r for r in records if r.adoption is not None}
        wanted = [r.adoption for r in records if r.adoption is not None]
        commands, told = self.rollout.tick(wanted, self._seats(), now) if wanted or self.rollout.clearing else ([], [])
        for event in told:
            if event.name in named:  # its file may have gone meanwhile
                self._core.note(named[event.name], event.message, self._clock.now(), event.level)
            log.info("an adopted model", model=event.name, told=event.message)
        for command in commands:
            restart = scheduler_pb2.RestartWorker(instance=command.instance)
            self._reports.command_worker(command.device, scheduler_pb2.WorkerCommand(restart=restart))

    def _counts(self, adoption: Adoption) -> bool:
        return bool(adoption.name) and (adoption.gone or adoption.name in self._names)

    async def remove(self, tenant: str, name: str) -> None:
        """Stop serving a model. tenant: whose it must be; empty: anyone's. Raises NotFound and Unavailable."""
        found = [r for r in self._core.records.values() if r.serves and r.adoption and r.adoption.name == name]
        record = next((r for r in found if tenant in ("", r.job.tenant)), None)
        if record is None or record.adoption is None:
            raise NotFound(f"there is no model {name[:80]!r} that a fine-tuning job made", param="model")
        try:
            await asyncio.to_thread(remove, self._config, name)
        except OSError as e:
            raise Unavailable(f"the model's file cannot be removed: {e.strerror or e}; try again") from None
        record.adoption.remove()
        self._names -= {name}
        self._fleet.registered -= {name}
        self._core.note(record, f"{name} is removed", self._clock.now())

    async def _adopt(self, record: Record) -> None:
        job, now = record.job, self._clock.now()
        name = job.fine_tuned_model
        try:
            await asyncio.to_thread(adopt, self._config, name, job.model, Path(job.out) / _MERGED)
        except ConfigError as e:
            self._core.note(record, f"cannot be served: {e}", now, "error")
            record.adoption = Adoption("", job.model)
        except OSError as e:
            self._failed_s = now
            log.warning("an adopted model cannot be kept; trying again", model=name, error=str(e))
        else:
            record.adoption = Adoption(name, job.model)
            self._core.note(record, f"will be served as {name}", now)
            self._read_s = float("-inf")

    def _seats(self) -> dict[str, Seat]:
        now, training = self._clock.now(), {r.device for r in self._core.records.values() if r.device}
        return {name: _seat(device, now, name in training) for name, device in self._fleet.devices.items()}


def _due(record: Record) -> bool:
    return record.state is JobState.SUCCEEDED and record.job.register and record.adoption is None


def _seat(device: Device, now: float, trains: bool) -> Seat:
    known_s = now if device.known_s is None else device.known_s
    return Seat(
        frozenset(model.name for model in device.models if model.wire is ModelWire.FRAMES),
        device.instance,
        serving=device.state(now) == "serving",
        away_s=0.0 if device.worker_here else now - max(device.left_s, known_s),
        requests=len(device.outstanding),
        trains=trains,
        left_out=device.left_out,
    )
