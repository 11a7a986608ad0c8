"""Tells every scheduler which answers kept to their models' targets, for autoscaling. Best effort: what a scheduler
does not answer to is lost for it."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc

from contracts.v1 import scheduler_pb2 as pb
from gateway.attainment import Attainments
from gateway.schedulers import Scheduler, Schedulers
from runtime import telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.slo_reports")
#: Seconds between reports.
EVERY_S = 1.0
TELL_TIMEOUT_S = 1.0


async def tell_attainment(attainments: Attainments, schedulers: Schedulers, clock: Clock) -> NoReturn:
    """Report each second's answers, for ever."""
    while True:
        await clock.sleep(EVERY_S)
        fresh = attainments.take()
        if fresh:
            decided = [
                pb.SloDecided(model=model, target=target, turns=turns, kept=kept)
                for (model, target), (turns, kept) in fresh.items()
            ]
            message = pb.SloDecidedRequest(decided=decided)
            await asyncio.gather(*(_tell(scheduler, message) for scheduler in schedulers.of(None)))


async def _tell(scheduler: Scheduler, message: pb.SloDecidedRequest) -> None:
    try:
        await scheduler.stub.SloDecided(message, timeout=TELL_TIMEOUT_S)
    except grpc.aio.AioRpcError as e:
        log.debug("attainment is lost", scheduler=scheduler.address, reason=f"{e.code().name}: {e.details()}")
