"""OpenAI's features through a whole stack and the unmodified client: JSON, tools, choices, logprobs, seeds, stop
strings."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from loadtest.stack import Stack
from tests.pace import waited_s

MODEL = Path(__file__).parents[2] / "models" / "demo"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "code": {"type": "string", "pattern": "^[A-Z][0-9]{2,4}$"},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["colour", "code", "count", "parts"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Rome", "Oslo"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
ASKED: Any = [{"role": "user", "content": "The code of the garage is K4417. What is the code of the garage?"}]
#: So that draws differ: at lower temperatures the demo model's answer is nearly always the greedy one.
DRAWN: Any = {"temperature": 2.0, "extra_body": {"ignore_eos": True}}

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with Stack(model=MODEL, nodes=1, directory=tmp_path_factory.mktemp("stack"), hbm_gib=0.25, dram_gib=0.25) as stack:
        made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60)
        made.model = made.models.list().data[0].id  # type: ignore[attr-defined]
        made.gateway = json.loads((stack.run_dir / "pids.json").read_text())["gateway"]  # type: ignore[attr-defined]
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    given = {"messages": ASKED, "temperature": 0, "max_tokens": 300, **more}
    return client.chat.completions.create(model=client.model, **given)  # type: ignore[attr-defined]


def streamed(client: openai.OpenAI, **more: Any) -> tuple[list[str], list[list[dict[str, Any]]], list[str | None]]:
    """By choice: text, calls, and why it ended."""
    n = more.get("n", 1)
    texts, calls, ends = [""] * n, [[] for _ in range(n)], [None] * n
    for chunk in chat(client, stream=True, **more):
        for c in chunk.choices:
            assert c.delta.content is None or "\ufffd" not in c.delta.content or more.get("temperature")
            texts[c.index] += c.delta.content or ""
            ends[c.index] = c.finish_reason or ends[c.index]
            for d in c.delta.tool_calls or []:
                if d.index == len(calls[c.index]):
                    assert d.id and d.type == "function" and d.function.name
                    calls[c.index].append({"id": d.id, "name": d.function.name, "arguments": ""})
                calls[c.index][d.index]["arguments"] += d.function.arguments or ""
    return texts, calls, ends


def test_an_answer_is_json_by_its_schema_streamed_and_not(client: openai.OpenAI) -> None:
    whole = chat(client, response_format=FORMAT).choices[0]
    value = json.loads(whole.message.content)
    assert set(value) == set(SCHEMA["required"]) and value["colour"] in ("red", "green") and 1 <= value["count"] <= 99
    assert value["code"][0].isupper() and value["code"][1:].isdigit() and 1 <= len(value["parts"]) <= 3
    assert whole.finish_reason == "stop"
    assert streamed(client, response_format=FORMAT) == ([whole.message.content], [[]], ["stop"])
    drawn = [
        json.loads(chat(client, response_format=FORMAT, temperature=1.5, seed=s).choices[0].message.content)
        for s in range(3)
    ]
    assert all(set(v) == set(SCHEMA["required"]) for v in drawn)


def test_an_answer_that_is_cut_says_so_and_json_mode_gives_an_object(client: openai.OpenAI) -> None:
    cut = chat(client, response_format=FORMAT, max_tokens=5).choices[0]
    assert cut.finish_reason == "length" and cut.message.content.lstrip().startswith("{")
    short = chat(client, response_format={"type": "json_object"}, logit_bias={}, max_tokens=60).choices[0]
    assert short.message.content.lstrip().startswith("{")
    completed = client.completions.create(
        model=client.model,  # type: ignore[attr-defined]
        prompt="A thing:",
        temperature=0,
        max_tokens=200,
        extra_body={"response_format": FORMAT},
    )
    assert set(json.loads(completed.choices[0].text)) == set(SCHEMA["required"])


def test_a_schema_that_cannot_be_enforced_is_a_400_with_the_reason(client: openai.OpenAI) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, response_format=bad, stream=stream)
        assert caught.value.param == "response_format" and "uniqueItems" in str(caught.value)


def test_a_required_call_is_made_streamed_and_not_and_its_result_goes_back(client: openai.OpenAI) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name in ("get_weather", "get_time")
    texts, calls, ends = streamed(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert texts == [""] and ends == ["tool_calls"]
    assert [(c["name"], c["arguments"]) for c in calls[0]] == [(call.function.name, call.function.arguments)]

    named = chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    [weather] = named.choices[0].message.tool_calls
    arguments = json.loads(weather.function.arguments)
    assert (
        weather.function.name == "get_weather" and arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    )
    history = [
        *ASKED,
        named.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": weather.id, "content": "sunny"},
    ]
    after = chat(client, messages=history, tools=TOOLS, max_tokens=20)
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens
    assert after.usage.prompt_tokens_details.cached_tokens > 0, (
        "the tools are a part of the prompt that was computed before"
    )


def test_tools_change_nothing_unless_they_are_called(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        free = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=30).choices[0]
        assert free.message.tool_calls is None and free.message.content and free.finish_reason in ("stop", "length")


def test_choices_are_equal_when_greedy_and_reproducible_when_drawn(client: openai.OpenAI) -> None:
    prompt = ASKED[0]["content"] + " Please remember it. " * 40
    greedy = chat(client, messages=[{"role": "user", "content": prompt}], n=3, max_tokens=12)
    assert [c.index for c in greedy.choices] == [0, 1, 2] and len({c.message.content for c in greedy.choices}) == 1
    settings: dict[str, Any] = {"n": 4, "seed": 11, "max_tokens": 40} | DRAWN
    texts = [c.message.content for c in chat(client, **settings).choices]
    assert len(set(texts)) > 1
    assert streamed(client, **settings)[0] == texts
    assert chat(client, **{**settings, "n": 1}).choices[0].message.content == texts[0]
    usage = chat(client, **settings).usage
    assert usage.prompt_tokens == chat(client, max_tokens=1).usage.prompt_tokens and usage.completion_tokens == 4 * 40


def test_logprobs_spell_the_answer_byte_by_byte(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, temperature=1.5, seed=4, max_tokens=40).choices[0]
    content = answer.logprobs.content
    assert (
        b"".join(bytes(t.bytes) for t in content)
        .decode("utf-8", "replace")
        .startswith(answer.message.content.rstrip("\ufffd"))
    )
    assert all(len(t.top_logprobs) == 3 and t.logprob <= 0 for t in content)
    legacy = client.completions.create(model=client.model, prompt="The code", max_tokens=20, temperature=0, logprobs=2)  # type: ignore[attr-defined]
    [choice] = legacy.choices
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text.startswith(token, offset)
    assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)


def test_a_seed_holds_whatever_runs_beside_it(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"seed": 5, "max_tokens": 40} | DRAWN
    alone = chat(client, **options).choices[0].message.content
    assert alone != chat(client, **options | {"seed": 6}).choices[0].message.content
    others = [
        threading.Thread(target=chat, args=(client,), kwargs={"temperature": 1.0, "max_tokens": 60, "n": 1 + i % 3})
        for i in range(5)
    ]
    for other in others:
        other.start()
    beside = [chat(client, **options).choices[0].message.content for _ in range(3)]
    for other in others:
        other.join()
    assert beside == [alone] * 3


def test_what_streams_is_what_comes_whole_with_stop_strings_or_without(client: openai.OpenAI) -> None:
    for seed in range(4):
        options: dict[str, Any] = {"temperature": 2.0, "seed": seed, "max_tokens": 60}
        whole = chat(client, **options).choices[0].message.content
        assert streamed(client, **options)[0] == [whole]
        stop = whole[len(whole) // 2 :][:2]
        stopped = chat(client, stop=[stop], **options).choices[0]
        assert stopped.message.content == whole[: whole.find(stop)] and stopped.finish_reason == "stop"
        assert streamed(client, stop=[stop], **options)[0] == [stopped.message.content]
        kept = (
            chat(client, stop=[stop], extra_body={"include_stop_str_in_output": True}, **options)
            .choices[0]
            .message.content
        )
        assert kept == stopped.message.content + stop


def test_other_systems_parameters_work(client: openai.OpenAI) -> None:
    long = chat(client, max_tokens=40, extra_body={"min_tokens": 40})
    assert long.usage.completion_tokens == 40
    shown = (
        chat(client, max_tokens=40, extra_body={"skip_special_tokens": False, "ignore_eos": True})
        .choices[0]
        .message.content
    )
    assert "<|im_end|>" in shown
    first = chat(client, logprobs=True, max_tokens=3).choices[0].logprobs.content[0]
    again = chat(client, max_tokens=3, extra_body={"repetition_penalty": 5.0}).choices[0].message.content
    assert not again.startswith(first.token), "its tokens are in the prompt"


def test_a_penalty_that_leaves_float32_is_refused_and_the_ends_of_every_range_do_no_harm(client: openai.OpenAI) -> None:
    before = chat(client).choices[0].message.content
    for penalty in (1e-300, 1e-38, 0.0099):
        with pytest.raises(openai.BadRequestError, match="repetition_penalty"):
            chat(client, extra_body={"repetition_penalty": penalty})
    for least in (True, False):
        ends = {
            "presence_penalty": -2,
            "frequency_penalty": -2,
            "temperature": 5e-324,
            "top_p": 5e-324,
            "logit_bias": {"5": -100},
        }
        rest = {"presence_penalty": 2, "frequency_penalty": 2, "temperature": 2, "top_p": 1, "logit_bias": {"5": 100}}
        extra = (
            {"repetition_penalty": 0.01, "min_p": 5e-324, "top_k": 1}
            if least
            else {"repetition_penalty": 10, "min_p": 1, "top_k": 1 << 30}
        )
        chat(client, max_tokens=20, extra_body=extra | {"ignore_eos": True}, **(ends if least else rest))
    assert chat(client).choices[0].message.content == before


def test_embeddings_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings") as caught:
        client.embeddings.create(model=client.model, input="x")  # type: ignore[attr-defined]
    assert caught.value.code == "unsupported_operation"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing_running(client: openai.OpenAI, stream: bool) -> None:
    def running() -> int:
        nodes = httpx.get(f"{client.base_url}fleet", timeout=10).json()["nodes"]
        return int(nodes[0]["running"]) + int(nodes[0]["waiting"])

    def until(wanted: bool) -> None:
        end = time.monotonic() + 30
        while (running() > 0) is not wanted:
            assert time.monotonic() < end, "it still runs" if not wanted else "it never ran"
            time.sleep(0.02)

    until(False)
    # Longer than any of this takes: were it not cancelled, it would still run.
    body = {"model": client.model, "messages": ASKED, "max_tokens": 15000, "ignore_eos": True, "n": 4, "stream": stream}  # type: ignore[attr-defined]
    with httpx.Client(timeout=60) as http:
        if stream:
            with http.stream("POST", f"{client.base_url}chat/completions", json=body) as r:
                lines = r.iter_lines()  # held: the connection ends with it
                assert r.status_code == 200 and next(lines)
                until(True)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{client.base_url}chat/completions", json=body, timeout=1.0)
    until(False)
    tokens = [
        line
        for line in httpx.get(f"{str(client.base_url)[:-4]}/metrics").text.splitlines()
        if line.startswith("upbeat_gateway_active")
    ]
    assert tokens and float(tokens[0].split()[1]) == 0


def test_a_prompt_of_two_megabytes_is_too_long_at_once_and_nobody_waits_for_that(client: openai.OpenAI) -> None:
    """The tokenizer would take a second for it; the gateway knows by what the worker says of its tokens."""
    root, worst, done = str(client.base_url).removesuffix("/v1/"), [0.0], threading.Event()
    gateway = psutil.Process(client.gateway)  # type: ignore[attr-defined]
    here = [os.getpid(), *(process.pid for process in (gateway, *gateway.children(recursive=True)))]

    def clock_s() -> float:
        """Stands still while this test, the gateway or its helpers wait for a core."""
        return time.monotonic() - waited_s(here)

    def ask_others() -> None:
        with httpx.Client() as http:
            while not done.is_set():
                began = clock_s()
                assert http.get(f"{root}/health").status_code == 200
                worst[0] = max(worst[0], clock_s() - began)
                time.sleep(0.005)

    thread = threading.Thread(target=ask_others)
    model, took = client.model, []  # type: ignore[attr-defined]
    messages = {"model": model, "messages": [{"role": "user", "content": "lorem ipsum " * 170_000}]}
    prompt = {"model": model, "prompt": "x" * 2_000_000}
    with httpx.Client(timeout=60) as http:
        thread.start()
        try:
            for path, body in (("chat/completions", messages), ("completions", prompt)):
                content = json.dumps(body).encode()
                for _ in range(4):
                    began = clock_s()
                    answer = http.post(
                        f"{root}/v1/{path}", content=content, headers={"Content-Type": "application/json"}
                    )
                    took.append(clock_s() - began)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), (
                        answer.text
                    )
        finally:
            done.set()
            thread.join()
    assert sorted(took)[len(took) // 2] < 0.1, took
    assert worst[0] < 0.25, worst


def test_the_longest_prompt_that_fits_by_its_bytes_is_counted_in_tokens(client: openai.OpenAI) -> None:
    """Of what may fit, only the tokenizer knows; then the answer says how many tokens it has."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=client.model, prompt="1 " * 16_000, max_tokens=1)  # type: ignore[attr-defined]
    assert caught.value.code == "context_length_exceeded" and "at least" not in str(caught.value)
