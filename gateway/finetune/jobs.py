"""Creates fine-tuning jobs of tenants, and makes files of what they come to.

The scheduler has the jobs (`scheduler.core.finetunes`). A job's directory is DATA/adapters/TENANT/JOB: links to its
data, and `out`, where its worker writes. When it has ended, its results become files, and the rest is removed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from contracts.errors import InvalidRequest, NotFound, RequestError, Unavailable
from contracts.finetune import ID, Job, JobState, check_job
from contracts.finetune_wire import job_to_wire
from contracts.v1 import scheduler_pb2 as pb
from gateway.finetune.answers import metrics_csv
from gateway.finetune.checking import Checking
from gateway.finetune.files import STALE_S, Files
from gateway.finetune.requests import JobRequest, settings_of
from gateway.finetune.uploads import Uploads
from gateway.fleet import Fleet
from gateway.generate import unknown_model
from gateway.store_thread import StoreThread
from runtime import telemetry
from runtime.config import Config

log = telemetry.logger("gateway.finetune")
MIB, GIB = 1 << 20, 1 << 30
#: What of a job's directory becomes files, and how its metrics are called.
_RESULTS, _METRICS = ("adapter_model.safetensors", "adapter_config.json"), "step_metrics.csv"
_TRAINING, _VALIDATION = "training.jsonl", "validation.jsonl"


class FineTuning:
    """See the module. files, uploads, checking: its parts. turns: the thread that looks through files."""

    def __init__(self, config: Config, fleet: Fleet) -> None:
        section = config.finetune
        self.files = Files(config.data, int(section.files_gib * GIB), config.kv.disk_reserve)
        self.turns = StoreThread("files")
        self.uploads = Uploads(self.files, self.turns, int(section.file_mib * MIB))
        self.checking = Checking()
        self._fleet = fleet
        tenants = {key.tenant for key in config.gateway.api_keys}
        self._register = section.serve == "on" or (section.serve == "auto" and len(tenants) <= 1)

    async def close(self) -> None:
        """Stop the helpers."""
        await self.checking.close()
        await self.turns.close(lambda: None)

    # ---- creation ----------------------------------------------------------------------------------------------
    async def create(self, tenant: str, asked: JobRequest) -> Any:
        """Check the job's data and hand it to the scheduler; its message. Raises RequestError; nothing has begun
        then."""
        if not self._fleet.knows_model(asked.model):
            raise unknown_model(asked.model)
        if (base := self._fleet.base_of(asked.model)) != asked.model:
            raise InvalidRequest(
                f"{asked.model} is an adapter of {base}; train {base}, which gives an adapter of its own", param="model"
            )
        await self._settle_all(tenant)
        await self.turns.run(tenant, partial(self.files.check_room, tenant, 0))
        job_id = f"ftjob-{secrets.token_hex(12)}"
        place = self.files.job_place(tenant, job_id)
        job = self._job(job_id, tenant, asked, place)
        check_job(job)
        try:
            for param, name in (("training_file", _TRAINING), ("validation_file", _VALIDATION)):
                if file_id := getattr(asked, param):
                    await self._data(tenant, param, file_id, place / name)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        try:
            return await self._submit(job)
        except Unavailable:
            raise  # the scheduler may have it, so its directory stays until `_settle_all` knows
        except RequestError:
            shutil.rmtree(place, ignore_errors=True)
            raise

    def _job(self, job_id: str, tenant: str, asked: JobRequest, place: Path) -> Job:
        note = {
            "training_file": asked.training_file,
            "validation_file": asked.validation_file,
            "suffix": asked.suffix,
            "metadata": asked.metadata,
        }
        return Job(
            job_id,
            tenant,
            asked.model,
            str(place / _TRAINING),
            str(place / "out"),
            str(place / _VALIDATION) if asked.validation_file else "",
            suffix="-".join(filter(None, (asked.suffix, job_id.removeprefix("ftjob-")[:8]))),
            register=self._register,
            created_s=time.time(),
            settings=settings_of(asked, secrets.randbelow(1 << 31)),
            note=json.dumps(note),
        )

    async def _data(self, tenant: str, param: str, file_id: str, to: Path) -> None:
        try:
            info = await asyncio.to_thread(self.files.get, tenant, file_id)
            if info.purpose != "fine-tune":
                raise InvalidRequest(f"{param}: its purpose is {info.purpose!r}, not 'fine-tune'", param=param)
            await asyncio.to_thread(self.files.link, tenant, file_id, to)
        except NotFound as e:
            raise InvalidRequest(f"{param}: {e.message}", param=param, code=e.code) from None
        except OSError as e:
            raise InvalidRequest(f"{param}: this server's disk refuses it ({e.strerror})", param=param) from None
        await self.checking.check(tenant, to, param)

    async def _submit(self, job: Job) -> Any:
        sent = job_to_wire(job)
        try:
            return await self._fleet.finetune("SubmitFinetune", sent)
        except Unavailable:  # said twice it is one job
            return await self._fleet.finetune("SubmitFinetune", sent)

    # ---- what is there -----------------------------------------------------------------------------------------
    async def get(self, tenant: str, job_id: str) -> Any:
        """The message of a tenant's job. Raises NotFound."""
        return await self._fleet.finetune("GetFinetune", _name(tenant, job_id))

    async def cancel(self, tenant: str, job_id: str) -> Any:
        """End a job. Raises NotFound, and InvalidRequest for one that has ended."""
        return await self._fleet.finetune("CancelFinetune", _name(tenant, job_id))

    async def listed(self, tenant: str, after: str, limit: int) -> tuple[list[Any], bool]:
        """A page of a tenant's jobs, and whether there are more. Raises InvalidRequest for an unknown `after`."""
        unknown = InvalidRequest(f"after: there is no fine-tuning job {after[:80]!r}", param="after")
        if after and not ID.fullmatch(after):
            raise unknown
        wanted = pb.ListFinetunesRequest(tenant=tenant, after=after, limit=limit)
        reply = await self._fleet.finetune("ListFinetunes", wanted)
        if reply.unknown_after:
            raise unknown
        return list(reply.finetunes), reply.more

    async def results(self, found: Any) -> list[str]:
        """Ids of a job's result files; what lies there becomes files the first time."""
        if found.progress.state != JobState.SUCCEEDED:
            return []
        tenant, job_id = found.job.tenant, found.job.id
        known = await asyncio.to_thread(self.files.results, tenant, job_id)
        return known if known is not None else await self._settle(await self.get(tenant, job_id))

    # ---- the end -----------------------------------------------------------------------------------------------
    async def _settle(self, found: Any) -> list[str]:
        """Make files of a job's results, and remove the rest of its directory, if it has ended."""
        state = JobState(found.progress.state)
        if not state.ended or found.node:
            return []
        try:
            return await asyncio.to_thread(self._settled, found, state)
        except OSError as e:
            log.warning("a job's results cannot be kept", job=found.job.id, error=str(e))
            return []

    def _settled(self, found: Any, state: JobState) -> list[str]:
        tenant, job_id, out = found.job.tenant, found.job.id, Path(found.job.out)
        place, ids = self.files.job_place(tenant, job_id), list[str]()
        if state is JobState.SUCCEEDED:
            known = self.files.results(tenant, job_id)
            names: dict[str, Path | bytes] = {name: out / name for name in _RESULTS if (out / name).is_file()}
            names |= {_METRICS: metrics_csv(found)}
            ids = known if known is not None else self.files.keep_results(tenant, job_id, names)
        if state is JobState.SUCCEEDED and found.job.register:  # it is served from there
            for name in (_TRAINING, _VALIDATION):
                (place / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(place, ignore_errors=True)
        return ids

    async def _settle_all(self, tenant: str) -> None:
        """Settle all of a tenant's jobs that have ended, so that new ones find room."""
        for place in await asyncio.to_thread(self.files.job_places, tenant):
            try:
                found = await self.get(tenant, place.name)
            except NotFound:  # forgotten, or never taken
                stale = time.time() - place.stat().st_mtime > STALE_S
                if stale and not (place / "out" / "merged").is_dir():  # it may be served from there
                    await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
                continue
            await self._settle(found)


def _name(tenant: str, job_id: str) -> pb.FinetuneName:
    if not ID.fullmatch(job_id):
        raise NotFound(f"there is no fine-tuning job {job_id[:80]!r}", param="id", code="fine_tuning_job_not_found")
    return pb.FinetuneName(tenant=tenant, id=job_id)
