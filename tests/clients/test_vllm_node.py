"""The official clients against a node whose engine is a vLLM server: OpenAI's suite, Responses, and Anthropic's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from loadtest.stack import Stack
from tests.clients.test_official_clients import (
    ASKED,
    KEY,
    KEYS,
    MODEL,
    NODE_SLOW_KEY,
    SLOW_KEY,
    Client,
    client,
    node_suite,
    test_a_chat_has_its_text_and_its_usage,
    test_a_client_that_retries_comes_back_when_it_is_told_to,
    test_a_schema_of_ones_own_is_kept,
    test_a_stream_has_the_same_text_and_usage,
    test_a_timeout_is_the_clients_and_leaves_nothing_running,
    test_errors_are_the_clients_own_classes,
    test_logprobs_and_several_choices,
    test_the_asynchronous_client_streams_several_answers_at_once,
    test_the_clients_own_stream_helper_puts_the_answer_together,
    test_the_clients_parse_gives_an_object_of_the_schema,
    test_the_node_client,
    test_tools_are_called_and_their_results_go_back,
    whole,
)

#: OpenAI's suite, which pytest collects here again, over this module's `url`.
__all__ = [
    "NODE_SLOW_KEY",
    "SLOW_KEY",
    "client",
    "node_suite",
    "test_a_chat_has_its_text_and_its_usage",
    "test_a_client_that_retries_comes_back_when_it_is_told_to",
    "test_a_schema_of_ones_own_is_kept",
    "test_a_stream_has_the_same_text_and_usage",
    "test_a_timeout_is_the_clients_and_leaves_nothing_running",
    "test_errors_are_the_clients_own_classes",
    "test_logprobs_and_several_choices",
    "test_the_asynchronous_client_streams_several_answers_at_once",
    "test_the_clients_own_stream_helper_puts_the_answer_together",
    "test_the_clients_parse_gives_an_object_of_the_schema",
    "test_the_node_client",
    "test_tools_are_called_and_their_results_go_back",
    "whole",
]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
TEXT = ASKED[0]["content"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = {
        "gateway": {"api_keys": KEYS, "max_advisories_per_s": 1},
        "models": {"upbeat-demo": {"path": str(MODEL), "engine": "vllm", "dtype": "float32"}},
        "vllm": {"args": ["--enforce-eager", "--max-model-len", "4096", *TOOLS]},
    }
    where = tmp_path_factory.mktemp("vllm-stack")
    with Stack(nodes=1, directory=where, hbm_gib=1.0, dram_gib=0.25, settings=settings, ready_s=300) as stack:
        yield stack.url


def test_a_response_and_its_stream(client: Client) -> None:
    given: Any = {"model": client.model, "input": TEXT, "temperature": 0, "max_output_tokens": 24}
    response = client.openai.responses.create(**given)
    assert "K4417" in response.output_text and response.usage is not None and response.usage.output_tokens > 0
    with client.openai.responses.stream(**given) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == response.output_text


def test_a_response_that_a_later_one_could_name_is_refused_by_name(client: Client) -> None:
    for more in ({"background": True}, {"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.openai.responses.create(model=client.model, input=TEXT, **more)  # type: ignore[arg-type]
        assert refused.value.param == next(iter(more))


def test_anthropics_client_asks_and_streams(url: str, client: Client) -> None:
    claude = anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None, max_retries=0, timeout=60.0)
    given: Any = {"model": client.model, "messages": ASKED, "max_tokens": 24, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**given)
    (block,) = message.content
    assert block.type == "text" and "K4417" in block.text and message.usage.output_tokens > 0
    with claude.messages.stream(**given) as stream:
        assert stream.get_final_text() == block.text
    assert claude.messages.count_tokens(model=client.model, messages=ASKED).input_tokens > 0
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, auth_token="no-such-key", max_retries=0).messages.create(**given)
