"""A stream that waits for a model's weights says so in comments, which clients ignore; a whole answer just waits."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from tests.e2e.chat import Chat, script

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
#: A granule of 2 MiB for each layer, and for what is outside the layers.
LAYERS = {"first": 4, "second": 5}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two models, of which the device holds one; a layer takes a fifth of a second to come."""
    shape, dtype = SHAPES["tiny"]
    directory = tmp_path_factory.mktemp("models")
    models = {
        name: make_random_model(directory / name, shape | {"num_hidden_layers": layers}, layers, dtype)
        for name, layers in LAYERS.items()
    }
    slow = {"worker": {"failpoints": {"model.piece": "delay:400"}}, "gateway": {"comment_s": 0.2}}
    with Stack(models=models, nodes=1, hbm_gib=0.02, dram_gib=0.1, settings={"sharing": "prism"} | slow) as made:
        yield made


def asked(stack: Stack, model: str, **more: bool) -> str:
    """The whole body of an answer."""
    body = {"model": model, "messages": [{"role": "user", "content": script(1)[0]}], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body | more, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.slow
@pytest.mark.sample
def test_who_waits_for_weights_sees_that_they_come_and_official_clients_see_the_answer(stack: Stack) -> None:
    said = {name: Chat(stack.url, f"chat-{name}", model=name, max_tokens=8).say(script(1)[0]).text for name in LAYERS}
    for name in LAYERS:
        text = asked(stack, name, stream=True)  # the other one has its memory
        assert f": activating {name}\n\n" in text and text.endswith("data: [DONE]\n\n")
    for name in LAYERS:
        assert not asked(stack, name).startswith(":")
        again = Chat(stack.url, f"again-{name}", model=name, max_tokens=8)
        assert again.say(script(1)[0]).text == said[name]
