"""Logprobs of long answers are encoded as they come, and held among their tenant's bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, stack, until

from gateway.encoded_arrays import EncodedArray
from gateway.routes.answer import _Run
from gateway.sse import encoded

TOKENS = 100
CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
LEGACY = "/v1/completions", {"prompt": "hi", "logprobs": 2}
RESPONSE = "/v1/responses", {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
ALL = pytest.mark.parametrize(("path", "body"), [CHAT, LEGACY, RESPONSE])


def wanted(path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == RESPONSE[0] else "max_tokens"
    return {"model": MODEL, limit: TOKENS, **body, **more}


def logprobs_of(path: str, answer: dict[str, Any]) -> list[Any]:
    if path == RESPONSE[0]:
        return list(answer["output"][0]["content"][0]["logprobs"])
    said = answer["choices"][0]["logprobs"]
    return list(said["content"] if path == CHAT[0] else said["top_logprobs"])


def most_at_a_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each array is given at a time, and how many tokens are left at each end of a request."""
    added, add, end = list[int](), EncodedArray.add, _Run.end

    def noted(self: EncodedArray, values: Any) -> int:
        added.append(len(values))
        return add(self, values)

    def ended(self: _Run) -> None:
        added.extend(len(choice.logprobs) for choice in self.choices)
        end(self)

    monkeypatch.setattr(EncodedArray, "add", noted)
    monkeypatch.setattr(_Run, "end", ended)
    return added


async def held_nothing(s: Stack) -> None:
    parts = s.gateway.parts
    assert parts is not None
    await until(lambda: parts.bodies.held == 0)


@ALL
async def test_a_whole_answers_logprobs_are_encoded_as_they_come(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(1) as s:
        s.workers[0].token_s = 0.001
        added = most_at_a_time(monkeypatch)
        status, answer, _ = await s.post(path, wanted(path, body))
        assert status == 200 and len(logprobs_of(path, answer)) == TOKENS
        assert sum(added) >= TOKENS and max(added) < TOKENS / 2, added
        if path == RESPONSE[0]:
            _, stored = await s.get(f"{path}/{answer['id']}")
            assert stored["output"] == answer["output"]
        await held_nothing(s)


@ALL
async def test_a_stream_keeps_no_tokens_that_it_has_told(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(1) as s:
        s.workers[0].token_s = 0.001
        left = most_at_a_time(monkeypatch)
        async with s.http.post(s.url + path, json=wanted(path, body, stream=True)) as r:
            said = await r.text()
        assert r.status == 200 and "logprob" in said
        assert left[-1] == 0 and max(left) < TOKENS / 2 + 1, left
        await held_nothing(s)


@ALL
@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_that_are_kept_need_room_among_the_tenants_bodies(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async with stack(1, body_memory_bytes=1 << 20) as s:
        parts = s.gateway.parts
        assert parts is not None
        with parts.bodies.sending("default", (1 << 20) - 3000):
            async with s.http.post(s.url + path, json=wanted(path, body, stream=stream)) as r:
                said = await r.text()
        kept = path == RESPONSE[0] or not stream
        assert (r.status == 503) == (kept and not stream), said
        assert ("as much of your" in said) == kept, said
        await held_nothing(s)


def test_arrays_are_encoded_where_they_stand_also_beside_half_a_surrogate_pair() -> None:
    one, none = EncodedArray(), EncodedArray()
    assert one.add([{"a": 1}]) == 7 and one.add([]) == 0 and one.add(["b", 2]) == one.bytes_ - 7
    body = {"x": [one, {"y": none}], "text": "b\u00e9", "z": one}
    assert json.loads(encoded(body)) == {
        "x": [[{"a": 1}, "b", 2], {"y": []}],
        "text": "b\u00e9",
        "z": [{"a": 1}, "b", 2],
    }
    assert json.loads(encoded(body | {"text": "\ud800"})) == json.loads(encoded(body | {"text": "?"}))
