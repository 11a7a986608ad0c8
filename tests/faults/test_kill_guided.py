"""kill -9 of the worker in the middle of answers that keep to a grammar: each goes on elsewhere, byte for byte."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from loadtest.stack import Stack
from tests.faults.test_kill import MODEL, process, wait_ready

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(280)]
NUMBERS = {
    "type": "object",
    "properties": {
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 120,
            "maxItems": 120,
        }
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
ASKED: Any = [{"role": "user", "content": "The code of the garage is K4417. " * 12 + "Which numbers do you like?"}]
JSON: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}}
CALL: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "take", "parameters": NUMBERS}}],
    "tool_choice": {"type": "function", "function": {"name": "take"}},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(model=MODEL, nodes=2, directory=tmp_path_factory.mktemp("guided"), hbm_gib=0.25, dram_gib=0.25) as made:
        yield made


def streamed(url: str, begun: threading.Event, **options: Any) -> list[str]:
    """Each choice's text, or its call's arguments; `begun` is set in the middle of them."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    texts, ids, seen = [""] * options["n"], set[str](), 0
    given = {"messages": ASKED, "max_tokens": 900, "temperature": 1.0, "seed": 21, "stream": True, **options}
    for chunk in client.chat.completions.create(model=client.models.list().data[0].id, **given):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                ids |= {call.id} if call.id else set()
                texts[choice.index] += call.function.arguments or ""
            texts[choice.index] += choice.delta.content or ""
            seen += 1
            if seen == 60:
                begun.set()
    assert "tools" not in options or len(ids) == 1, "every choice has one call, and its id stays"
    return texts


@pytest.mark.parametrize("options", [{"n": 3, **JSON}, {"n": 1, **CALL}], ids=["three JSON answers", "a call"])
def test_guided_answers_go_on_when_their_worker_is_killed(stack: Stack, options: dict[str, Any]) -> None:
    expected = streamed(stack.url, threading.Event(), **options)
    assert all(len(json.loads(text)["numbers"]) == 120 for text in expected) and len(set(expected)) == options["n"]
    begun, found = threading.Event(), []
    client = threading.Thread(
        target=lambda: found.append(streamed(stack.url, begun, **options, extra_headers={"X-Session-Id": "moved"}))
    )
    client.start()
    assert begun.wait(60)
    victims = [process(stack, f"upbeat-worker --node {n}") for n in range(2)]
    victims[0].kill()
    victims[1].kill()  # whichever has it
    assert not found, "it was not in the middle of its answers any more"
    client.join(timeout=120)
    assert found == [expected]
    wait_ready(stack, 60)
