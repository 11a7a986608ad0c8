"""The official clients against a node whose engine is a vLLM server: the same suites as for Upbeat's own engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.stack import Stack
from tests.clients.test_official_clients import (
    KEYS,
    MODEL,
    NODE_SLOW_KEY,
    SLOW_KEY,
    client,
    framework_suite,
    node_suite,
    test_a_chat_has_its_text_and_its_usage,
    test_a_client_that_retries_comes_back_when_it_is_told_to,
    test_a_framework,
    test_a_response_and_its_stream,
    test_a_response_goes_on_with_a_stored_one,
    test_a_response_is_made_in_the_background,
    test_a_response_is_parsed_into_an_object,
    test_a_responses_functions_are_called,
    test_a_schema_of_ones_own_is_kept,
    test_a_stream_has_the_same_text_and_usage,
    test_a_timeout_is_the_clients_and_leaves_nothing_running,
    test_anthropics_client_asks_and_streams,
    test_anthropics_client_uses_tools,
    test_anthropics_errors_are_the_clients_own_classes,
    test_errors_are_the_clients_own_classes,
    test_logprobs_and_several_choices,
    test_the_asynchronous_client_streams_several_answers_at_once,
    test_the_clients_own_stream_helper_puts_the_answer_together,
    test_the_clients_parse_gives_an_object_of_the_schema,
    test_the_node_client,
    test_tools_are_called_and_their_results_go_back,
    test_what_a_response_cannot_have_is_refused_by_name,
    whole,
)

#: The suites, which pytest collects here again, over this module's `url`.
__all__ = [
    "NODE_SLOW_KEY",
    "SLOW_KEY",
    "client",
    "framework_suite",
    "node_suite",
    "test_a_chat_has_its_text_and_its_usage",
    "test_a_client_that_retries_comes_back_when_it_is_told_to",
    "test_a_framework",
    "test_a_response_and_its_stream",
    "test_a_response_goes_on_with_a_stored_one",
    "test_a_response_is_made_in_the_background",
    "test_a_response_is_parsed_into_an_object",
    "test_a_responses_functions_are_called",
    "test_a_schema_of_ones_own_is_kept",
    "test_a_stream_has_the_same_text_and_usage",
    "test_a_timeout_is_the_clients_and_leaves_nothing_running",
    "test_anthropics_client_asks_and_streams",
    "test_anthropics_client_uses_tools",
    "test_anthropics_errors_are_the_clients_own_classes",
    "test_errors_are_the_clients_own_classes",
    "test_logprobs_and_several_choices",
    "test_the_asynchronous_client_streams_several_answers_at_once",
    "test_the_clients_own_stream_helper_puts_the_answer_together",
    "test_the_clients_parse_gives_an_object_of_the_schema",
    "test_the_node_client",
    "test_tools_are_called_and_their_results_go_back",
    "test_what_a_response_cannot_have_is_refused_by_name",
    "whole",
]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


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
