"""A service's life: what ends it, and with which status."""

from __future__ import annotations

import asyncio

import pytest

from contracts.exits import START_AGAIN
from runtime.service import Tasks, serve


class Played:
    """Notes what happens to it."""

    def __init__(self) -> None:
        self.life: list[str] = []

    async def start(self) -> None:
        self.life.append("start")

    async def drain(self) -> None:
        self.life.append("drain")

    async def stop(self) -> None:
        self.life.append("stop")


async def test_a_service_that_is_to_be_started_again_drains_and_says_so() -> None:
    played, tasks = Played(), Tasks()
    running = asyncio.ensure_future(serve(played, tasks.failed, 5.0, tasks.start_again))
    await asyncio.sleep(0.05)
    assert played.life == ["start"] and not running.done()
    tasks.start_again.set()
    assert await running == START_AGAIN
    assert played.life == ["start", "drain", "stop"]


async def test_a_service_whose_task_failed_has_failed_even_when_it_is_to_be_started_again() -> None:
    played, tasks = Played(), Tasks()
    tasks.start_again.set()
    tasks.fail(RuntimeError("broken"))
    assert await serve(played, tasks.failed, 5.0, tasks.start_again) == 1
    assert played.life == ["start", "stop"]


async def test_a_start_that_fails_is_the_callers() -> None:
    class Failing(Played):
        async def start(self) -> None:
            raise LookupError

    with pytest.raises(LookupError):
        await serve(Failing(), Tasks().failed, 5.0)
