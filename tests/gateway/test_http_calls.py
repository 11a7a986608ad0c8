"""The call that carries all requests to an engine's HTTP: bodies in turn, windows, and what breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from fake_sidecar import HttpStack, head_of, http_stack
from gateway_fakes import MODEL, until
from hypothesis import given
from hypothesis import strategies as st

from contracts.http_flights import PIECE_BYTES, WINDOW_BYTES
from contracts.v1 import worker_pb2 as pb
from gateway.core.body_turns import BodyTurns
from gateway.flights import Carried, WorkerLost
from gateway.http_flights import HttpFailed, HttpFlight, HttpHead

CHAT = "/v1/chat/completions"


def body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture
async def s() -> AsyncIterator[HttpStack]:
    async with http_stack() as running:
        yield running


# ---- bodies in turn --------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 5 * PIECE_BYTES // 2), max_size=5), st.data())
def test_every_body_is_sent_whole_and_in_order(sizes: list[int], data: st.DataObject) -> None:
    turns, sent, whole = BodyTurns(), dict[int, bytes](), set[int]()
    bodies = {number: bytes([number]) * size for number, size in enumerate(sizes)}
    for number, made in bodies.items():
        turns.add(number, made)
        sent[number] = b""
    dropped = data.draw(st.sampled_from([None, *bodies]))
    while turns:
        room = data.draw(st.sampled_from([PIECE_BYTES, PIECE_BYTES // 3]))
        piece = turns.next(room) or turns.next(PIECE_BYTES)
        assert piece is not None and len(piece[1]) <= PIECE_BYTES and piece[0] not in whole
        turns.validate()
        sent[piece[0]] += piece[1]
        whole |= {piece[0]} if piece[2] else set()
        if dropped is not None and dropped not in whole:
            turns.drop(dropped)
            del bodies[dropped]
            dropped = None
    assert all(sent[number] == made and number in whole for number, made in bodies.items())


def test_small_bodies_pass_large_ones_which_take_turns() -> None:
    turns = BodyTurns()
    turns.add(1, b"a" * 3 * PIECE_BYTES)
    turns.add(2, b"b" * 2 * PIECE_BYTES)
    order = []
    for _ in range(2):
        piece = turns.next(PIECE_BYTES)
        assert piece is not None
        order.append(piece[0])
    turns.add(3, b"small")
    assert turns.next(3) is None
    while (piece := turns.next(PIECE_BYTES)) is not None:
        order.append(piece[0])
    assert order == [1, 2, 3, 1, 2, 1]


async def test_a_large_body_arrives_whole_and_holds_nobody_up(s: HttpStack) -> None:
    pin = {"X_Upbeat_Node": "node-0"}
    large = [asyncio.create_task(s.raw(CHAT, body(letter * (6 << 20)), **pin)) for letter in "ab"]
    small = [asyncio.create_task(s.raw(CHAT, body(f"{n}"), **pin)) for n in range(5)]
    for answer in (*large, *small):
        assert (await answer)[0] == 200
    texts = {heard.body["messages"][0]["content"] for heard in s.heard}
    assert texts == {"a" * (6 << 20), "b" * (6 << 20), *map(str, range(5))}
    assert s.sidecars[0].calls == 1, "one call for all"


# ---- one flight ------------------------------------------------------------------------------------------------------
class Noted:
    """A backend and a call that note what a flight does."""

    node = "node-0"

    def __init__(self) -> None:
        self.granted: list[int] = []
        self.cancelled: list[int] = []
        self.forgotten = 0

    def drop(self, flight: Carried) -> None:
        flight.stop()

    def forget(self, flight: Carried) -> None:
        self.forgotten += 1

    def hear(self) -> None: ...

    def lost(self, flight: Carried) -> WorkerLost:
        return WorkerLost(self.node)

    def grant(self, flight: int, taken_bytes: int) -> None:
        self.granted.append(taken_bytes)

    def cancel(self, flight: int) -> None:
        self.cancelled.append(flight)


def begun() -> tuple[HttpFlight, Noted]:
    noted = Noted()
    return HttpFlight(noted, noted, 7, "r-7", 0.0, timed=True), noted


def piece(length: int) -> pb.HttpDown:
    return pb.HttpDown(flight=7, body=b"x" * length)


HEAD, END = pb.HttpDown(flight=7, head=pb.HttpAnswer(status=200)), pb.HttpDown(flight=7, end=True)


async def test_what_is_taken_makes_room_by_halves_of_a_window() -> None:
    flight, noted = begun()
    flight.hear(HEAD)
    assert isinstance(await flight.next(), HttpHead)
    for _ in range(8):
        flight.hear(piece(WINDOW_BYTES // 8))
    for number in range(8):
        assert await flight.next() == b"x" * (WINDOW_BYTES // 8)
        assert len(noted.granted) == (number + 1) // 4
    assert noted.granted == [WINDOW_BYTES // 2] * 2
    flight.hear(piece(WINDOW_BYTES))
    flight.hear(END)
    assert len(await flight.next() or b"") == WINDOW_BYTES and await flight.next() is None  # type: ignore[arg-type]
    assert len(noted.granted) == 2, "it has ended"
    assert flight.ended and noted.forgotten == 1 and not noted.cancelled


@pytest.mark.parametrize(
    ("downs", "why"),
    [
        ([HEAD, *[piece(WINDOW_BYTES // 4)] * 5], "more of an answer than it may"),
        ([HEAD, piece(WINDOW_BYTES), piece(0)], "more of an answer than it may"),
        ([HEAD, HEAD], "two heads"),
        ([HEAD, piece(1), HEAD], "two heads"),
        ([piece(1)], "without a head"),
        ([END], "without a head"),
        ([pb.HttpDown(flight=7)], "without a head"),
    ],
)
async def test_what_a_worker_may_not_say_fails_the_request_and_cancels_it(downs: list[pb.HttpDown], why: str) -> None:
    flight, noted = begun()
    for down in downs:
        assert not flight.ended
        flight.hear(down)
    events = [await flight.next() for _ in range(len(downs))]
    failed = events[-1]
    assert isinstance(failed, HttpFailed) and why in failed.error.message and failed.ran
    assert flight.ended and noted.cancelled == [7]


# ---- with a worker ---------------------------------------------------------------------------------------------------
async def test_a_worker_that_sends_more_than_there_is_room_for_fails_that_request_only(s: HttpStack) -> None:
    first = s.sidecars[0]
    first.answers, first.ignores_windows = (
        (head_of("text/event-stream"), [b"data: " + b"x" * 65_528 + b"\n\n"] * 64),
        True,
    )
    slow = await s.http.post(s.url + CHAT, json=body(stream=True))
    await slow.content.readexactly(10)
    await until(lambda: len(first.broken) == 1 or first.sent_bytes >= 64 << 16)
    first.answers = None
    assert (await s.raw(CHAT, body()))[2]["X-Upbeat-Node"] == "node-0"
    slow.close()


async def test_a_call_that_breaks_loses_its_requests_and_the_next_request_opens_another(s: HttpStack) -> None:
    first = s.sidecars[0]
    first.breaks_after = 1
    pin = {"X_Upbeat_Node": "node-0"}
    going = [asyncio.create_task(s.raw(CHAT, body(f"{n}", stream=True), **pin)) for n in range(3)]
    await until(lambda: len(first.heard) == 3)
    await asyncio.sleep(0.2)
    first.breaks_after, first.ends_with = 0, grpc.StatusCode.INTERNAL
    status, answer, _ = await s.raw(CHAT, body("breaks", stream=True))
    assert status == 200 and answer.endswith(b"[DONE]\n\n"), "elsewhere, as its caller had nothing yet"
    for lost in going:
        _, answer, _ = await lost
        error = json.loads(answer[:-2].rpartition(b"data: ")[2])["error"]
        assert error["code"] == "unavailable" and "cannot be continued" in error["message"]
    assert len(first.broken) == 4 and first.calls == 1
    first.breaks_after = None
    assert (await s.raw(CHAT, body(), **pin))[0] == 200 and first.calls == 2
