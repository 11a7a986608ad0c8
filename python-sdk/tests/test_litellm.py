"""The callback in the real LiteLLM: requests name their session, and a session that called tools is hinted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks a server for prices
litellm = pytest.importorskip("litellm")

from scripted_server import Reply, ScriptedServer, serving  # noqa: E402

import upbeat  # noqa: E402
import upbeat.litellm  # noqa: E402
from upbeat.litellm import UpbeatCallback, session_in  # noqa: E402

MESSAGES = [{"role": "user", "content": "What does it do?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLS = Reply(calls=(("look", {}),))


@pytest.fixture(autouse=True)
def no_callbacks_stay() -> Iterator[None]:
    yield
    litellm.logging_callback_manager._reset_all_callbacks()


def asked(server: ScriptedServer, **more: Any) -> dict[str, Any]:
    return {"model": "openai/m", "messages": MESSAGES, "api_base": f"{server.url}/v1", "api_key": "none", **more}


@pytest.mark.parametrize(
    ("more", "session"),
    [
        ({"litellm_session_id": "a"}, "a"),
        ({"metadata": {"session_id": "b"}}, "b"),
        ({"extra_headers": {"x-session-id": "c"}, "litellm_session_id": "no"}, "c"),
        ({"litellm_session_id": "two words"}, "two-words"),
        ({"user": "me"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_request_names_its_session(more: dict[str, Any], session: str | None) -> None:
    with serving(Reply("Yes."), Reply("Yes."), Reply("Yes.")) as server, upbeat.AdvisoryClient(server.url) as client:
        litellm.callbacks = [UpbeatCallback(client)]
        litellm.completion(**asked(server, **more))
        asyncio.run(litellm.acompletion(**asked(server, **more)))
        list(litellm.completion(**asked(server, stream=True, **more)))
        assert [r.session for r in server.requests()] == [session] * 3
        assert all("extra_headers" not in r.body for r in server.requests())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_answer_that_calls_tools_hints_the_session(stream: bool, asynchronous: bool) -> None:
    with serving(CALLS, Reply("It ticks.", after_hint="s1")) as server, upbeat.AdvisoryClient(server.url) as client:
        litellm.callbacks = [UpbeatCallback(client)]
        given = asked(server, litellm_session_id="s1", tools=[TOOL], stream=stream)

        async def talk() -> None:
            for _ in range(2):
                answer = await litellm.acompletion(**given)
                if stream:
                    [chunk async for chunk in answer]
                assert await asyncio.to_thread(server.wait_hint, "s1")

        if asynchronous:
            asyncio.run(talk())
        else:
            for _ in range(2):
                answer = litellm.completion(**given)
                list(answer) if stream else None
                assert server.wait_hint("s1")
        order = server.order()
        assert order == [("request", "s1"), ("advise", "s1"), ("request", "s1")]


def test_the_delay_of_the_results_is_learned() -> None:
    with serving(CALLS, CALLS, Reply("Done.")) as server, upbeat.AdvisoryClient(server.url) as client:
        litellm.callbacks = [UpbeatCallback(client)]
        for times in (1, 2):
            litellm.completion(**asked(server, litellm_session_id="s2", tools=[TOOL]))
            assert server.wait_hint("s2", times)
        litellm.completion(**asked(server, litellm_session_id="s2"))
        first, second = (e.body for e in server.events if e.kind == "advise")
        assert "expected_arrival" not in first and 0 <= second["expected_arrival"] < 10


def test_another_provider_gets_neither_header_nor_hint() -> None:
    with serving() as ours, serving(CALLS, CALLS) as other, upbeat.AdvisoryClient(ours.url) as client:
        litellm.callbacks = [UpbeatCallback(client)]
        litellm.completion(**asked(other, litellm_session_id="s3", tools=[TOOL]))
        asyncio.run(litellm.acompletion(**asked(other, litellm_session_id="s3", tools=[TOOL])))
        assert client.flush()
        assert [r.session for r in other.requests()] == [None, None] and not ours.events
        assert not [e for e in other.events if e.kind == "advise"]


def test_a_call_in_a_block_of_the_client_has_its_session() -> None:
    with serving(Reply("Yes.")) as server, upbeat.AdvisoryClient(server.url) as client:
        litellm.callbacks = [UpbeatCallback(client)]
        with client.session("chat-7"):
            litellm.completion(**asked(server))
        assert [r.session for r in server.requests()] == ["chat-7"]


def test_a_proxys_request_has_the_session_of_its_clients_header() -> None:
    def data(**headers: str) -> dict[str, Any]:
        return {"model": "m", "proxy_server_request": {"headers": headers}}

    assert session_in(data(**{"X-OpenWebUI-Chat-Id": "chat-1"})) == "chat-1"
    assert session_in(data(**{"x-session-id": "first", "x-chat-id": "second"})) == "first"
    assert session_in(data(authorization="Bearer k")) is None


def test_a_session_that_cannot_be_told_costs_nothing() -> None:
    with serving(Reply("Yes.")) as server, upbeat.AdvisoryClient(server.url) as client:
        litellm.callbacks = [UpbeatCallback(client, session_of=lambda call: call["nowhere"])]
        assert litellm.completion(**asked(server)).choices[0].message.content == "Yes."
        assert client.counters.invalid > 0


def test_the_callback_of_a_config_is_made_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT_BASE_URL", "http://127.0.0.1:9/v1")
    made = upbeat.litellm.callback
    assert made is upbeat.litellm.callback and made.client.base_url == "http://127.0.0.1:9"
    with pytest.raises(AttributeError):
        upbeat.litellm.nothing  # noqa: B018
