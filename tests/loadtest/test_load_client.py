"""The client holds conversations the way users do, measures them, and survives a server that fails."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fake_openai_server import FakeOpenAI

from loadtest.client import Endpoint, Outcome, advise
from loadtest.figures import figures
from loadtest.users import run_load
from loadtest.workload import PlannedSession, PlannedTurn
from runtime.clock import RealClock


def session(name: str, turns: int = 3, every_s: float = 0.05, typing_s: float = 0.02) -> PlannedSession:
    return PlannedSession(
        name,
        tuple(
            PlannedTurn(f"{name} says {i}", answer_tokens=4 + i, arrival_s=every_s * (i + 1), typing_s=typing_s)
            for i in range(turns)
        ),
    )


async def load(server: FakeOpenAI, *sessions: PlannedSession, hints: bool = True) -> list[Outcome]:
    return await run_load(Endpoint(server.url, "m", hints=hints), sessions, RealClock())


async def test_every_prompt_extends_the_one_before_by_the_answer_and_new_text() -> None:
    async with FakeOpenAI() as server:
        await load(server, session("a"), session("b"))
    for name in "ab":
        one, two, three = (c.body["messages"] for c in server.calls("chat", name))
        assert one == [{"role": "user", "content": f"{name} says 0"}]
        assert two == [
            *one,
            {"role": "assistant", "content": " word0 word1 word2 word3"},
            {"role": "user", "content": f"{name} says 1"},
        ]
        assert three[:3] == two and len(three) == 5


async def test_what_the_server_says_is_what_is_measured() -> None:
    async with FakeOpenAI() as server:
        outcomes = await load(server, session("a"))
    assert [o.turn for o in outcomes] == [0, 1, 2]
    assert [o.output_tokens for o in outcomes] == [4, 5, 6]
    for before, after in pairwise(outcomes):
        assert after.cached_tokens is not None and 0 < after.cached_tokens < after.prompt_tokens
        assert after.cached_tokens >= before.prompt_tokens
    for o in outcomes:
        assert o.error is None and o.node in ("node-0", "node-1")
        assert o.sent_s < o.first_s <= o.end_s
        assert o.tpot_s is not None


async def test_a_thought_is_the_first_token_and_no_part_of_the_history() -> None:
    async with FakeOpenAI(thinks_s={"a": 0.2}) as server:
        outcomes = await load(server, session("a", turns=2))
    for outcome in outcomes:
        assert outcome.first_s is not None and outcome.end_s is not None and outcome.end_s - outcome.first_s >= 0.2
    assert server.calls("chat")[1].body["messages"][1] == {"role": "assistant", "content": " word0 word1 word2 word3"}


async def test_a_hint_comes_after_the_previous_answer_and_before_its_request() -> None:
    async with FakeOpenAI() as server:
        outcomes = await load(server, session("a", every_s=0.001, typing_s=0.03))
    assert len(server.calls("hint")) == len(server.calls("chat")) == 3
    for outcome in outcomes:  # by the times of sending: each goes over a connection of its own
        assert outcome.hint is not None and outcome.hint.status == 202
        assert outcome.hint.sent_s <= outcome.sent_s
    for before, after in pairwise(outcomes):
        assert after.hint is not None and before.end_s <= after.hint.sent_s
    assert server.calls("hint")[0].body == {"session_id": "a", "model_id": "m", "expected_arrival": 0.03}


async def test_without_hints_none_is_sent_and_times_are_the_same() -> None:
    async with FakeOpenAI() as server:
        outcomes = await load(server, session("a", every_s=0.001, typing_s=0.03), hints=False)
    assert not server.calls("hint") and all(o.hint is None for o in outcomes)
    for before, after in pairwise(outcomes):
        assert after.sent_s - before.end_s >= 0.03


async def test_a_refused_request_ends_its_session_and_no_other() -> None:
    async with FakeOpenAI(fail_sessions={"a"}) as server:
        outcomes = await load(server, session("a"), session("b"))
    assert [(o.session_id, o.error is None) for o in sorted(outcomes, key=lambda o: (o.session_id, o.turn))] == [
        ("a", False),
        ("b", True),
        ("b", True),
        ("b", True),
    ]
    assert "503" in next(o.error for o in outcomes if o.error) and "no such luck" in next(
        o.error for o in outcomes if o.error
    )


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    async with FakeOpenAI(cut_sessions={"a"}) as server:
        (outcome,) = await load(server, session("a"))
    assert outcome.error == "the stream ended before [DONE]"


@pytest.mark.parametrize("words", [0, 1, 3, 5])
async def test_an_answer_of_another_length_than_planned_is_an_error_and_no_fast_answer(words: int) -> None:
    """As a server gives it that ends a stream when the next request comes, and says [DONE]."""
    async with FakeOpenAI(words={"a": words}, finish_reason="stop") as server:
        outcomes = await run_load(
            Endpoint(server.url, "m", body={"ignore_eos": True}), [session("a"), session("b")], RealClock()
        )
    (wrong,) = (o for o in outcomes if o.session_id == "a")
    assert wrong.error == f"the answer has {words} tokens where 4 were planned (finish_reason stop)"
    assert [o.error for o in outcomes if o.session_id == "b"] == [None, None, None]
    counted = figures(outcomes, nodes=2, window_s=1.0)
    assert (counted["requests"], counted["failed"], counted["end_to_end_s"]["count"]) == (4, 1, 3)


@pytest.mark.parametrize(
    ("finish_reason", "words", "fails"),
    [
        ("stop", 3, False),
        ("stop", 0, True),
        ("length", 3, True),
        (None, 3, True),
        ("stop", 5, True),
        ("length", 5, True),
    ],
)
async def test_a_model_that_may_end_its_answer_has_to_say_that_it_did(
    finish_reason: str | None, words: int, fails: bool
) -> None:
    async with FakeOpenAI(words={"a": words}, finish_reason=finish_reason) as server:
        outcome = (await load(server, session("a", turns=1)))[0]
    assert (outcome.error is not None) is fails
    assert outcome.finish_reason == finish_reason


async def test_nobody_listening_is_an_outcome_and_not_a_crash() -> None:
    outcomes = await run_load(Endpoint("http://127.0.0.1:9", "m", hints=True), [session("a")], RealClock())
    (outcome,) = outcomes
    assert outcome.error is not None and outcome.hint is not None and outcome.hint.status == 0


async def test_a_pinned_advisory_names_its_node() -> None:
    import aiohttp

    async with FakeOpenAI() as server, aiohttp.ClientSession() as http:
        assert await advise(http, Endpoint(server.url, "m"), "a", 2.0, pin_node="node-1") == 202
    assert server.calls("hint")[0].pinned == "node-1"


@pytest.mark.parametrize("key", [None, "secret-key"])
async def test_a_key_is_sent_when_there_is_one(key: str | None) -> None:
    headers = Endpoint("http://x", "m", api_key=key).headers
    assert headers == ({"Authorization": "Bearer secret-key"} if key else {})
