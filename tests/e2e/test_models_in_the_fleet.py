"""Two models on two nodes of one fleet: each answers by its name, and what is done for one leaves the other alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.random_model import SHAPES, make_random_model
from loadtest.stack import Stack
from tests.e2e.chat import ALWAYS_LOAD, Chat, script

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]
SIZES = {"hbm_gib": 0.1, "dram_gib": 0.1}
NODE_OF = {"small": "node-0", "large": "node-1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny models of unlike shapes. (With tied embeddings a random one says its prompt's last token for ever.)"""
    shape, dtype = SHAPES["tiny"]
    directory, made = tmp_path_factory.mktemp("models"), {}
    for name, layers in (("small", 4), ("large", 6)):
        config = shape | {"num_hidden_layers": layers, "tie_word_embeddings": False}
        made[name] = make_random_model(directory / name, config, layers, dtype)
    return made


@pytest.fixture(scope="module")
def stack(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As many nodes as models: one each, in order."""
    with Stack(
        models=models, nodes=2, directory=tmp_path_factory.mktemp("stack"), settings=ALWAYS_LOAD, **SIZES
    ) as made:
        yield made


def chat(stack: Stack, model: str, session: str) -> Chat:
    return Chat(stack.url, session, model=model, max_tokens=8)


def info(stack: Stack, session: str) -> Any:
    return httpx.get(f"{stack.url}/v1/sessions/{session}", timeout=10).json()


def kept(stack: Stack, session: str, tier: str = "blob") -> None:
    """Wait until a whole chunk of the session is in this tier."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        tiers = [t for node in info(stack, session).get("nodes", []) for t in node["tiers"]]
        if any(t["tier"] == tier and t["tokens"] >= 64 for t in tiers):
            return
        time.sleep(0.1)
    pytest.fail(f"{session} did not reach {tier}: {info(stack, session)}")


def test_each_model_answers_by_its_name_as_it_does_alone(stack: Stack, models: dict[str, Path]) -> None:
    lines = script(1)[:2]
    said = {}
    for name, node in NODE_OF.items():
        answers = [chat(stack, name, f"{name}-{turn}").say(line) for turn, line in enumerate(lines)]
        assert {answer.node for answer in answers} == {node}
        said[name] = [answer.text for answer in answers]
    assert said["small"] != said["large"]
    with Stack(model=models["large"], nodes=1, **SIZES) as alone:
        assert [Chat(alone.url, f"s{turn}", max_tokens=8).say(line).text for turn, line in enumerate(lines)] == said[
            "large"
        ]


def test_a_model_that_is_not_registered_does_not_exist(stack: Stack) -> None:
    body = {"model": "medium", "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_node_that_has_another_model_says_so_at_once(stack: Stack) -> None:
    pinned = {"model": "large", "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=pinned, headers={"X-Upbeat-Node": "node-0"}, timeout=5)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "X-Upbeat-Node") and "node-0 has no model 'large'" in error[
        "message"
    ]


def test_the_command_line_lists_them_with_nodes_and_bytes(stack: Stack) -> None:
    command = [str(Path(sys.executable).with_name("upbeat")), "models", "--json", "--url", stack.url]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)["data"]
    assert [(m["id"], m["state"], [n["node"] for n in m["nodes"]]) for m in listed] == [
        (name, "active", [node]) for name, node in NODE_OF.items()
    ]
    assert listed[0]["weight_bytes"] > 0 and listed[1]["nodes"][0]["kv_bytes_limit"] > 0


def test_hints_of_a_session_go_to_the_node_of_its_model(stack: Stack) -> None:
    for name, node in NODE_OF.items():
        talk = chat(stack, name, f"hinted-{name}")
        talk.say(script(2)[0])
        kept(stack, f"hinted-{name}")
        talk.advise()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            decisions = httpx.get(f"{stack.url}/v1/sessions/hinted-{name}/placement", timeout=10).json()["decisions"]
            if decisions[0]["what"] == "hint":
                break
            time.sleep(0.1)
        assert (decisions[0]["what"], decisions[0]["node"]) == ("hint", node)
        assert [score["node"] for score in decisions[0]["scores"]] == [node], "no other node was looked at"


def test_erasing_a_session_of_one_leaves_the_others_and_that_one_is_found_after_a_restart(stack: Stack) -> None:
    lines = script(3)
    talks = {name: chat(stack, name, f"told-{name}") for name in NODE_OF}
    for name, talk in talks.items():
        talk.say(lines[0])
        kept(stack, f"told-{name}")
    answer = httpx.delete(f"{stack.url}/v1/sessions/told-small", timeout=30)
    assert answer.status_code == 200 and answer.json()["verified"] is True, answer.text
    assert httpx.get(f"{stack.url}/v1/sessions/told-small", timeout=10).status_code == 404
    assert info(stack, "told-large")["model"] == "large"
    assert talks["large"].say(lines[1]).cached_tokens >= 64
    stack.stop()
    stack.start()
    talks["large"].url = stack.url
    after = talks["large"].say(lines[2])
    assert after.cached_tokens >= 64 and after.node == "node-1"
