"""Two models on one node: each answers as it does alone, and what is done for one is done for it alone."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from tests.e2e.chat import ALWAYS_LOAD, Chat, script

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(280)]
SIZES = {"hbm_gib": 0.1, "dram_gib": 0.1}
NAMES = ("small", "large")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shape, dtype = SHAPES["tiny"]
    directory, made = tmp_path_factory.mktemp("models"), {}
    for name, layers in zip(NAMES, (4, 6), strict=True):
        config = shape | {"num_hidden_layers": layers, "tie_word_embeddings": False}
        made[name] = make_random_model(directory / name, config, layers, dtype)
    return made


@pytest.fixture(scope="module")
def stack(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        models=models, nodes=1, directory=tmp_path_factory.mktemp("stack"), settings=ALWAYS_LOAD, **SIZES
    ) as made:
        yield made


def talk(url: str, model: str, session: str, lines: list[str]) -> list[str]:
    """The answers of one conversation."""
    chat = Chat(url, session, model=model, max_tokens=12) if model else Chat(url, session, max_tokens=12)
    return [chat.say(line).text for line in lines]


def info(stack: Stack, session: str) -> Any:
    return httpx.get(f"{stack.url}/v1/sessions/{session}", timeout=10).json()


def kept(stack: Stack, session: str) -> None:
    """Wait until a whole chunk of the session is in the slowest tier."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        tiers = [t for node in info(stack, session).get("nodes", []) for t in node["tiers"]]
        if any(t["tier"] == "blob" and t["tokens"] >= 64 for t in tiers):
            return
        time.sleep(0.1)
    pytest.fail(f"{session} did not reach blob: {info(stack, session)}")


@pytest.mark.sample
def test_both_answer_by_name_at_once_and_as_they_do_alone(stack: Stack, models: dict[str, Path]) -> None:
    lines = script(1)[:3]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = {
            (name, n): pool.submit(talk, stack.url, name, f"{name}-{n}", lines) for name in NAMES for n in range(4)
        }
        said = {who: each.result() for who, each in asked.items()}
    for name in NAMES:
        with Stack(model=models[name], nodes=1, **SIZES) as alone:
            expected = talk(alone.url, "", "s", lines)
        assert all(said[name, n] == expected for n in range(4)), name
    assert said["small", 0] != said["large", 0]


def test_each_reads_and_spells_with_its_own_tokenizer_and_lengths(stack: Stack) -> None:
    for name in NAMES:
        answer = httpx.post(f"{stack.url}/tokenize", json={"model": name, "prompt": "hello there"}, timeout=10).json()
        assert answer["count"] > 0 and answer["max_model_len"] > 0
        text = httpx.post(
            f"{stack.url}/detokenize", json={"model": name, "tokens": answer["tokens"]}, timeout=10
        ).json()["prompt"]
        assert text == "hello there"
    listed = httpx.get(f"{stack.url}/v1/models", timeout=10).json()["data"]
    assert [(m["id"], m["state"]) for m in listed] == [(name, "active") for name in NAMES]


def test_a_hint_brings_a_session_of_either_back_and_a_restart_loses_neither(stack: Stack) -> None:
    lines = script(2)
    talks = {name: Chat(stack.url, f"kept-{name}", model=name, max_tokens=8) for name in NAMES}
    for name, chat in talks.items():
        chat.say(lines[0])
        kept(stack, f"kept-{name}")
    stack.stop()
    stack.start()
    for chat in talks.values():
        chat.url = stack.url
        chat.advise()
    time.sleep(1.0)
    for chat in talks.values():
        assert chat.say(lines[1]).cached_tokens >= 64


def test_erasing_a_session_of_one_leaves_the_others(stack: Stack) -> None:
    lines = script(3)
    talks = {name: Chat(stack.url, f"told-{name}", model=name, max_tokens=8) for name in NAMES}
    for name, chat in talks.items():
        chat.say(lines[0])
        kept(stack, f"told-{name}")
    answer = httpx.delete(f"{stack.url}/v1/sessions/told-small", timeout=30)
    assert answer.status_code == 200 and answer.json()["verified"] is True, answer.text
    assert httpx.get(f"{stack.url}/v1/sessions/told-small", timeout=10).status_code == 404
    assert info(stack, "told-large")["model"] == "large"
    assert talks["large"].say(lines[1]).cached_tokens >= 64
