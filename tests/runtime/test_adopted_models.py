"""Adopted models: files that cannot escape their directory, are read with suspicion, and never win over the
configuration."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError
from runtime.adopted_models import MOST_BYTES, adopt, adopted, directory_of, file_name, remove, with_adopted
from runtime.config import Config
from runtime.config_file import load_config
from runtime.registry import as_only, models_of, registered

NAME = "base:mine"


def config_of(tmp_path: Path, **more: Any) -> Config:
    return load_config(None, {"model": "/models/base", "model_name": "base", "data": tmp_path / "data"} | more)


def merged(tmp_path: Path, name: str = "merged") -> Path:
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"upbeat_adapter": "a" * 64}))
    return path


def written(config: Config, of: str = NAME, **more: Any) -> Path:
    """The file of a model as an attacker might write it."""
    path = directory_of(config) / file_name(of)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": 1, "name": of, "base": "base", "path": "/nowhere"} | more))
    return path


def test_an_adopted_model_is_served_where_its_base_is_and_as_its_base_is(tmp_path: Path) -> None:
    said = {"path": "/b", "nodes": [1], "dtype": "bfloat16", "ttft_s": 2.0, "tpot_s": 0.1, "priority": 3}
    config = load_config(None, {"models": {"a": {"path": "/a"}, "base": said}, "data": tmp_path / "data"})
    path = merged(tmp_path)
    adopt(config, NAME, "base", path)
    more = with_adopted(config)
    assert list(registered(more)) == ["a", "base", NAME] and (more.served_model, more.model) == ("a", Path("/a"))
    assert [models_of(more, n) for n in range(2)] == [["a"], ["a", "base", NAME]]
    entry = registered(more)[NAME].model_dump() | {"path": "/b"}
    assert entry | {"path": Path("/b")} == registered(config)["base"].model_dump()
    assert as_only(more, 1)[NAME].worker.dtype == "bfloat16" and as_only(more, 1)[NAME].model == path
    assert list(registered(config)) == ["a", "base"], "the configuration itself stays as it is"


def test_the_only_model_of_a_configuration_keeps_its_name_beside_an_adopted_one(tmp_path: Path) -> None:
    config = load_config(None, {"model": "/models/base", "data": tmp_path / "data"})
    adopt(config, "upbeat-base:x", "upbeat-base", merged(tmp_path))
    more = with_adopted(config)
    assert list(registered(more)) == ["upbeat-base", "upbeat-base:x"] and more.served_model == "upbeat-base"


def test_an_adopted_model_can_be_the_base_of_another_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    adopt(config, NAME, "base", merged(tmp_path))
    adopt(config, f"{NAME}:more", NAME, merged(tmp_path, "more"))
    os.utime(directory_of(config) / file_name(NAME), (1, 1))
    assert list(adopted(config)) == [NAME, f"{NAME}:more"], "the oldest first"
    with pytest.raises(ConfigError, match="neither the configuration nor"):
        adopt(config, "x:y", "x", tmp_path / "more")


def test_a_removed_model_is_gone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    adopt(config, NAME, "base", merged(tmp_path))
    assert remove(config, NAME) and not remove(config, NAME)
    assert with_adopted(config) is config


def test_the_configuration_wins_over_an_adopted_model_of_its_name(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    path = merged(tmp_path)
    with pytest.raises(ConfigError, match="the configuration has a model of this name"):
        adopt(config, "base", "base", path)
    written(config, "base", path=str(path))
    assert adopted(config) == {} and registered(with_adopted(config))["base"].path == Path("/models/base")


def test_a_name_is_given_once(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    adopt(config, NAME, "base", merged(tmp_path))
    adopt(config, NAME, "base", tmp_path / "merged")
    with pytest.raises(ConfigError, match="served already"):
        adopt(config, NAME, "base", merged(tmp_path, "other"))


def test_only_a_whole_merged_model_is_adopted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="no directory"):
        adopt(config, NAME, "base", tmp_path / "gone")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no merged model"):
        adopt(config, NAME, "base", tmp_path / "plain")
    assert not directory_of(config).exists()


def test_a_model_whose_directory_vanished_is_left_out_and_the_others_are_served(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    adopt(config, NAME, "base", merged(tmp_path))
    adopt(config, "base:other", "base", merged(tmp_path, "other"))
    (tmp_path / "merged" / "config.json").unlink()
    assert list(adopted(config)) == ["base:other"]


def test_a_model_that_contradicts_the_configuration_is_left_out(tmp_path: Path) -> None:
    models = {"base": {"path": "/b", "pinned": True}}
    config = load_config(None, {"models": models, "sharing": "swap", "data": tmp_path / "data"})
    adopt(config, NAME, "base", merged(tmp_path))
    assert list(registered(with_adopted(config))) == ["base"], "base would stay, and the other one never run"


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "\x1b[2J", "x" * 129, "\u202eb"])
def test_a_name_that_cannot_be_shown_is_refused(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="give a name"):
        adopt(config, name, "base", merged(tmp_path))
    written(config, name, path=str(tmp_path / "merged"))
    assert adopted(config) == {}


@given(st.text(), st.text())
def test_a_file_never_leaves_its_directory_and_names_keep_apart(name: str, other: str) -> None:
    found = file_name(name)
    assert found.isascii() and not found.startswith(".") and len(found) <= 100
    assert not {"/", "\\", "\0", " "} & set(found) and ".." not in found
    assert (found == file_name(other)) == (name == other)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../b", "..", ".", "a b", "~", "ünï:x"])
def test_names_with_separators_are_kept_as_they_are_in_a_file_of_the_directory(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    adopt(config, name, "base", merged(tmp_path))
    [path] = directory_of(config).iterdir()
    assert path.parent == directory_of(config) and list(adopted(config)) == [name]


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"name": "base:other"},
        {"name": 7},
        {"base": None},
        {"path": "relative"},
        {"path": "/a\0b"},
        {"path": ["/a"]},
        {"path": "/proc"},
        {"nodes": "all"},
        {"nodes": []},
        {"tpot_s": -1},
        {"priority": 1e9},
        {"dtype": "int4"},
    ],
)
def test_a_damaged_file_is_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    config = config_of(tmp_path)
    adopt(config, "base:good", "base", merged(tmp_path))
    written(config, **{"path": str(tmp_path / "merged")} | damage)
    assert list(adopted(config)) == ["base:good"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 40_000, b'{"a": NaN'])
def test_a_file_of_something_else_is_left_out(tmp_path: Path, content: bytes) -> None:
    config = config_of(tmp_path)
    written(config).write_bytes(content)
    assert adopted(config) == {}


def test_huge_files_links_pipes_and_directories_are_left_out(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    merged(tmp_path)
    good = written(config, path=str(tmp_path / "merged"))
    assert list(adopted(config)) == [NAME]
    outside = tmp_path / "outside.json"
    good.rename(outside)
    good.symlink_to(outside)
    assert adopted(config) == {}, "a link"
    good.unlink()
    os.mkfifo(good)
    assert adopted(config) == {}, "a pipe without a writer"
    good.unlink()
    good.mkdir()
    assert adopted(config) == {}, "a directory"
    good.rmdir()
    good.write_text(outside.read_text() + " " * MOST_BYTES)
    assert adopted(config) == {}, "too long"
    good.write_text(outside.read_text() + " " * (MOST_BYTES - outside.stat().st_size))
    assert list(adopted(config)) == [NAME]


def test_a_link_in_the_place_of_the_file_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    target = tmp_path / "target"
    target.write_text("mine")
    written(config).unlink()
    path = directory_of(config) / file_name(NAME)
    path.symlink_to(target)
    adopt(config, NAME, "base", merged(tmp_path))
    assert target.read_text() == "mine" and stat.S_ISREG(path.lstat().st_mode)
    assert list(adopted(config)) == [NAME] and len(list(directory_of(config).iterdir())) == 1
