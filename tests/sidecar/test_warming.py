"""Hinted sessions on their way into a server's own cache: only while it is idle, and never a turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.ids import SessionKey
from contracts.warm_up import encode_forget, encode_warm_up, note_of
from sidecar.client import ServerGone
from sidecar.core.flights import Flight, Flights
from sidecar.core.pace import Pace
from sidecar.core.samples import Sample
from sidecar.warming import PATH, Warming


class Server:
    """Answers what it is asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status, self.gone = 200, False

    async def ask(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        assert path == PATH
        if self.gone:
            raise ServerGone("is not there", sent=False)
        self.bodies.append(json.loads(body))
        return self.status, b"{}"


class Setup:
    def __init__(self) -> None:
        self.server, self.flights = Server(), Flights()
        self.watching = SimpleNamespace(up=True, transfers=True, prioritises=False, routes={PATH: None}, pace=Pace())
        self.warming = Warming(self.server, "m", self.flights, self.watching)  # type: ignore[arg-type]

    def offer(self, name: str = "s", tokens: int = 3, expires_s: float = 5.0) -> None:
        note = note_of("salt", [11, 12, 13, 14])
        self.warming.offer(encode_warm_up(SessionKey("t", name), note, tokens, expires_s))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.server.bodies) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def sessions(self) -> list[str]:
        return [body["kv_transfer_params"]["upbeat"]["session"] for body in self.server.bodies]


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    task = asyncio.create_task(made.warming.run())
    yield made
    task.cancel()


async def test_a_session_is_asked_for_with_one_token_more_than_is_known(setup: Setup) -> None:
    setup.offer()
    await setup.until(1)
    assert setup.server.bodies == [
        {
            "model": "m",
            "prompt": [11, 12, 13, 13],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": "salt",
            "kv_transfer_params": {"upbeat": {"tenant": "t", "session": "s", "warms": True}},
        }
    ]
    assert setup.warming.warmed == 1


async def test_where_the_server_has_priorities_nobody_waits_for_it(setup: Setup) -> None:
    setup.watching.prioritises = True
    setup.offer()
    await setup.until(1)
    assert setup.server.bodies[0]["priority"] == 1000


async def test_a_server_with_requests_is_left_alone_until_it_is_idle(setup: Setup) -> None:
    flight = Flight("r", 0, 1, 1, 0.0)
    setup.flights.begin(flight)
    setup.offer("ends meanwhile", expires_s=0.1)
    setup.offer("waits")
    setup.offer("waits")
    await asyncio.sleep(0.2)
    assert not setup.server.bodies
    setup.flights.end(flight)
    await setup.until(1)
    await asyncio.sleep(0.05)
    assert setup.sessions() == ["waits"]


@pytest.mark.parametrize("lacks", ["up", "transfers", "routes"])
async def test_a_server_that_cannot_is_not_asked(setup: Setup, lacks: str) -> None:
    setattr(setup.watching, lacks, {})
    setup.offer()
    await asyncio.sleep(0.1)
    assert not setup.server.bodies


async def test_what_fails_leaves_the_next_alone(setup: Setup) -> None:
    setup.warming.offer(b"nonsense")
    setup.server.gone = True
    setup.offer("lost")
    await asyncio.sleep(0.1)
    setup.server.gone, setup.server.status = False, 400
    setup.offer("refused")
    await setup.until(1)
    setup.server.status = 200
    setup.offer("comes")
    await setup.until(2)
    await asyncio.sleep(0.01)
    assert setup.sessions() == ["refused", "comes"] and setup.warming.warmed == 1


async def test_a_session_that_was_erased_meanwhile_is_not_computed_again(setup: Setup) -> None:
    setup.flights.begin(flight := Flight("r", 0, 1, 1, 0.0))
    setup.offer("erased")
    setup.offer("stays")
    setup.warming.offer(encode_forget(SessionKey("t", "erased")))
    setup.flights.end(flight)
    await setup.until(1)
    await asyncio.sleep(0.05)
    assert setup.sessions() == ["stays"]


async def test_only_the_latest_hints_wait(setup: Setup) -> None:
    setup.flights.begin(flight := Flight("r", 0, 1, 1, 0.0))
    for number in range(70):
        setup.offer(str(number))
    setup.flights.end(flight)
    await setup.until(64)
    assert setup.sessions() == [str(number) for number in range(6, 70)]


def sample(ended: int, prefill_s: float, computed: float, decode_s: float, generated: float) -> Sample:
    ended_by_field = {
        "ended": ended,
        "ended_prefill_s": prefill_s,
        "ended_computed_tokens": computed,
        "ended_decode_s": decode_s,
        "ended_generated_tokens": generated,
    }
    fields: dict[str, Any] = dict.fromkeys(Sample.__dataclass_fields__, 0.0)
    return Sample(**(fields | ended_by_field))


def test_a_warm_up_says_nothing_about_the_pace() -> None:
    pace, other = Pace(), Pace()
    for learns in (pace, other):
        learns.seen(sample(0, 0, 0, 0, 0))
    pace.own(0.06)
    pace.seen(sample(5, 2.06, 2001, 0.4, 41))
    other.seen(sample(4, 2.0, 2000, 0.4, 40))
    assert (pace.requests, pace.answer_tokens) == (other.requests, other.answer_tokens) == (4, 10)
    assert pace.prefill_token_s == pytest.approx(other.prefill_token_s) == pytest.approx(0.001)
    assert pace.request_s == pytest.approx(other.request_s)
