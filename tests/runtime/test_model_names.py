"""Paths and hub ids told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import ConfigError
from runtime.config_file import load_config
from runtime.model_directory import model_directory, named
from runtime.model_names import HubId, hub_id


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubId("Qwen/Qwen3-0.6B", "v1.0")),
        ("a_b/c.d@refs/pr/1", HubId("a_b/c.d", "refs/pr/1")),
    ],
)
def test_a_hub_id(text: str, model: HubId) -> None:
    assert hub_id(text) == model
    assert str(model) == text
    assert str(load_config(None, {"model": text}).model) == text


@pytest.mark.parametrize(
    "text",
    [
        "./Qwen/Qwen3",
        "/a/b",
        "~/a",
        "a/b/c",
        "a/",
        "gpt2",
        "a b/c",
        "../a",
        "a/..",
        "a--b/c",
        "a/b@",
        "a/b@../c",
        "é/b",
        "",
    ],
)
def test_a_path(text: str) -> None:
    assert hub_id(text) is None


def test_an_existing_path_wins() -> None:
    Path("Qwen/Qwen3").mkdir(parents=True)
    assert hub_id("Qwen/Qwen3") is None
    assert load_config(None, {"model": "Qwen/Qwen3"}).model == Path.cwd() / "Qwen/Qwen3"


def test_what_lies_in_a_directory_that_is_here_is_a_path_unless_it_says_a_revision() -> None:
    Path("models").mkdir()
    assert hub_id("models/dmeo") is None
    assert hub_id("models/dmeo@main") == HubId("models/dmeo", "main")
    with pytest.raises(ConfigError, match=r"models/dmeo: no such directory; .*models/dmeo@main"):
        model_directory("models/dmeo", "--model")


def test_a_path_that_does_not_exist_says_so() -> None:
    with pytest.raises(ConfigError, match=r"--model .*/no/such/one: no such directory; .*hub id such as"):
        model_directory("./no/such/one", "--model")


def test_a_gguf_file_names_what_serves_it() -> None:
    Path("model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"llama\.cpp"):
        model_directory("model.gguf", "--model")


def test_a_revision_of_its_own_flag() -> None:
    assert named("Qwen/Qwen3", "v1") == named("Qwen/Qwen3@v1", "v1") == "Qwen/Qwen3@v1"
    for text, revision, said in (
        ("./a", "v1", "path"),
        ("Qwen/Qwen3@v2", "v1", "another"),
        ("Qwen/Qwen3", "..", "no branch"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            named(text, revision)
        assert f"--revision {revision}" in str(refused.value)
