"""`/tokenize` and `/detokenize` through a whole stack: transformers' ids, and the counts that the model is billed
for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from loadtest.stack import Stack

DEMO = Path(__file__).parents[2] / "models" / "demo"
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TALK = [{"role": "user", "content": "Grüße, 世界 🦊! <|im_end|>\nWhat is it?"}]

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    keys = [{"key": "key-of-tenant-a", "tenant": "a"}, {"key": "key-of-tenant-b", "tenant": "b"}]
    settings = {"gateway": {"api_keys": keys}}
    with Stack(
        model=DEMO, nodes=2, directory=tmp_path_factory.mktemp("stack"), hbm_gib=0.25, dram_gib=0.25, settings=settings
    ) as stack:
        headers = {"Authorization": "Bearer key-of-tenant-a"}
        with httpx.Client(base_url=stack.url, headers=headers, timeout=60) as client:
            yield client


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def asked(http: httpx.Client, path: str, body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_ids_are_transformers_and_come_back_as_the_text(http: httpx.Client, theirs: Any) -> None:
    model = http.get("/v1/models").json()["data"][0]
    for text in ("", "Hello there", "Grüße, 世界 🦊!\n", "<|im_start|>user\nHi<|im_end|>", "word " * 40_000):
        found = asked(http, "/tokenize", {"model": model["id"], "prompt": text, "return_token_strs": True})
        expected = theirs.encode(text)
        assert found == {
            "count": len(expected),
            "max_model_len": model["max_model_len"],
            "tokens": expected,
            "token_strs": theirs.convert_ids_to_tokens(expected),
        }
        if len(expected) <= model["max_model_len"]:
            assert asked(http, "/detokenize", {"tokens": expected}) == {"prompt": text}


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_a_chat_has_as_many_tokens_as_its_request_will_be_told(http: httpx.Client, more: Any) -> None:
    count = asked(http, "/tokenize", {"messages": TALK} | more)["count"]
    model = http.get("/v1/models").json()["data"][0]["id"]
    answered = asked(http, "/v1/chat/completions", {"model": model, "messages": TALK, "max_tokens": 1} | more)
    assert answered["usage"]["prompt_tokens"] == count


def test_the_ids_are_a_prompt_for_completions(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    tokens = asked(http, "/tokenize", {"messages": TALK})["tokens"]
    rest = {"model": model, "max_tokens": 8, "temperature": 0}
    by_ids = asked(http, "/v1/completions", rest | {"prompt": tokens})
    chat = asked(http, "/v1/chat/completions", rest | {"messages": TALK})
    assert by_ids["choices"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_it_needs_a_key_and_refuses_what_is_wrong(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "a"}, headers={"Authorization": "Bearer nobody"}).status_code == 401
    for path, body, param in (
        ("/detokenize", {"tokens": [1 << 30]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 200_000}, "tokens"),
        ("/tokenize", {"prompt": "x", "nonsense": 1}, "nonsense"),
        (
            "/tokenize",
            {"messages": TALK, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
