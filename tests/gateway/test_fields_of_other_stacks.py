"""Fields that clients of vLLM, OpenRouter, Ollama and others send: done, or accepted and ignored; what cannot be done names the remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import Stack, stack

from contracts.request import GenerateRequest, Sampling
from gateway.core.quarantine import digest
from gateway.openai.asked import Told, ask
from gateway.openai.asked_wire import decode_answer, encode_answer

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
IGNORED: dict[str, Any] = {
    "cache_salt": "s",
    "request_id": "mine",
    "provider": {"order": ["x"], "allow_fallbacks": False},
    "options": {"num_ctx": 4096},
    "include_reasoning": False,
    "return_token_ids": True,
}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


# ---- ignored -----------------------------------------------------------------------------------------------------------
async def test_what_means_nothing_here_is_accepted_and_changes_nothing(s: Stack) -> None:
    status, plain, _ = await s.chat(seed=3, session_id="a")
    assert status == 200
    status, body, _ = await s.chat(seed=3, session_id="a", **IGNORED)
    assert status == 200, body
    assert body["choices"] == plain["choices"] and body["id"] != "mine"
    without, with_them = s.workers[0].submitted
    with_them.request_id = without.request_id
    assert with_them == without
    status, body, _ = await s.post(PLAIN, {"model": "toy", "prompt": "x", **IGNORED})
    assert status == 200, body


# ---- for the chat template ---------------------------------------------------------------------------------------------
ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
TOLD: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"chat_template_kwargs": {}}, None),
    ({"chat_template_kwargs": None, "thinking": None, "reasoning": None, "reasoning_effort": None}, None),
    ({"chat_template_kwargs": {"enable_thinking": False, "x": [1, {"y": None}]}}, {"enable_thinking": False, "x": [1, {"y": None}]}),
    ({"chat_template_kwargs": {"add_generation_prompt": True, "continue_final_message": False}}, None),
    ({"reasoning_effort": "high"}, {**ON, "reasoning_effort": "high"}),
    ({"reasoning_effort": "none"}, OFF),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"thinking": False}, OFF),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON),
    ({"thinking": {"type": "adaptive"}}, None),
    ({"reasoning": {"enabled": False, "exclude": True}}, OFF),
    ({"reasoning": False}, OFF),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {**ON, "reasoning_effort": "low"}),
    ({"reasoning": {"effort": "none"}, "thinking": False, "reasoning_effort": "none"}, OFF),
    ({"reasoning": {"max_tokens": 100}}, None),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True, "thinking": False}),
]
DEEP: dict[str, Any] = {}
for _ in range(20):
    DEEP = {"a": DEEP}
NOT_TOLD: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs.add_generation_prompt"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * (16 << 10)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"thinking": "yes"}, "thinking"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ({"reasoning": {"effort": "low", "enabled": False}}, "reasoning.enabled"),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking"),
    ({"reasoning": {"colour": 1}}, "reasoning.colour"),
]


async def test_what_is_for_the_chat_template_reaches_the_worker(s: Stack) -> None:
    for given, expected in TOLD:
        status, body, _ = await s.chat(**given)
        assert status == 200, (given, body)
        sent = s.workers[0].submitted[-1]
        assert (sent.template_kwargs and json.loads(sent.template_kwargs)) == expected, given


async def test_what_no_template_may_be_told_is_refused_naming_it(s: Stack) -> None:
    for given, param in NOT_TOLD:
        status, body, _ = await s.chat(**given)
        assert (status, body["error"]["param"]) == (400, param), (given, body)
    assert not s.workers[0].submitted


async def test_a_plain_completion_has_no_template_and_says_so(s: Stack) -> None:
    plain = {"model": "toy", "prompt": "x"}
    for given in ({"chat_template_kwargs": {"a": 1}}, {"thinking": True}, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}):
        status, body, _ = await s.post(PLAIN, {**plain, **given})
        assert (status, body["error"]["param"]) == (400, next(iter(given))), body
    idle = {"chat_template_kwargs": {}, "thinking": False, "reasoning": {"enabled": False}, "reasoning_effort": "none"}
    status, body, _ = await s.post(PLAIN, {**plain, **idle})
    assert status == 200, body


async def test_the_same_request_with_another_template_variable_is_another_for_the_quarantine() -> None:
    one = GenerateRequest("r", "t", "s", "m", Sampling(), [{"role": "user", "content": "x"}])
    assert digest(one) != digest(replace(one, template_kwargs='{"a":1}'))


def test_a_large_body_brings_the_same_from_the_process_that_reads_it() -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "é"}, "reasoning_effort": "low"}
    told = Told("t", True, {}, {})
    asked = ask("chat", json.dumps(body).encode(), told)
    passed = decode_answer(encode_answer(ask("chat", json.dumps(body).encode(), told)))
    assert asked.template_kwargs == passed.template_kwargs and json.loads(passed.template_kwargs or "")["a"] == "é"
