"""What the connector is told, which vLLM it works in, and what names weights and inputs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from upbeat_vllm.digests import directory_digest
from upbeat_vllm.geometry import _changes, why_uncached
from upbeat_vllm.keys import Item, extras
from upbeat_vllm.settings import Refused, Settings, check_version

GOOD = {"store": "127.0.0.1:8100", "secret": "data/secret"}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"store": "8100"}, "store"),
        ({"store": 8100}, "store"),
        ({"secret": None}, "secret"),
        ({"device": -1}, "device"),
        ({"device": True}, "device"),
        ({"digest": "abc"}, "digest"),
        ({"stor": "x"}, "stor"),
    ],
)
def test_a_wrong_key_is_named(change: dict[str, Any], key: str) -> None:
    with pytest.raises(Refused, match=rf"kv_connector_extra_config\.{key}\b"):
        Settings.read(GOOD | change, "m")


def test_the_secret_is_read_from_its_file_and_never_said(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    settings = Settings.read(GOOD | {"secret": str(file)}, "m")
    for content in ("", "xyz", "ab" * 31):
        file.write_text(content)
        with pytest.raises(Refused, match="secret") as e:
            settings.read_secret()
        assert not content or content not in str(e.value)
    file.write_text("ab" * 32 + "\n")
    assert settings.read_secret() == b"\xab" * 32


@pytest.mark.parametrize("version", ["0.31.0", "0.34.1", "1.0"])
def test_another_vllm_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(Refused, match=re.escape(version) + ".*install"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1rc1"])
def test_tested_versions_pass(version: str) -> None:
    check_version(version)


def test_the_command_line_prints_what_the_connector_reads(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("upbeat")), "vllm-config", "--data", str(tmp_path), "--node", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    settings = Settings.read(said["kv_connector_extra_config"], "m")
    assert settings.secret == tmp_path / "secret" and said["kv_load_failure_policy"] == "recompute"
    refused = subprocess.run([*command[:-1], "9"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "--node" in refused.stderr


def weights(folder: Path, content: bytes = b"w", config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(config)
    return folder


def test_weights_are_named_by_content_not_by_path(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = directory_digest(weights(tmp_path / "a"), cache)
    assert directory_digest(weights(tmp_path / "b"), cache) == one == directory_digest(tmp_path / "a", cache)
    assert directory_digest(weights(tmp_path / "c", b"x"), cache) != one
    assert directory_digest(weights(tmp_path / "d", config='{"rope": 1}'), cache) != one
    (tmp_path / "a" / "model.safetensors").write_bytes(b"other")
    assert directory_digest(tmp_path / "a", cache) != one
    with pytest.raises(FileNotFoundError):
        directory_digest(cache, cache)


def test_two_images_of_one_size_have_other_keys_and_so_do_two_places_of_one() -> None:
    def of(*items: Item, adapter: bytes = b"") -> dict[int, bytes]:
        return dict(extras(items, adapter, 16))

    cat, dog = Item("cat", 10, 20), Item("dog", 10, 20)
    assert of(cat).keys() == {0, 1} and all(of(cat)[n] != of(dog)[n] for n in (0, 1))
    assert of(cat)[0] != of(Item("cat", 11, 20))[0]
    assert of(cat)[1] == of(Item("cat", 10, 19))[1], "the tokens of a chunk say how long it is"
    assert of() == {} and of(adapter=b"a") != of(adapter=b"b") and of(adapter=b"a").keys() == {0}
    assert of(Item("cat", 3, 0)).keys() == {0}


def test_flags_that_change_the_model_change_what_names_its_kv() -> None:
    def of(overrides: Any, quantization: str | None) -> str:
        return _changes(SimpleNamespace(hf_overrides=overrides, quantization=quantization))

    assert of({}, None) == of(None, None) == ""
    assert len({of({}, None), of({"rope_theta": 1e6}, None), of({"rope_theta": 1e4}, None), of({}, "fp8")}) == 4


def test_a_draft_model_or_other_kinds_of_kv_are_not_cached() -> None:
    full = SimpleNamespace(kv_cache_spec=type("FullAttentionSpec", (), {})())
    window = SimpleNamespace(kv_cache_spec=type("SlidingWindowSpec", (), {})())

    def of(method: str | None, *groups: SimpleNamespace) -> str:
        speculative = SimpleNamespace(method=method) if method else None
        config, kv = SimpleNamespace(speculative_config=speculative), SimpleNamespace(kv_cache_groups=groups)
        return why_uncached(config, kv)

    assert of(None, full) == of("ngram", full) == ""
    assert "eagle" in of("eagle", full) and "SlidingWindow" in of(None, window) and "2 groups" in of(None, full, window)
