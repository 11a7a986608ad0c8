"""Calls the schedulers. Each session has one scheduler; the next ones in rendezvous order stand in for it.

A scheduler that times out is skipped for a while, so that a hung one delays few requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from contracts.identity import SCHEDULER
from contracts.ids import SessionKey
from contracts.rendezvous import rendezvous
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1 import scheduler_pb2_grpc
from gateway.core.refusals import refusal
from gateway.placing import Placing
from runtime import rpc, telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.schedulers")
_SURVEY_TIMEOUT_S = 0.5


def workflow_key(tenant: str, workflow: str) -> SessionKey:
    """The key by which a workflow is assigned to a scheduler: all requests of its agents go to one scheduler, which
    learns from them."""
    return SessionKey(tenant, f"workflow/{workflow}")  # session ids contain no slash


class Scheduler:
    """One scheduler. rests_until_s: it is skipped until then. hangs: set when it has timed out."""

    def __init__(self, address: str) -> None:
        self.address, self.rests_until_s, self.hangs = address, 0.0, asyncio.Event()
        self.channel = rpc.channel(address, SCHEDULER, rpc.SCHEDULER_RECONNECT_S)
        self.stub: Any = scheduler_pb2_grpc.SchedulerStub(self.channel)  # type: ignore[no-untyped-call]
        self.placing = Placing(self.stub)


class Schedulers:
    """All schedulers; `all` lists them in configuration order."""

    def __init__(self, addresses: Sequence[str], clock: Clock, rest_s: float) -> None:
        self._clock, self._rest_s = clock, rest_s
        self.all = [Scheduler(address) for address in addresses]
        self._by_address = {s.address: s for s in self.all}

    async def stop(self) -> None:
        """Close the channels."""
        for scheduler in self.all:
            await scheduler.placing.close()
            await scheduler.channel.close(None)

    def order(self, session: SessionKey | None) -> list[Scheduler]:
        """The session's scheduler and its stand-ins, in order; None: all, in configuration order."""
        if session is None or len(self.all) == 1:
            return self.all
        return [self._by_address[address] for address in rendezvous(session, self._by_address)]

    def of(self, session: SessionKey | None) -> list[Scheduler]:
        """Like `order`, without those that are skipped after a timeout."""
        now = self._clock.now()
        return [s for s in self.order(session) if now >= s.rests_until_s]

    async def ask(self, method: str, message: Any, session: SessionKey | None, timeout_s: float) -> Any:
        """The first answer, None when no scheduler answers. Raises the RequestError of a refusal."""
        for scheduler in self.of(session):
            answer = await self.tell(scheduler, method, message, timeout_s)
            if answer is not None:
                return answer
        return None

    async def ask_all(self, method: str, message: Any, session: SessionKey | None, timeout_s: float) -> list[Any]:
        """The answers of all that answer, in the session's order. Raises the RequestError of a refusal."""
        answers = await asyncio.gather(*(self.tell(s, method, message, timeout_s) for s in self.of(session)))
        return [answer for answer in answers if answer is not None]

    async def place(self, scheduler: Scheduler, wanted: pb.PlaceRequest, timeout_s: float) -> pb.Placement | None:
        """The scheduler's placement; None when it does not answer or knows no fleet yet. Raises the RequestError of a
        refusal."""
        try:
            answer = await scheduler.placing.ask(wanted, timeout_s)
        except TimeoutError:
            self._silent(scheduler, "Place", "DEADLINE_EXCEEDED", hangs=True)
            return None
        except ConnectionError as e:
            self._silent(scheduler, "Place", str(e), hangs=False)
            return None
        if answer.refused and (refused := refusal(answer.refused)) is not None:
            raise refused
        return answer.placed if answer.HasField("placed") else None

    async def tell(self, scheduler: Scheduler, method: str, message: Any, timeout_s: float) -> Any:
        """The scheduler's answer, or None when there is none. Raises the RequestError of a refusal."""
        try:
            return await getattr(scheduler.stub, method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as e:
            refused = refusal(e.details() or "")
            if refused is not None:
                raise refused from None
            self._silent(
                scheduler,
                method,
                f"{e.code().name}: {e.details()}",
                hangs=e.code() is grpc.StatusCode.DEADLINE_EXCEEDED,
            )
            return None

    def _silent(self, scheduler: Scheduler, method: str, reason: str, *, hangs: bool) -> None:
        log.warning("a scheduler does not answer", address=scheduler.address, call=method, reason=reason)
        if hangs:
            scheduler.rests_until_s = self._clock.now() + self._rest_s
            scheduler.hangs.set()

    async def survey(self) -> list[tuple[str, pb.Fleet | None]]:
        """The fleet as each scheduler sees it now, with its address; None: no answer."""
        return list(zip(self._by_address, await asyncio.gather(*(_look(s) for s in self.all)), strict=True))


async def _look(scheduler: Scheduler) -> pb.Fleet | None:
    call = scheduler.stub.Watch(pb.WatchRequest(), timeout=_SURVEY_TIMEOUT_S)
    try:
        async for message in call:
            seen: pb.Fleet = message
            return seen
    except grpc.aio.AioRpcError:
        return None
    finally:
        call.cancel()
    return None
