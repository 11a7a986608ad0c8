"""What a worker does when it cannot load adopted models: it serves what its configuration says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from runtime.adopted_models import adopt, directory_of, file_name
from runtime.config import Config
from runtime.config_file import load_config
from runtime.registry import registered
from worker.adopting import MOST_DEATHS, Adopting, StartWithFewer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """With two adopted models, of which `new` is the newest."""
    made = load_config(None, {"model_name": "base", "data": tmp_path / "data"})
    for age_s, name in ((2, "old"), (1, "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"upbeat_adapter": "a" * 64}))
        adopt(made, f"base:{name}", "base", tmp_path / name)
        os.utime(directory_of(made) / file_name(f"base:{name}"), (1e9 - age_s, 1e9 - age_s))
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node-0" / "adopting.json"


def served(adopting: Adopting) -> list[str]:
    return [name.removeprefix("base:") for name in registered(adopting.config)]


def test_all_are_served_and_nothing_is_remembered_when_all_are_loaded(config: Config, path: Path) -> None:
    with Adopting(config, 0, path) as adopting:
        assert served(adopting) == ["base", "old", "new"] and path.exists()
    assert not path.exists() and adopting.left_out == {}


def test_after_an_error_the_newest_is_left_out_and_then_all(config: Config, path: Path) -> None:
    with pytest.raises(StartWithFewer), Adopting(config, 0, path):
        raise MemoryError("no room")
    second = Adopting(config, 0, path)
    assert served(second) == ["base", "old"]
    assert second.left_out == {"base:new": "the worker cannot load it: no room"}
    with pytest.raises(StartWithFewer), second:
        raise ValueError("damaged")
    with Adopting(config, 0, path) as third:
        assert served(third) == ["base"]
    assert third.left_out.keys() == {"base:old", "base:new"} and not path.exists()
    assert served(Adopting(config, 0, path)) == ["base", "old", "new"], "the next start tries again"


def test_an_error_without_adopted_models_is_the_workers_own(config: Config, path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"stage": 2, "deaths": 0, "why": "x"}')
    with pytest.raises(MemoryError), Adopting(config, 0, path):
        raise MemoryError
    bare = load_config(None, {"data": tmp_path / "other"})
    with pytest.raises(MemoryError), Adopting(bare, 0, path):
        raise MemoryError


def test_a_process_that_dies_while_loading_starts_with_fewer_after_some_times(config: Config, path: Path) -> None:
    found = []
    for _ in range(3 * MOST_DEATHS):
        adopting = Adopting(config, 0, path)
        adopting.__enter__()  # and is killed
        found.append(served(adopting))
    assert found == [["base", "old", "new"]] * MOST_DEATHS + [["base", "old"]] * MOST_DEATHS + [["base"]] * MOST_DEATHS


def test_a_process_that_is_stopped_while_loading_has_not_failed(config: Config, path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Adopting(config, 0, path):
        raise KeyboardInterrupt
    assert not path.exists()


@pytest.mark.parametrize("content", ["", "[]", "null", '{"stage": "x"}', '{"stage": 1}'])
def test_a_damaged_note_is_none(config: Config, path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    assert served(Adopting(config, 0, path)) == ["base", "old", "new"]


def test_without_a_place_for_the_note_the_error_is_shown(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MemoryError), Adopting(config, 0, tmp_path / "file" / "adopting.json"):
        raise MemoryError


def test_models_of_other_nodes_do_not_matter(tmp_path: Path, path: Path) -> None:
    models = {"base": {"path": "/b", "nodes": [1]}, "other": {"path": "/o"}}
    config = load_config(None, {"models": models, "data": tmp_path / "data"})
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text(json.dumps({"upbeat_adapter": "a" * 64}))
    adopt(config, "base:new", "base", tmp_path / "new")
    with pytest.raises(MemoryError), Adopting(config, 0, path):
        raise MemoryError
    with pytest.raises(StartWithFewer), Adopting(config, 1, path):
        raise MemoryError
