"""The stream on which a gateway asks a scheduler: questions share messages, and one that ends takes only its own
questions with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from contracts.identity import SCHEDULER
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1 import scheduler_pb2_grpc
from gateway.placing import Placing
from runtime import rpc


class Answering(scheduler_pb2_grpc.SchedulerServicer):
    """Answers each question with the request's id as the node. messages: how many questions each had. waits: answer
    only when it is set."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.waits: asyncio.Event | None = None

    async def Place(
        self, request_iterator: AsyncIterator[pb.PlaceRequests], context: Any
    ) -> AsyncIterator[pb.PlaceAnswers]:
        async for message in request_iterator:
            self.messages.append(len(message.requests))
            if self.waits is not None:
                await self.waits.wait()
            if any(r.request_id == "end" for r in message.requests):
                return
            yield pb.PlaceAnswers(
                answers=[pb.PlaceAnswer(placed=pb.Placement(node=r.request_id)) for r in message.requests]
            )


@pytest.fixture
async def asked(free_ports: Callable[[int], int]) -> AsyncIterator[tuple[Answering, Placing, Any]]:
    address = f"127.0.0.1:{free_ports(1)}"
    server, _ = rpc.server(address, ["upbeat.v1.Scheduler"])
    answering = Answering()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(answering, server)
    await server.start()
    channel = rpc.channel(address, SCHEDULER)
    placing = Placing(scheduler_pb2_grpc.SchedulerStub(channel))
    yield answering, placing, server
    await placing.close()
    await channel.close(None)
    await server.stop(0)


async def node(placing: Placing, name: str, timeout_s: float = 20) -> str:
    return (await placing.ask(pb.PlaceRequest(request_id=name), timeout_s)).placed.node


async def test_questions_that_wait_together_share_messages_and_each_has_its_own_answer(asked) -> None:
    answering, placing, _ = asked
    names = [f"r{n}" for n in range(200)]
    assert await asyncio.gather(*(node(placing, name) for name in names)) == names
    assert sum(answering.messages) == 200 and max(answering.messages) <= 32


async def test_a_scheduler_that_has_not_answered_yet_gets_fewer_and_longer_messages(asked) -> None:
    answering, placing, _ = asked
    answering.waits = asyncio.Event()
    names = [f"r{n}" for n in range(100)]
    asking = []
    for name in names:
        asking.append(asyncio.ensure_future(node(placing, name)))
        await asyncio.sleep(0.002)
    answering.waits.set()
    assert await asyncio.gather(*asking) == names
    assert len(answering.messages) <= 6, "two went at once, and the others in messages of 32"


async def test_whoever_waits_no_more_disturbs_nobody(asked) -> None:
    answering, placing, _ = asked
    answering.waits = asyncio.Event()
    impatient = asyncio.ensure_future(node(placing, "impatient"))
    patient = asyncio.ensure_future(node(placing, "patient"))
    await asyncio.sleep(0.05)
    impatient.cancel()
    answering.waits.set()
    assert await patient == "patient"


async def test_a_scheduler_that_hangs_is_asked_on_another_stream_and_who_waits_behind_goes_elsewhere(asked) -> None:
    answering, placing, _ = asked
    answering.waits = asyncio.Event()
    behind = asyncio.ensure_future(node(placing, "behind"))
    with pytest.raises(TimeoutError):
        await node(placing, "first", timeout_s=0.1)
    with pytest.raises(ConnectionError):
        await behind
    answering.waits = None
    assert await node(placing, "next") == "next"


async def test_a_stream_that_ends_or_breaks_fails_who_waits_and_the_next_question_opens_another(asked) -> None:
    _, placing, server = asked
    with pytest.raises(ConnectionError, match="ended"):
        await node(placing, "end")
    assert await node(placing, "again") == "again"
    await server.stop(0)
    with pytest.raises(ConnectionError):
        await node(placing, "gone")
