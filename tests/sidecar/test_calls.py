"""Many requests on one call to a sidecar: windows, bodies in turns, gathered pieces, and what does not keep to the
protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from contracts.http_flights import WINDOW_BYTES
from contracts.v1 import worker_pb2 as pb
from sidecar import calls
from tests.sidecar.fake_vllm import Answer as Said
from tests.sidecar.fake_vllm import FakeVllm, Seen, streamed
from tests.sidecar.node import LIMIT_S, Answer, Asking, HttpCall, Node

Made = tuple[Node, FakeVllm]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def large(pieces: int) -> Said:
    """An answer of so many pieces of 64 KiB each."""

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(pieces):
            await response.write(b"x" * 65_536)
        return response

    return answer


async def taken(asking: Asking, length: int) -> None:
    """Take so many bytes of the answer, without making room for more, and see that no more come."""
    asking.grants = False
    while length > 0:
        length -= len((await asking.read()).body)
    await asyncio.sleep(0.2)
    assert length == 0 and asking.downs.empty()


# ---- windows ---------------------------------------------------------------------------------------------------------
async def test_a_reader_who_takes_nothing_gets_a_window_and_holds_up_nobody_else(node: Made) -> None:
    sidecar, server = node
    server.answer = large(64)
    slow, quick = sidecar.call(request_id="slow"), sidecar.call(request_id="quick")
    assert len((await quick.whole()).body) == 64 * 65_536
    await taken(slow, WINDOW_BYTES)
    slow.grant(1000)
    await taken(slow, 1000)
    slow.cancel()
    await until(lambda: not len(sidecar.sidecar.flights))


async def test_room_is_never_more_than_a_window_whatever_is_granted(node: Made) -> None:
    sidecar, server = node
    server.answer = large(64)
    asking = sidecar.http.begin()
    asking.grant(1 << 60)
    asking.send(b"{}")
    await taken(asking, WINDOW_BYTES)
    asking.grant(1 << 60)
    await taken(asking, WINDOW_BYTES)


# ---- bodies ----------------------------------------------------------------------------------------------------------
async def test_bodies_whose_pieces_come_in_turns_are_put_together(node: Made) -> None:
    sidecar, server = node
    texts = [letter * 1_000_000 for letter in "abc"]
    asked = [sidecar.http.begin(request_id=f"r-{text[0]}") for text in texts]
    raw = [json.dumps({"text": text}).encode() for text in texts]
    for at in range(0, len(raw[0]), 100_000):
        for asking, body in zip(asked, raw, strict=True):
            asking.send(body[at : at + 100_000], last=at + 100_000 >= len(body))
    for asking in asked:
        assert (await asking.whole()).status == 200
    assert sorted(seen.body["text"] for seen in server.seen) == texts
    assert all(seen.body["text"][0] == seen.headers["x-request-id"][-1] for seen in server.seen)


# ---- gathering -------------------------------------------------------------------------------------------------------
class Steps:
    """An engine that says a token of each request that takes part in a step."""

    def __init__(self, server: FakeVllm) -> None:
        self.steps: dict[str, asyncio.Queue[str]] = {}
        server.answer = self._answer

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        waiting = self.steps[seen.headers["x-request-id"]] = asyncio.Queue()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while token := await waiting.get():
            await response.write(f"data: {token}\n\n".encode())
        return response

    def step(self, token: str, *requests: str) -> None:
        for name in requests or self.steps:
            self.steps[name].put_nowait(token)


async def begun(sidecar: Node, steps: Steps, count: int) -> list[Asking]:
    """So many requests whose answers have begun."""
    asked = [sidecar.call(request_id=f"r-{n}") for n in range(count)]
    await until(lambda: len(steps.steps) == count)
    steps.step("one")
    for asking in asked:
        answer = Answer()
        while not answer.pieces:
            answer.take(await asking.read())
    sidecar.http.messages.clear()
    return asked


async def test_the_pieces_of_a_step_come_in_one_message(node: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar, server = node
    monkeypatch.setattr(calls, "GATHER_S", 1000.0)
    asked = await begun(sidecar, Steps(server), 1)  # one alone never waits
    steps = Steps(server)
    asked[0].cancel()
    await until(lambda: not len(sidecar.sidecar.flights))
    asked = await begun(sidecar, steps, 8)
    steps.step("two")
    for asking in asked:
        assert (await asking.read()).body == b"data: two\n\n"
    assert [len(message) for message in sidecar.http.messages] == [8]


async def test_a_piece_does_not_wait_for_long_for_an_answer_that_pauses(node: Made) -> None:
    sidecar, server = node
    steps = Steps(server)
    first, second, _ = await begun(sidecar, steps, 3)
    steps.step("two", "r-0", "r-1")
    assert (await first.read()).body == (await second.read()).body == b"data: two\n\n"


async def test_beginnings_and_ends_wait_for_nobody(node: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar, server = node
    monkeypatch.setattr(calls, "GATHER_S", 1000.0)
    steps = Steps(server)
    first, second = await begun(sidecar, steps, 2)
    third = sidecar.call(request_id="r-2")
    await until(lambda: "r-2" in steps.steps)
    steps.step("one", "r-2")
    assert (await third.read()).head.status == 200 and (await third.read()).body == b"data: one\n\n"
    steps.step("two", "r-0")
    steps.step("", "r-0")
    assert (await first.read()).body == b"data: two\n\n" and (await first.read()).end
    failure = (await sidecar.ask(path="/nowhere", request_id="r-3")).failure
    assert failure[0] == 404
    steps.step("two", "r-1", "r-2")
    assert (await second.read()).body == b"data: two\n\n", "the others that go on are two"


# ---- ends ------------------------------------------------------------------------------------------------------------
async def test_one_request_of_a_call_ends_alone(node: Made) -> None:
    sidecar, server = node
    steps = Steps(server)
    first, second = await begun(sidecar, steps, 2)
    first.cancel()
    await until(lambda: server.seen[0].cancelled)
    steps.step("two", "r-1")
    steps.step("", "r-1")
    assert (await second.read()).body == b"data: two\n\n" and (await second.read()).end


async def test_a_request_whose_body_is_on_its_way_can_be_cancelled(node: Made) -> None:
    sidecar, server = node
    asking = sidecar.http.begin()
    asking.send(b"{", last=False)
    tally = sidecar.sidecar.handler.relay.tally
    await until(lambda: tally.held_bytes == 1)
    asking.cancel()
    await until(lambda: not len(sidecar.sidecar.flights))
    assert tally.held_bytes == 0 and dict(tally.outcomes) == {"cancelled": 1}
    asking.send(b"}")
    assert (await sidecar.ask(request_id="r-2")).status == 200 and asking.downs.empty() and len(server.seen) == 1


async def test_a_call_that_breaks_ends_its_requests_and_no_others(node: Made) -> None:
    sidecar, server = node
    steps = Steps(server)
    await begun(sidecar, steps, 2)
    other = HttpCall(sidecar.stub)
    asking = other.begin(request_id="r-9")
    asking.send(b"{}")
    upload = sidecar.http.begin(request_id="r-3")
    upload.send(b"{", last=False)
    await until(lambda: "r-9" in steps.steps and len(sidecar.sidecar.flights) == 4)
    await sidecar.http.close()
    await until(lambda: len(sidecar.sidecar.flights) == 1)
    assert [seen.cancelled for seen in server.seen] == [True, True, False]
    assert sidecar.sidecar.handler.relay.tally.held_bytes == 0
    steps.step("one", "r-9")
    steps.step("", "r-9")
    assert (await asking.whole()).body == b"data: one\n\n"
    await other.close()


# ---- nonsense --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before the body", "after it"])
@pytest.mark.parametrize(
    "nonsense",
    [pb.HttpUp(head=pb.HttpRequest(request_id="r", model="m", path="/tokenize", tenant="t")), pb.HttpUp()],
    ids=["a second head", "nothing"],
)
async def test_nonsense_ends_its_own_request_only(node: Made, nonsense: pb.HttpUp, when: str) -> None:
    sidecar, server = node
    steps = Steps(server)
    (good,) = await begun(sidecar, steps, 1)
    bad = sidecar.http.begin(request_id="bad")
    if when == "after it":
        bad.send(b"{}")
        await until(lambda: len(server.seen) == 2)
    sidecar.http.send(
        pb.HttpUp.FromString(nonsense.SerializeToString() + pb.HttpUp(flight=bad.number).SerializeToString())
    )
    assert (await bad.whole()).failure[0] == 400
    await until(lambda: len(sidecar.sidecar.flights) == 1)
    if when == "after it":
        await until(lambda: server.seen[1].cancelled)
    steps.step("", "r-0")
    assert (await good.read()).end


async def test_more_of_a_body_after_its_end_ends_the_request(node: Made) -> None:
    sidecar, server = node
    steps = Steps(server)
    bad = sidecar.call()
    await until(lambda: bool(steps.steps))
    bad.send(b"{}")
    assert (await bad.whole()).failure[0] == 400
    await until(lambda: server.seen[0].cancelled)


async def test_what_names_no_request_is_ignored(node: Made) -> None:
    sidecar, _ = node
    nobody = Asking(sidecar.http, 77)
    nobody.send(b"{}")
    nobody.grant(5)
    nobody.cancel()
    sidecar.http.send()
    assert (await sidecar.ask()).status == 200 and nobody.downs.empty()


async def test_a_gateway_that_reads_nothing_is_not_read_either(node: Made) -> None:
    sidecar, _ = node
    call: Any = sidecar.stub.Http()
    head = pb.HttpRequest(request_id="r", model="m", path="/nowhere", tenant="t")

    async def flood() -> None:
        for first in range(0, 1_000_000, 1000):
            ups = [pb.HttpUp(flight=number, head=head) for number in range(first, first + 1000)]
            await call.write(pb.HttpUps(ups=ups))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flood(), 3)
    outcomes = sidecar.sidecar.handler.relay.tally.outcomes
    assert 0 < outcomes["refused"] < 100_000
    call.cancel()


async def test_a_hundred_streams_at_a_time_come_through_whole(node: Made) -> None:
    sidecar, server = node
    server.answer = streamed(*map(str, range(40)), wait=lambda n: asyncio.sleep(0.002))
    asked = [sidecar.call(request_id=f"r-{n}") for n in range(100)]
    expected = b"".join(b"data: %d\n\n" % n for n in range(40))
    for answer in await asyncio.gather(*(asking.whole() for asking in asked)):
        assert answer.body == expected
    assert len(sidecar.http.messages) < 2000
