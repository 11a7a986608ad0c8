"""Threads with turns: who asks for much waits for itself, and everybody who waits hears of the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from contracts.errors import Unavailable
from runtime.thread_turns import ThreadTurns


class Busy:
    """A thread that owner `a` keeps busy until `let_go`, and what it did afterwards, in order."""

    def __init__(self) -> None:
        self.turns, self.done = ThreadTurns("busy", waiting_each=4), list[str]()
        self._gate = threading.Event()
        self.asked = [asyncio.ensure_future(self.turns.run("a", self._gate.wait))]

    def ask(self, owner: str, name: str) -> asyncio.Future[None]:
        asked = asyncio.ensure_future(self.turns.run(owner, self._doing(name)))
        self.asked.append(asked)
        return asked

    def _doing(self, name: str) -> Callable[[], None]:
        return lambda: self.done.append(name)

    async def let_go(self) -> None:
        await asyncio.sleep(0)
        self._gate.set()
        await asyncio.gather(*self.asked, return_exceptions=True)


@pytest.fixture
async def busy() -> AsyncIterator[Busy]:
    made = Busy()
    await asyncio.sleep(0)
    yield made
    await made.let_go()
    await made.turns.close(lambda: None)


async def test_an_owners_calls_wait_behind_its_own(busy: Busy) -> None:
    for i in range(4):
        busy.ask("a", f"a{i}")
    for owner, name in (("b", "b0"), ("c", "c0"), ("b", "b1")):
        busy.ask(owner, name)
    await busy.let_go()
    assert busy.done.index("b0") <= 2 and busy.done.index("c0") <= 2 and busy.done.index("b1") <= 4
    assert [name for name in busy.done if name[0] == "a"] == ["a0", "a1", "a2", "a3"]


async def test_more_than_may_wait_is_refused(busy: Busy) -> None:
    for i in range(4):
        busy.ask("a", f"a{i}")
    await asyncio.sleep(0)
    with pytest.raises(asyncio.QueueFull):
        await busy.ask("a", "too many")
    busy.ask("b", "b0")
    await busy.let_go()
    assert sorted(busy.done) == ["a0", "a1", "a2", "a3", "b0"]


async def test_a_call_that_nobody_waits_for_any_more_is_not_made(busy: Busy) -> None:
    gone, stays = busy.ask("a", "gone"), busy.ask("a", "stays")
    await asyncio.sleep(0)
    gone.cancel()
    await busy.let_go()
    assert busy.done == ["stays"] and stays.done()


async def test_what_work_raises_its_caller_gets_and_the_next_call_is_made(busy: Busy) -> None:
    class Panic(BaseException):
        """As of a Rust library."""

    def panic() -> None:
        raise Panic

    failed = asyncio.ensure_future(busy.turns.run("a", panic))
    await asyncio.sleep(0)
    stays = busy.ask("a", "stays")
    await busy.let_go()
    with pytest.raises(Panic):
        await failed
    await stays
    assert busy.done == ["stays"]


async def test_what_waits_when_it_closes_is_told_so_and_what_runs_ends_first(busy: Busy) -> None:
    waits = busy.ask("a", "never")
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(busy.turns.close(lambda: busy.done.append("last")))
    with pytest.raises(Unavailable):
        await waits
    with pytest.raises(Unavailable):
        await busy.turns.run("b", lambda: None)
    assert busy.done == []
    await busy.let_go()
    await closing
    assert busy.done == ["last"]


async def test_who_stops_waits_for_nothing(busy: Busy) -> None:
    waits = busy.ask("a", "never")
    await asyncio.sleep(0)
    busy.turns.stop()
    with pytest.raises(Unavailable):
        await waits
    await busy.let_go()
    assert await busy.asked[0] is True and busy.done == []
