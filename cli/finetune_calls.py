"""Calls about fine-tuning jobs to the fleet's first scheduler, which has all of them. Operators' plane: paths, and all
tenants' jobs."""

from __future__ import annotations

import json
from typing import Any

import grpc

from cli.client import FAILED, NOBODY, UNKNOWN, USAGE, CallFailed, Gateway
from cli.operator import DIRECTORY, operator
from contracts.identity import SCHEDULER
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1 import scheduler_pb2_grpc
from storelink.channel import blocking_channel
from storelink.credentials import Credentials

TIMEOUT_S = 10.0
_STATUS = {400: USAGE, 404: UNKNOWN}


def first_scheduler(gateway: Gateway, given: str) -> str:
    """The first scheduler's address: the given one, else as the gateway says. Raises CallFailed."""
    if given:
        return given
    schedulers = gateway.call("GET", "/v1/fleet").get("schedulers") or []
    if not schedulers:
        raise CallFailed("the gateway names no scheduler; give one with --scheduler HOST:PORT")
    return str(schedulers[0]["address"])


class Jobs:
    """The jobs of a fleet. Each call raises CallFailed with the scheduler's message."""

    def __init__(self, address: str, own: Credentials | None = None) -> None:
        """own: the caller's certificate; None: `operator()`."""
        self._address = address
        self._channel = blocking_channel(address, SCHEDULER, own or operator())
        self._stub: Any = scheduler_pb2_grpc.SchedulerStub(self._channel)  # type: ignore[no-untyped-call]

    def submit(self, job: pb.FinetuneJob) -> pb.Finetune:
        """Start a job."""
        found: pb.Finetune = self._call("SubmitFinetune", job)
        return found

    def get(self, job_id: str) -> pb.Finetune:
        """One job with its events, losses and checkpoints."""
        found: pb.Finetune = self._call("GetFinetune", pb.FinetuneName(id=job_id))
        return found

    def cancel(self, job_id: str) -> pb.Finetune:
        """End a job."""
        found: pb.Finetune = self._call("CancelFinetune", pb.FinetuneName(id=job_id))
        return found

    def all(self, limit: int) -> list[pb.Finetune]:
        """The newest jobs, the newest first."""
        found: list[pb.Finetune] = []
        after = ""
        while len(found) < limit:
            wanted = pb.ListFinetunesRequest(after=after, limit=min(limit - len(found), 100))
            reply = self._call("ListFinetunes", wanted)
            found += reply.finetunes
            if not reply.more or not reply.finetunes:
                break
            after = found[-1].job.id
        return found

    def _call(self, method: str, message: Any) -> Any:
        try:
            return getattr(self._stub, method)(message, timeout=TIMEOUT_S)
        except grpc.RpcError as e:
            raise _failed(self._address, str(e.details() if isinstance(e, grpc.Call) else e)) from None


def _failed(address: str, details: str) -> CallFailed:
    """The error of a call. details: JSON of `contracts.errors.to_wire`, or gRPC's own words."""
    try:
        status, message, param, _ = json.loads(details)
    except (ValueError, TypeError):
        remedy = (
            "give the first scheduler's address with --scheduler HOST:PORT, and the fleet's certificates with "
            f"{DIRECTORY} (`upbeat up` makes them in tls/ of its data)"
        )
        return CallFailed(f"the scheduler at {address} does not answer ({details}); {remedy}", NOBODY)
    flag = f"--{param.replace('_', '-')}: " if param and status == 400 and not message.startswith(param) else ""
    listed = "; `upbeat finetune list` lists those that are known" if status == 404 else ""
    return CallFailed(f"{flag}{message}{listed}", _STATUS.get(status, FAILED))
