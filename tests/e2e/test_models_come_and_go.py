"""Three models on a device that holds two at most, with and without targets: every request is answered as by a model
alone, hints wake models."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from tests.e2e.chat import Chat, script

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
LAYERS = {"small": 4, "middle": 6, "large": 8}
TURNS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape, dtype = SHAPES["tiny"]
    directory = tmp_path_factory.mktemp("models")
    return {
        name: make_random_model(
            directory / name, shape | {"num_hidden_layers": layers, "tie_word_embeddings": False}, layers, dtype
        )
        for name, layers in LAYERS.items()
    }


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, list[str]]:
    """The answers of each model with a share of the device to itself."""
    registered = {name: {"path": str(path)} for name, path in models.items()}
    with Stack(nodes=1, hbm_gib=0.3, dram_gib=0.1, settings={"sharing": "static", "models": registered}) as stack:
        return {name: talk(Chat(stack.url, name, max_tokens=12, model=name)) for name in models}


@pytest.fixture(
    scope="module", params=["prism", *(pytest.param(p, marks=pytest.mark.slow) for p in ("swap", "serverless"))]
)
def stack(
    models: dict[str, Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    # Each layer, and what is outside the layers, takes one granule of 2 MiB: 5, 7 and 9 of 17.
    registered = {name: {"path": str(path)} for name, path in models.items()}
    if request.param == "prism":
        registered["small"] |= {"ttft_s": 0.2, "tpot_s": 0.05}
        registered["large"] |= {"ttft_s": 2.0}
    with Stack(
        nodes=1, directory=tmp_path_factory.mktemp("stack"), hbm_gib=0.0345, dram_gib=0.1,
        settings={"sharing": request.param, "models": registered},
    ) as made:  # fmt: skip
        yield made


def talk(chat: Chat) -> list[str]:
    return [chat.say(line).text for line in script(1)[:TURNS]]


def states(stack: Stack) -> dict[str, str]:
    listed = httpx.get(f"{stack.url}/v1/models", timeout=10).json()["data"]
    return {m["id"]: m["state"] for m in listed}


def reach(stack: Stack, wanted: dict[str, str]) -> None:
    """Wait until the models have these states; workers report every second."""
    deadline = time.monotonic() + 20
    while states(stack) != wanted:
        assert time.monotonic() < deadline, f"{states(stack)}, not {wanted}"
        time.sleep(0.1)


def test_all_are_answered_one_after_the_other(stack: Stack, alone: dict[str, list[str]]) -> None:
    chats = {name: Chat(stack.url, f"turns-{name}", model=name, max_tokens=12) for name in LAYERS}
    said: dict[str, list[str]] = {name: [] for name in LAYERS}
    for line in script(1)[:TURNS]:
        for name, chat in chats.items():
            said[name].append(chat.say(line).text)
    assert said == alone
    deadline = time.monotonic() + 10
    while "cold" not in states(stack).values():  # one that a request wakes counts as loading, until its worker reports
        assert time.monotonic() < deadline, "all three are here at once"
        time.sleep(0.1)


def test_all_are_answered_at_once(stack: Stack, alone: dict[str, list[str]]) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = {
            (name, n): pool.submit(talk, Chat(stack.url, f"once-{name}-{n}", model=name, max_tokens=12))
            for name in LAYERS
            for n in range(3)
        }
        for (name, _), each in asked.items():
            assert each.result() == alone[name], name


# By swap, the other would have to be idle for 45 s; by serverless, hints wake nothing.
@pytest.mark.parametrize("stack", ["prism"], indirect=True)
def test_a_hint_wakes_a_model_where_memory_is_left(stack: Stack) -> None:
    chats = {name: Chat(stack.url, f"hint-{name}", model=name, max_tokens=8) for name in LAYERS}
    for name in ("middle", "large", "small"):  # large does not fit beside another; small and middle do
        chats[name].say(script(2)[0])
    reach(stack, {"small": "active", "middle": "cold", "large": "cold"})
    chats["middle"].advise()
    reach(stack, {"small": "active", "middle": "active", "large": "cold"})
    assert chats["middle"].say(script(2)[1]).cached_tokens >= 64


@pytest.mark.parametrize("stack", ["prism"], indirect=True)
def test_the_hint_of_a_new_conversation_wakes_the_model_that_it_names(stack: Stack) -> None:
    until, round_ = time.monotonic() + 60, 0
    while states(stack)["small"] != "cold":  # an earlier hint may wake middle again
        assert time.monotonic() < until, states(stack)
        for name in ("large", "middle"):
            Chat(stack.url, f"others-{name}-{round_}", model=name, max_tokens=4).say(script(3)[0])
        round_ += 1
        time.sleep(1.5)
    Chat(stack.url, "never-heard-of").advise(model_id="small")
    while states(stack)["small"] != "active":
        assert time.monotonic() < until, states(stack)
        time.sleep(0.1)


def test_the_longest_request_beside_a_models_own_weights_is_answered_and_a_longer_one_refused(stack: Stack) -> None:
    def ask(words: int) -> httpx.Response:
        body = {"model": "large", "prompt": "word " * words, "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=100)

    per_word = ask(100).json()["usage"]["prompt_tokens"] / 100
    fits, longest = int(7500 / per_word), int(7700 / per_word)  # 8 granules of 17 are left for KV: 119 chunks of 64
    refused = ask(longest)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded", refused.text
    assert ask(fits).json()["usage"]["prompt_tokens"] > 7400
