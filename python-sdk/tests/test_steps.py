"""Retrievers and tools without a framework: the hint is given before the step runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer, serving

import upbeat
from upbeat.steps import Step
from upbeat.workflow import Workflow


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as made:
        yield made


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[upbeat.AdvisoryClient]:
    with upbeat.AdvisoryClient(server.url) as made:
        yield made


class Recorder(upbeat.HintClient):
    """Keeps what is given, in the caller's own order."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.given: list[tuple[Any, ...]] = []

    def advise(self, session_id: str, **more: Any) -> None:
        self.given.append(("advise", session_id, more.get("expected_arrival")))

    def invalidate(self, session_id: str | None = None, **more: Any) -> None:
        self.given.append(("invalidate", session_id))


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_query_that_enters_retrieval_is_hinted_before_it_is_answered(
    server: ScriptedServer, client: upbeat.AdvisoryClient
) -> None:
    @upbeat.retriever(client, session=lambda query, *, chat: chat)
    def search(query: str, *, chat: str) -> list[str]:
        """Find things."""
        assert server.wait_hint(chat)
        return [query]

    assert (
        search("clocks", chat="chat-7") == ["clocks"]
        and search.__name__ == "search"
        and search.__doc__ == "Find things."
    )


async def test_asynchronous_steps_too(server: ScriptedServer, client: upbeat.AdvisoryClient) -> None:
    @upbeat.tool(client)
    async def look_up(what: str) -> str:
        assert await asyncio.to_thread(server.wait_hint, "job7:clerk")
        return what

    with upbeat.speaking_as(upbeat.Hop("desk", "clerk", "job7")):
        assert await look_up("clock") == "clock"
    async with upbeat.retriever(client, "chat-8"):
        assert await asyncio.to_thread(server.wait_hint, "chat-8")


def test_an_error_out_of_a_retriever_withdraws_the_hint_and_one_out_of_a_tool_does_not() -> None:
    recorder = Recorder()
    for made in (upbeat.retriever(recorder, "a"), upbeat.tool(recorder, "b")):
        with pytest.raises(OSError, match="gone"), made:
            raise OSError("gone")
    assert recorder.given == [("advise", "a", None), ("invalidate", "a"), ("advise", "b", None)]


def test_a_step_says_when_its_request_is_expected_once_it_has_been_seen() -> None:
    recorder, clock = Recorder(), Clock()
    step = Step(recorder, "a", True, {}, clock)
    for _ in range(2):
        with step:
            clock.now_s += 4.0
    assert recorder.given == [("advise", "a", None), ("advise", "a", 4.0)]


def test_the_block_around_says_whose_step_it_is_and_without_one_nothing_happens() -> None:
    recorder = Recorder()
    search = upbeat.retriever(recorder)(lambda: "found")
    assert search() == "found" and recorder.given == []
    with upbeat.speaking_as(upbeat.Hop("desk", "clerk", "job7")):
        assert search() == "found"
    assert [given[1] for given in recorder.given] == ["job7:clerk"]


def test_a_session_that_cannot_be_told_stops_nobody() -> None:
    recorder = Recorder()
    search = upbeat.retriever(recorder, session=lambda query: query["chat"])(lambda query: "found")
    assert search({}) == "found" and recorder.given == [] and recorder.counters.invalid == 1


def test_what_a_wrapped_function_raises_is_its_own() -> None:
    @upbeat.tool(Recorder(), "a")
    def breaks() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks()


async def test_a_step_that_gives_items_lasts_until_the_last_one() -> None:
    recorder, clock = Recorder(), Clock()
    step = Step(recorder, "a", True, {}, clock)

    @step
    def pages() -> Iterator[int]:
        for page in range(3):
            clock.now_s += 2.0
            yield page

    @step
    async def streamed() -> Any:
        for page in range(3):
            clock.now_s += 2.0
            yield page

    assert list(pages()) == [0, 1, 2]
    assert [page async for page in streamed()] == [0, 1, 2]
    assert next(iter(pages())) == 0
    assert recorder.given == [("advise", "a", None), ("advise", "a", 6.0), ("advise", "a", 6.0)], (
        "a reader who stops early withdraws nothing"
    )


def test_one_step_may_be_entered_many_times_at_once() -> None:
    recorder = Recorder()
    step = upbeat.retriever(recorder, "a")
    with step, pytest.raises(OSError, match="inner"), step:
        raise OSError("inner")
    assert [given[0] for given in recorder.given] == ["advise", "advise", "invalidate"]


def test_a_workflow_learns_how_long_it_takes_from_one_agent_to_the_next() -> None:
    recorder, clock = Recorder(), Clock()
    team = Workflow(recorder, "team", clock=clock)
    for run in ("r1", "r2"):
        team.asks(team.hop("writer", run), ["critic", "editor"])
        clock.now_s += 5.0
        team.asks(team.hop("critic", run))
        team.ends(run)
    assert recorder.given == [
        ("advise", "r1:critic", None),
        ("advise", "r1:editor", None),
        ("invalidate", "r1:editor"),
        ("advise", "r2:critic", 5.0),
        ("advise", "r2:editor", None),
        ("invalidate", "r2:editor"),
    ]


def test_an_agent_with_a_hundred_successors_hints_few_of_them() -> None:
    recorder = Recorder()
    team = Workflow(recorder, "team")
    team.asks(team.hop("a", "r"), [f"agent {i}" for i in range(100)])
    assert len(recorder.given) == 16


def test_many_runs_are_forgotten_oldest_first() -> None:
    recorder = Recorder()
    team = Workflow(recorder, "team")
    for i in range(1100):
        team.asks(team.hop("a", f"r{i}"), ["b"])
    recorder.given.clear()
    team.ends("r0")
    team.ends("r1099")
    assert recorder.given == [("invalidate", "r1099:b")]
