"""Calls of an operator's commands to the fleet's schedulers, with the operator's certificate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import grpc

from cli.client import FAILED, NOBODY, UNKNOWN, CallFailed
from cli.operator import operator
from contracts.errors import ConfigError
from contracts.identity import SCHEDULER
from contracts.v1 import scheduler_pb2, scheduler_pb2_grpc
from runtime.config import Config
from storelink.channel import blocking_channel
from storelink.credentials import Credentials

_TIMEOUT_S = 5.0


def operator_of(config: Config) -> Credentials | None:
    """The operator's certificate of `config`, or the one that the fleet made in its data directory; None: it has
    none here."""
    directory = config.tls.directory or (config.own_certificates if config.own_certificates.exists() else None)
    try:
        return operator(directory) if directory is not None else None
    except ConfigError:
        return None


def fleet_of(addresses: Sequence[str], own: Credentials | None) -> scheduler_pb2.Fleet | None:
    """The fleet as the first scheduler that answers sees it; None: none answers this caller."""
    for address in addresses:
        with blocking_channel(address, SCHEDULER, own) as channel:
            stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Watch(scheduler_pb2.WatchRequest(), timeout=_TIMEOUT_S)
            try:
                fleet: scheduler_pb2.Fleet = next(call)
            except (grpc.RpcError, StopIteration):
                continue
            finally:
                call.cancel()
            return fleet
    return None


def ask_to_leave(address: str, own: Credentials | None, node: str, *, lost: bool) -> scheduler_pb2.LeaveNodeReply:
    """The scheduler's answer. Raises CallFailed with its reason."""
    with blocking_channel(address, SCHEDULER, own) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply: scheduler_pb2.LeaveNodeReply = stub.LeaveNode(
                scheduler_pb2.LeaveNodeRequest(node=node, lost=lost), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as e:
            raise _failed(address, e) from e
        return reply


def _failed(address: str, error: Any) -> CallFailed:
    code, details = error.code(), str(error.details() or "")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return CallFailed(f"no scheduler answers at {address}; give --scheduler HOST:PORT, or --port", NOBODY)
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return CallFailed(f"{address}: {details}; set tls.directory to an operator's certificate", FAILED)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        details = str(json.loads(details)[1])
    return CallFailed(details[:600], UNKNOWN if code is grpc.StatusCode.NOT_FOUND else FAILED)
