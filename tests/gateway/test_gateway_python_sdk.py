"""The Python SDK and the gateway: what the one sends the other takes, and both have the same rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import upbeat
from gateway_fakes import MODEL, stack, until
from hypothesis import given, settings
from hypothesis import strategies as st
from upbeat import hints

from contracts.advisory import DEFAULT_TTL_S, MAX_ADVISORIES, parse_advisories
from contracts.errors import InvalidRequest
from contracts.ids import check_session_id
from gateway.core.hops import HEADERS, hop_of

ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers(-2000, 90_000)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["a:b", "..", "x" * 129])
)
FIELDS = ("session_id", "model_id", "expected_arrival", "ordered", "priority", "ttl_s")


def test_the_sdk_has_the_servers_figures() -> None:
    assert (hints.MAX_BATCH, hints.DEFAULT_TTL_S) == (MAX_ADVISORIES, DEFAULT_TTL_S)
    assert {f.name for f in dataclasses.fields(hints.Advisory)} == set(FIELDS)
    assert {"X-Session-Id", *HEADERS} == set(upbeat.Hop("w", "a", "r").headers)


@settings(deadline=None, max_examples=150)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, ANYTHING))
    | st.fixed_dictionaries({"session_id": st.just("s")}, optional=dict.fromkeys(FIELDS[1:], ANYTHING)),
    st.floats(0, 100),
)
def test_every_hint_that_the_sdk_takes_the_server_takes(said: dict[str, Any], waited_s: float) -> None:
    try:
        hint = hints.Advisory(**{"session_id": None, **said})
    except hints.BadHint:
        defaults = {"ttl_s", "priority", "ordered"}  # where null is the server's word for the default
        if not any(said.get(name, 0) is None for name in defaults):
            try:
                parse_advisories(said)
            except InvalidRequest:
                return
            raise AssertionError(f"the server takes {said}") from None
        return
    (read,) = parse_advisories(hint.body(waited_s))
    assert (read.session_id, read.model_id, read.ordered, read.priority) == (
        hint.session_id,
        hint.model_id,
        hint.ordered,
        hint.priority,
    )
    assert (read.expected_arrival_s is None) == (hint.expected_arrival is None)


@settings(deadline=None)
@given(st.text(max_size=300))
def test_every_name_that_the_sdk_makes_the_server_takes(text: str) -> None:
    assert check_session_id(upbeat.name_of(text)) == upbeat.name_of(text)
    hop = upbeat.Hop(text, text[::-1], text)
    assert upbeat.is_name(text) == (upbeat.name_of(text) == text)
    read = hop_of(hop.headers, hop.session_id)
    assert read is not None and (read.workflow, read.agent, read.run) == (hop.workflow, hop.agent, hop.run)


async def test_hints_reach_the_scheduler_and_the_request_has_the_same_session_and_hop() -> None:
    async with stack() as s, upbeat.AsyncAdvisoryClient(f"{s.url}/v1") as client:
        hop = client.hop("software team", "Fact Checker", "job7", model_id=MODEL, expected_arrival=3.0, priority=2)
        for i in range(300):
            client.advise(f"chat-{i}")
        client.invalidate("chat-0")
        assert await client.flush()
        await until(lambda: len(s.scheduler.advised) >= 300 and len(s.scheduler.invalidated) == 1)
        first = s.scheduler.advised[0]
        assert (first.session.session_id, first.model_id, first.priority) == ("job7:Fact-Checker", MODEL, 2)
        assert 2.0 < first.expected_arrival_s <= 3.0
        status, _, headers = await s.chat(headers=hop.headers)
        assert status == 200 and headers["X-Session-Id"] == hop.session_id
        placed = s.scheduler.placed[-1]
        assert (placed.hop.workflow, placed.hop.agent, placed.hop.run) == ("software-team", "Fact-Checker", "job7")
        assert client.counters.sent + client.counters.merged == 302 and client.counters.failed == 0


async def test_over_the_hint_limit_the_sdk_waits_as_it_is_told() -> None:
    async with stack(max_advisories_per_s=2) as s, upbeat.AsyncAdvisoryClient(s.url) as client:
        for i in range(3):
            client.advise(f"chat-{i}")
            assert await client.flush(20)
        assert client.counters == upbeat.Counters(sent=3)
        await until(lambda: [a.session.session_id for a in s.scheduler.advised] == ["chat-0", "chat-1", "chat-2"])


async def test_a_wrong_key_is_counted_and_nothing_else() -> None:
    keys = [{"key": "key-of-acme", "tenant": "acme"}]
    async with stack(wait=False, api_keys=keys) as s:
        async with upbeat.AsyncAdvisoryClient(s.url, "guessed") as client:
            client.advise("chat-1")
            assert await client.flush() and client.counters == upbeat.Counters(failed=1)
        async with upbeat.AsyncAdvisoryClient(s.url, "key-of-acme") as client:
            client.advise("chat-1")
            assert await client.flush() and client.counters == upbeat.Counters(sent=1)
