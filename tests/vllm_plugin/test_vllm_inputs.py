"""Real vLLM servers: images of one size and adapters of one shape have KV of their own in the store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm_plugin.image_model import IMAGE_TOKENS, image, seeing_llama
from tests.vllm_plugin.models import lora_adapter, sensitive_llama
from tests.vllm_plugin.vllm_server import BLOCK_TOKENS, VllmServer
from tests.vllm_plugin.world import World, world

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
RED, GREEN = image(255, 0, 0), image(0, 255, 0)


class Seen(NamedTuple):
    """An answer to a chat: its tokens, tokens of the prompt, and how many of those came from the store."""

    tokens: list[int]
    prompt: int
    loaded: int

    @property
    def whole(self) -> int:
        """Tokens of the prompt's chunks that can be loaded: the last token is computed."""
        return (self.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def look(server: VllmServer, *content: str) -> Seen:
    """Ask about texts and images (data: URLs) in this order, in a vLLM that has forgotten all."""
    server.forget()
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": c}} if c.startswith("data:") else {"type": "text", "text": c}
        for c in content
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
    before = server.hits()[1]
    answer = server.post("/v1/chat/completions", body | {"return_token_ids": True, "ignore_eos": True})
    loaded = int(server.hits()[1] - before)
    return Seen(answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens"], loaded)


def test_two_images_of_one_size_never_hit_each_others_kv(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]
) -> None:
    folder = tmp_path_factory.mktemp("images")
    before, after = "what is this? " * 40, "and what is that? " * 40
    with world(folder, free_ports(60), seeing_llama(folder / "model")) as made:
        server = made.start(0, "--limit-mm-per-prompt", '{"image": 2}').wait()
        text = server.post("/tokenize", {"model": "m", "prompt": f"<|im_start|>user\n{before}"})["count"]
        common = text // BLOCK_TOKENS * BLOCK_TOKENS
        assert common
        red = look(server, before, RED, after)
        assert red.loaded == 0 and red.prompt > common + IMAGE_TOKENS + 2 * BLOCK_TOKENS
        green = look(server, before, GREEN, after)
        assert green.loaded == common and green.prompt == red.prompt and green.tokens != red.tokens
        for content, seen in ((RED, red), (GREEN, green)):
            again = look(server, before, content, after)
            assert common + IMAGE_TOKENS < again.loaded <= again.whole and again.tokens == seen.tokens
        both = look(server, before, RED, GREEN, after)
        swapped = look(server, before, GREEN, RED, after)
        first = (text + IMAGE_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
        assert common <= both.loaded <= first and common <= swapped.loaded <= first
        assert both.tokens != swapped.tokens
        again = look(server, before, RED, GREEN, after)
        assert first < again.loaded <= again.whole and again.tokens == both.tokens
        print(f"common text {common}, red and green then {red.whole} of {red.prompt} tokens from the store")


class Adapters(NamedTuple):
    world: World
    server: VllmServer
    folder: Path

    def ask(self, model: str, tokens: list[int]) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt came from the store; vLLM has forgotten all."""
        self.server.forget()
        before = self.server.hits()[1]
        answer = self.server.complete(tokens, "s", model=model)
        return answer.tokens, int(self.server.hits()[1] - before)

    def load(self, name: str, seed: int, inplace: bool = False) -> None:
        """Load an adapter from the folder of its name, whose files are new."""
        lora_adapter(self.folder / name, seed)
        if not inplace:
            self.server.post("/v1/unload_lora_adapter", {"lora_name": name})
        body = {"lora_name": name, "lora_path": str(self.folder / name), "load_inplace": inplace}
        self.server.post("/v1/load_lora_adapter", body)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Adapters]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = [f"{name}={lora_adapter(folder / name, seed)}" for seed, name in enumerate("abcd")]
    with world(folder, free_ports(60), sensitive_llama(folder / "model")) as made:
        flags = "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "8"
        environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        server = made.start(0, *flags, "--lora-modules", *modules, environment=environment)
        yield Adapters(made, server.wait(), folder)


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(5 * BLOCK_TOKENS + 9)]


WHOLE = 5 * BLOCK_TOKENS


def test_two_adapters_and_the_base_model_never_hit_each_others_kv(adapters: Adapters) -> None:
    tokens = prompt(1)
    answers = {}
    for model in ("m", "a", "b"):
        answers[model], loaded = adapters.ask(model, tokens)
        assert loaded == 0, model
    assert len({tuple(answer) for answer in answers.values()}) == 3
    for model, answer in answers.items():
        assert adapters.ask(model, tokens) == (answer, WHOLE)


def test_an_adapter_loaded_anew_from_the_same_path_does_not_hit_the_old_ones_kv(adapters: Adapters) -> None:
    tokens = prompt(2)
    old, _ = adapters.ask("c", tokens)
    assert adapters.ask("c", tokens) == (old, WHOLE)
    adapters.load("c", 77)
    new, loaded = adapters.ask("c", tokens)
    assert loaded == 0 and new != old
    assert adapters.ask("c", tokens) == (new, WHOLE)


def test_an_adapter_whose_files_change_while_it_is_loaded_is_not_cached(adapters: Adapters) -> None:
    tokens = prompt(3)
    old, _ = adapters.ask("d", tokens)
    assert adapters.ask("d", tokens) == (old, WHOLE)
    lora_adapter(adapters.folder / "d", 78)
    for _ in range(2):
        assert adapters.ask("d", tokens) == (old, 0), "the old weights answer, and are not known as the new ones"
    adapters.load("d", 79, inplace=True)
    new, loaded = adapters.ask("d", tokens)
    assert loaded == 0 and new != old
    assert adapters.ask("d", tokens) == (new, 0)
