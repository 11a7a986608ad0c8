"""The official Python and Node clients, agent frameworks and the AI SDK, unmodified, against a whole stack."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import openai
import pydantic
import pytest

from loadtest.stack import Stack

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "models" / "demo"
NODE = shutil.which("node")
#: The Python of `make clients`.
FRAMEWORKS = HERE.parents[1] / ".cache" / "clients" / "bin" / "python"
#: The second tenant's hints are what meets the limit.
KEY, SLOW_KEY, NODE_SLOW_KEY = "key-of-the-first", "key-of-the-second", "key-of-the-third"
KEYS = [{"key": KEY, "tenant": "a"}, {"key": SLOW_KEY, "tenant": "b"}, {"key": NODE_SLOW_KEY, "tenant": "c"}]
ASKED: Any = [{"role": "user", "content": "The code of the garage is K4417. What is the code of the garage?"}]
TEXT = ASKED[0]["content"]
pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]


class Thing(pydantic.BaseModel):
    """What the model is to answer with."""

    colour: Literal["red", "green"]
    count: Annotated[int, pydantic.Field(ge=1, le=99)]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = {"gateway": {"api_keys": KEYS, "max_advisories_per_s": 1}}
    where = tmp_path_factory.mktemp("stack")
    with Stack(model=MODEL, nodes=1, directory=where, hbm_gib=0.25, dram_gib=0.25, settings=settings) as stack:
        yield stack.url


class Client:
    """The synchronous client, and the one question that is asked."""

    def __init__(self, url: str, **options: Any) -> None:
        given = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "timeout": 30.0, **options}
        self.openai = openai.OpenAI(**given)
        self.asynchronous = openai.AsyncOpenAI(**given)
        self.model = "upbeat-demo"

    def chat(self, **more: Any) -> Any:
        given = {"model": self.model, "messages": ASKED, "temperature": 0, "max_tokens": 24, **more}
        return self.openai.chat.completions.create(**given)


@pytest.fixture(scope="module")
def client(url: str) -> Client:
    return Client(url)


@pytest.fixture(scope="module")
def whole(client: Client) -> Any:
    """The answer in one body."""
    return client.chat()


def test_a_chat_has_its_text_and_its_usage(client: Client, whole: Any) -> None:
    assert client.openai.models.list().data[0].id == client.model
    assert "K4417" in whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens > 0


def test_a_stream_has_the_same_text_and_usage(client: Client, whole: Any) -> None:
    chunks = list(client.chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
        whole.choices[0].finish_reason
    ]


def test_the_clients_own_stream_helper_puts_the_answer_together(client: Client, whole: Any) -> None:
    with client.openai.chat.completions.stream(
        model=client.model, messages=ASKED, temperature=0, max_tokens=24
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_tools_are_called_and_their_results_go_back(client: Client) -> None:
    answer = client.chat(tools=[TOOL], tool_choice="required", max_tokens=300)
    (call,) = answer.choices[0].message.tool_calls[:1]
    assert answer.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments)["colour"] in (
        "red",
        "green",
    )
    results = [{"role": "tool", "tool_call_id": c.id, "content": "done"} for c in answer.choices[0].message.tool_calls]
    history = [*ASKED, answer.choices[0].message, *results]
    assert client.chat(messages=history, tools=[TOOL], tool_choice="none").choices[0].message.tool_calls is None


def test_the_clients_parse_gives_an_object_of_the_schema(client: Client) -> None:
    found = client.openai.chat.completions.parse(
        model=client.model, messages=ASKED, temperature=0, max_tokens=300, response_format=Thing
    )
    assert isinstance(found.choices[0].message.parsed, Thing)


def test_a_schema_of_ones_own_is_kept(client: Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    thing = json.loads(client.chat(response_format=wanted, max_tokens=300).choices[0].message.content)
    assert thing["colour"] in ("red", "green") and 1 <= thing["count"] <= 99


def test_logprobs_and_several_choices(client: Client) -> None:
    answer = client.chat(
        n=2, temperature=1, seed=5, logprobs=True, top_logprobs=2, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 4


def test_errors_are_the_clients_own_classes(url: str, client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat(temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat(model="nobody")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        Client(url, api_key="no-such-key").chat()
    with pytest.raises(openai.APIConnectionError):
        Client("http://127.0.0.1:9").chat()


def test_a_client_that_retries_comes_back_when_it_is_told_to(url: str) -> None:
    def advise(retries: int) -> Any:
        made = Client(url, api_key=SLOW_KEY, max_retries=retries).openai
        return made.post("/advisory", body={"session_id": "python"}, cast_to=object)

    assert advise(0)["status"] == "accepted"
    with pytest.raises(openai.RateLimitError) as limited:
        advise(0)
    assert int(limited.value.response.headers["Retry-After"]) >= 1
    assert advise(4)["status"] == "accepted"


def test_a_timeout_is_the_clients_and_leaves_nothing_running(url: str, client: Client) -> None:
    with pytest.raises(openai.APITimeoutError):
        Client(url, timeout=0.001).chat(max_tokens=400, extra_body={"ignore_eos": True})
    stream = client.chat(stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    fleet = client.openai.get("/fleet", cast_to=object)
    while fleet["active_requests"]:
        fleet = client.openai.get("/fleet", cast_to=object)


def test_the_asynchronous_client_streams_several_answers_at_once(url: str, whole: Any) -> None:
    async def one(client: Client) -> str:
        stream = await client.asynchronous.chat.completions.create(
            model=client.model, messages=ASKED, temperature=0, max_tokens=24, stream=True
        )
        return "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices])

    async def several() -> list[str]:
        client = Client(url)
        async with client.asynchronous:
            return list(await asyncio.gather(*(one(client) for _ in range(4))))

    assert asyncio.run(several()) == [whole.choices[0].message.content] * 4


# ---- responses -------------------------------------------------------------------------------------------------------
def respond(client: Client, **more: Any) -> Any:
    return client.openai.responses.create(**{"model": client.model, "input": TEXT, "temperature": 0} | more)


def test_a_response_and_its_stream(client: Client) -> None:
    response = respond(client)
    assert "K4417" in response.output_text and response.usage.output_tokens > 0 and response.status == "completed"
    with client.openai.responses.stream(model=client.model, input=TEXT, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == response.output_text


def test_a_response_goes_on_with_a_stored_one(client: Client) -> None:
    first = respond(client)
    second = respond(client, input="What is the code of the garage?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.openai.responses.retrieve(second.id).output_text == second.output_text
    items = client.openai.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items] == ["What is the code of the garage?"]  # type: ignore[union-attr]
    client.openai.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        respond(client, previous_response_id=second.id)
    assert gone.value.param == "previous_response_id"


def test_a_responses_functions_are_called(client: Client) -> None:
    tool = {"type": "function", "name": "pick", "parameters": SCHEMA, "strict": True}
    made = respond(client, tools=[tool], tool_choice="required", max_output_tokens=300)
    calls = [item for item in made.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments)["colour"] in ("red", "green")
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls]
    again = respond(client, input=results, previous_response_id=made.id, tools=[tool], tool_choice="none")
    assert again.output[0].type == "message"


def test_a_response_is_parsed_into_an_object(client: Client) -> None:
    found = client.openai.responses.parse(model=client.model, input=TEXT, temperature=0, text_format=Thing)
    assert isinstance(found.output_parsed, Thing)


def test_a_response_is_made_in_the_background(client: Client) -> None:
    made = respond(client, background=True)
    while made.status in ("queued", "in_progress"):
        made = client.openai.responses.retrieve(made.id)
    assert made.status == "completed" and "K4417" in made.output_text
    long = respond(client, background=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    assert client.openai.responses.cancel(long.id).status == "cancelled"


def test_what_a_response_cannot_have_is_refused_by_name(client: Client) -> None:
    for more, param in (
        (("tools", [{"type": "web_search"}]), "tools[0].type"),
        (("conversation", "c"), "conversation"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            respond(client, **dict([more]))
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.openai.responses.retrieve("resp_" + "0" * 32)


# ---- messages --------------------------------------------------------------------------------------------------------
def test_anthropics_client_asks_and_streams(url: str, client: Client) -> None:
    claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60.0)
    given: Any = {"model": client.model, "messages": ASKED, "max_tokens": 24, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**given)
    (block,) = message.content
    assert block.type == "text" and "K4417" in block.text and message.stop_reason == "end_turn"
    with claude.messages.stream(**given) as stream:
        assert stream.get_final_text() == block.text
    assert claude.messages.count_tokens(model=client.model, messages=ASKED).input_tokens > 0
    stopped = claude.messages.create(**given, stop_sequences=["K44"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "K44")
    assert claude.messages.create(**given | {"max_tokens": 2}).stop_reason == "max_tokens"


def test_anthropics_client_uses_tools(url: str, client: Client) -> None:
    claude = anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, max_retries=0, timeout=60.0)
    tool: Any = {"name": "pick", "description": "Pick a thing.", "input_schema": SCHEMA}
    given: Any = {"model": client.model, "max_tokens": 300, "tools": [tool]}
    used = claude.messages.create(**given, messages=ASKED, tool_choice={"type": "any"})
    uses = [block for block in used.content if block.type == "tool_use"]
    assert used.stop_reason == "tool_use" and uses[0].input["colour"] in ("red", "green")
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "done"} for use in uses]
    history: Any = [*ASKED, {"role": "assistant", "content": used.content}, {"role": "user", "content": results}]
    assert claude.messages.create(**given, messages=history, tool_choice={"type": "none"}).content[0].type == "text"


def test_anthropics_errors_are_the_clients_own_classes(url: str, client: Client) -> None:
    given: Any = {"model": client.model, "messages": ASKED, "max_tokens": 24}
    claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="no-such-key", max_retries=0).messages.create(**given)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(**given | {"model": "nobody"})
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        claude.messages.create(**given, tools=[{"type": "web_search_20260318", "name": "web_search"}])


# ---- suites in processes of their own --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def framework_suite(url: str, client: Client) -> dict[str, str]:
    """What each case of frameworks.py came to."""
    if not FRAMEWORKS.exists():
        assert "UPBEAT_TEST_CLIENTS" not in os.environ, "UPBEAT_TEST_CLIENTS wants these tests to run: make clients"
        pytest.skip("the frameworks are not there; `make clients` installs them")
    done = subprocess.run(
        [FRAMEWORKS, "frameworks.py", url, KEY, client.model], cwd=HERE, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


FRAMEWORK_CASES = (
    "agents_run", "agents_streams", "agents_tools", "agents_output_type", "agents_sessions", "langchain_invokes",
    "langchain_streams", "langchain_tools", "langchain_structured", "langchain_goes_on", "litellm_chats",
    "litellm_responses", "litellm_errors", "anthropic_newer",
)  # fmt: skip


@pytest.mark.parametrize("case", FRAMEWORK_CASES)
def test_a_framework(framework_suite: dict[str, str], case: str) -> None:
    assert set(framework_suite) == set(FRAMEWORK_CASES)
    assert framework_suite[case] == "ok"


@pytest.fixture(scope="module")
def node_suite(url: str) -> dict[str, str]:
    """What each case of suite.mjs came to."""
    if NODE is None or not (HERE / "node_modules" / "ai").exists():
        assert "UPBEAT_TEST_NODE" not in os.environ, (
            "node or the client is missing, and UPBEAT_TEST_NODE wants this test to run"
        )
        pytest.skip("node or its client is not there; `make node-client` installs the latter")
    done = subprocess.run(
        [NODE, "suite.mjs", url, KEY, NODE_SLOW_KEY], cwd=HERE, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


CASES = (
    "chat", "stream_with_usage", "stream_runner", "broken_off", "tools", "json_schema", "logprobs_and_n", "completions",
    "errors", "responses", "responses_stream", "responses_tools", "responses_in_the_background", "anthropic", "ai_sdk",
    "limits_and_retries", "timeouts",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_node_client(node_suite: dict[str, str], case: str) -> None:
    assert set(node_suite) == set(CASES)
    assert node_suite[case] == "ok"
