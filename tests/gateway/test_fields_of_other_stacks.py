"""Fields that clients of vLLM, OpenRouter, Ollama and others send: done, or accepted and ignored; what cannot be done
names the remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import Stack, events, stack

from contracts.request import GenerateRequest, Sampling
from gateway.asked_wire import decode_answer, encode_answer
from gateway.core.quarantine import digest
from gateway.openai.asked import Told, ask
from gateway.openai.forms import Form

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
IGNORED: dict[str, Any] = {
    "request_id": "mine",
    "provider": {"order": ["x"], "allow_fallbacks": False},
    "options": {"num_ctx": 4096},
    "include_reasoning": False,
    "return_token_ids": True,
    "keep_alive": "5m",
    "transforms": ["middle-out"],
    "stream_reasoning": False,
    "mm_processor_kwargs": {"fps": 1},
    "separate_reasoning": True,
    "models": [],
    "plugins": [],
    "vllm_xargs": {},
    "logits_processors": None,
    "usage": {"include": True},
    "route": None,
    "some_other_stacks_field": None,
}
#: What would change the answer and is not done; and a word of what to do instead.
NOT_DONE: list[tuple[dict[str, Any], str]] = [
    ({"models": ["toy", "other"]}, "model"),
    ({"route": "fallback"}, "model"),
    ({"plugins": [{"id": "web"}]}, "leave"),
    ({"vllm_xargs": {"a": 1}}, "leave"),
    ({"logits_processors": ["x.Y"]}, "leave"),
    ({"some_other_stacks_field": False}, "unrecognized"),
]


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


# ---- ignored
# -----------------------------------------------------------------------------------------------------------
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


async def test_what_would_change_the_answer_and_is_not_done_is_refused_naming_it(s: Stack) -> None:
    for given, word in NOT_DONE:
        for path, prompt in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (PLAIN, {"prompt": "x"})):
            status, body, _ = await s.post(path, {"model": "toy", **prompt, **given})
            assert (status, body["error"]["param"]) == (400, next(iter(given))), body
            assert word in body["error"]["message"]


async def test_special_tokens_are_added_to_plain_prompts_and_not_to_chats(s: Stack) -> None:
    plain = {"model": "toy", "prompt": "x"}
    assert (await s.chat(add_special_tokens=False))[0] == 200 and (
        await s.post(PLAIN, {**plain, "add_special_tokens": True})
    )[0] == 200
    for status, body, _ in (
        await s.chat(add_special_tokens=True),
        await s.post(PLAIN, {**plain, "add_special_tokens": False}),
    ):
        assert (status, body["error"]["param"]) == (400, "add_special_tokens") and "/tokenize" in body["error"][
            "message"
        ]


# ---- other names
# -------------------------------------------------------------------------------------------------------
async def test_ollamas_name_for_the_repetition_penalty_is_one(s: Stack) -> None:
    for given in (
        {"repeat_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"repeat_penalty": 1.5, "repetition_penalty": 1.5},
    ):
        assert (await s.chat(**given))[0] == 200
        assert s.workers[0].submitted[-1].sampling.repetition_penalty == 1.5
    for given in ({"repeat_penalty": 0}, {"repeat_penalty": 1.5, "repetition_penalty": 1.1}):
        status, body, _ = await s.chat(**given)
        assert (status, body["error"]["param"]) == (400, "repeat_penalty")


async def test_openrouters_usage_field_ends_a_stream_with_usage(s: Stack) -> None:
    for given, wanted in (({}, False), ({"usage": {"include": False}}, False), ({"usage": {"include": True}}, True)):
        async with s.http.post(
            s.url + CHAT, json={"model": "toy", "messages": [{"role": "user", "content": "x"}], "stream": True, **given}
        ) as answer:
            *chunks, done = await events(answer)
        assert done == "[DONE]" and bool(chunks[-1].get("usage")) is wanted


# ---- for the chat template
# ---------------------------------------------------------------------------------------------
ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
TOLD: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"chat_template_kwargs": {}}, None),
    ({"chat_template_kwargs": None, "thinking": None, "reasoning": None, "reasoning_effort": None}, None),
    (
        {"chat_template_kwargs": {"enable_thinking": False, "x": [1, {"y": None}]}},
        {"enable_thinking": False, "x": [1, {"y": None}]},
    ),
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
    ({"think": True}, ON),
    ({"think": False}, OFF),
    ({"think": "low"}, {**ON, "reasoning_effort": "low"}),
    ({"enable_thinking": False}, OFF),
    ({"enable_thinking": True, "think": True, "reasoning": True}, ON),
    (
        {"enable_thinking": False, "chat_template_kwargs": {"thinking": True}},
        {"enable_thinking": False, "thinking": True},
    ),
    (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        {"enable_thinking": True, "thinking": False},
    ),
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
    ({"think": "enormous"}, "think"),
    ({"think": False, "reasoning_effort": "low"}, "think"),
    ({"think": "low", "reasoning_effort": "high"}, "think"),
    ({"enable_thinking": False, "think": True}, "enable_thinking"),
    ({"enable_thinking": "no"}, "enable_thinking"),
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
    for given in (
        {"chat_template_kwargs": {"a": 1}},
        {"thinking": True},
        {"reasoning": {"effort": "low"}},
        {"reasoning_effort": "low"},
        {"think": True},
    ):
        status, body, _ = await s.post(PLAIN, {**plain, **given})
        assert (status, body["error"]["param"]) == (400, next(iter(given))), body
    idle = {"chat_template_kwargs": {}, "thinking": False, "reasoning": {"enabled": False}, "reasoning_effort": "none"}
    status, body, _ = await s.post(PLAIN, {**plain, **idle})
    assert status == 200, body


async def test_the_same_request_with_another_template_variable_is_another_for_the_quarantine() -> None:
    one = GenerateRequest("r", "t", "s", "m", Sampling(), [{"role": "user", "content": "x"}])
    assert digest(one) != digest(replace(one, template_kwargs='{"a":1}'))


def test_a_large_body_brings_the_same_from_the_process_that_reads_it() -> None:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"a": "é"},
        "reasoning_effort": "low",
    }
    body["guided_regex"] = "a+"
    told = Told("t", True, {}, {})
    asked = ask("chat", json.dumps(body).encode(), told)
    passed = decode_answer(encode_answer(ask("chat", json.dumps(body).encode(), told)))
    assert asked.form == passed.form == Form("guided_regex", None, "a+")
    assert asked.template_kwargs == passed.template_kwargs and json.loads(passed.template_kwargs or "")["a"] == "é"


# ---- the answer's form
# ---------------------------------------------------------------------------------------------------
A = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
AS_SCHEMA: list[tuple[dict[str, Any], str, Any]] = [
    ({"guided_json": A}, "guided_json", A),
    ({"guided_json": json.dumps(A)}, "guided_json", A),
    ({"structured_outputs": {"json": A}}, "structured_outputs.json", A),
    ({"structured_outputs": {"json": json.dumps(A), "disable_fallback": True}}, "structured_outputs.json", A),
    (
        {"structured_outputs": {"json_object": True, "regex": None}},
        "structured_outputs.json_object",
        {"type": "object"},
    ),
    ({"format": "json"}, "format", {"type": "object"}),
    ({"format": A}, "format", A),
]
AS_REGEX: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": r"\d{3}/x"}, "guided_regex", r"\d{3}/x"),
    ({"structured_outputs": {"regex": "a|b"}}, "structured_outputs.regex", "a|b"),
    ({"guided_choice": ["yes", "no é."]}, "guided_choice", r"yes|no é\x{2e}"),
    ({"structured_outputs": {"choice": ["a|b"]}}, "structured_outputs.choice", r"a\x{7c}b"),
]
NO_FORM: list[dict[str, Any]] = [
    {
        "guided_json": None,
        "guided_regex": None,
        "guided_choice": None,
        "guided_grammar": None,
        "structured_outputs": None,
    },
    {"structured_outputs": {}, "response_format": {"type": "text"}, "guided_decoding_backend": "xgrammar"},
    {"format": ""},
    {"format": None, "response_format": {"type": "text"}},
    {"structured_outputs": {"json_object": False, "disable_any_whitespace": False, "whitespace_pattern": None}},
]
WRONG_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": '"' + "x" * (256 << 10) + '"'}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": {"a": {"items": DEEP}}, "structured_outputs": None, "guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "x" * (17 << 10)}, "guided_regex"),
    ({"guided_regex": "a\\"}, "guided_regex"),
    ({"guided_regex": "\ud800"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["\ud800"]}, "guided_choice"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    ({"guided_grammar": "root ::= 'a'"}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"colour": 1}}, "structured_outputs.colour"),
    ({"structured_outputs": {"json": A, "regex": "a"}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "guided_json": A}, "guided_json"),
    ({"guided_json": A, "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_json": A, "min_tokens": 3}, "min_tokens"),
    ({"format": "xml"}, "format"),
    ({"format": ["json"]}, "format"),
    ({"format": {"a": {"items": DEEP}}, "response_format": {"type": "json_object"}}, "format"),
    ({"guided_regex": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "guided_regex"),
]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_vllms_names_for_a_form_reach_the_worker(s: Stack, path: str) -> None:
    prompt = {"model": "toy", **({"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"})}
    for given, field, expected in (*AS_SCHEMA, *AS_REGEX):
        status, body, _ = await s.post(path, {**prompt, **given})
        assert status == 200, (given, body)
        sent = s.workers[0].submitted[-1]
        assert sent.form_field == field
        assert (json.loads(sent.json_schema) if sent.json_schema else sent.regex) == expected
        assert (sent.json_schema is None) is not (sent.regex is None)
    for given in NO_FORM:
        status, body, _ = await s.post(path, {**prompt, **given})
        sent = s.workers[0].submitted[-1]
        assert status == 200 and (sent.json_schema, sent.regex, sent.form_field) == (None, None, ""), (given, body)


async def test_a_form_that_cannot_be_done_is_refused_naming_it(s: Stack) -> None:
    for given, param in WRONG_FORMS:
        status, body, _ = await s.chat(**given)
        assert (status, body["error"]["param"]) == (400, param), (given, body)
    assert not s.workers[0].submitted
    _, body, _ = await s.chat(guided_grammar="x")
    assert "guided_json" in body["error"]["message"]
    _, body, _ = await s.chat(guided_json=A, guided_choice=["a"])
    assert "guided_json" in body["error"]["message"]
