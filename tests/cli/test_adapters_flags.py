"""`upbeat up --adapter [MODEL:]NAME=DIR`: whose adapters they are, what is refused before a start, and their memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from cli.adapters import adapters_bytes
from cli.demo_memory import with_demo_memory
from cli.doctor import _adapters
from cli.models import show_models
from cli.settings import BUNDLED_MODEL, Flags, layout, resolve
from contracts.errors import ConfigError
from runtime.registry import adapters_of, registered


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A directory with an adapter's configuration; its matrices are not looked at."""
    made = tmp_path / "an-adapter"
    made.mkdir()
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (made / "adapter_config.json").write_text(json.dumps(said))
    (made / "adapter_model.safetensors").write_bytes(b"")
    return made


def resolved(tmp_path: Path, *adapters: str, **more: object) -> Flags:
    return Flags(nodes=1, adapters=adapters, data=tmp_path / "d", run_dir=tmp_path / "r", **more)  # type: ignore[arg-type]


def test_the_only_model_has_them_and_keeps_its_name(tmp_path: Path, adapter: Path) -> None:
    config = resolve(resolved(tmp_path, f"support={adapter}", f"upbeat-demo:law={adapter}", f"x:y={adapter}"))
    assert adapters_of(config) == {"support": "upbeat-demo", "law": "upbeat-demo", "x:y": "upbeat-demo"}
    assert (config.served_model, config.model) == ("upbeat-demo", BUNDLED_MODEL)


def test_of_several_models_it_is_said_whose_they_are_beside_those_of_the_file(tmp_path: Path, adapter: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(BUNDLED_MODEL, other)
    file = tmp_path / "given.yaml"
    file.write_text(f"models: {{a: {{path: {other}, adapters: {{old: {adapter}}}}}, 'a:b': {{path: {other}}}}}\n")
    config = resolve(resolved(tmp_path, f"a:b:one={adapter}", f"a:two={adapter}", config=file))
    assert adapters_of(config) == {"old": "a", "two": "a", "one": "a:b"}
    with pytest.raises(ConfigError, match=r"--adapter one=.*say which model it is of: a, a:b"):
        layout(resolved(tmp_path, f"one={adapter}", config=file))


@pytest.mark.parametrize("text", ["support", "=DIR", "support=", "upbeat-demo:=DIR"])
def test_what_names_no_adapter_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--adapter .*NAME=DIR"):
        layout(Flags(adapters=[text]))


def test_a_name_twice_or_of_a_model_is_refused(adapter: Path) -> None:
    with pytest.raises(ConfigError, match="support is named twice"):
        layout(Flags(adapters=[f"support={adapter}"] * 2))
    with pytest.raises(ConfigError, match="a model has this name"):
        layout(Flags(adapters=[f"upbeat-demo={adapter}"]))


def test_one_that_cannot_be_served_stops_the_start(tmp_path: Path, adapter: Path) -> None:
    for path, match in ((tmp_path / "none", "no such directory"), (tmp_path, "it has no adapter_config.json")):
        with pytest.raises(ConfigError, match=f"models.upbeat-demo.adapters.x = {path}: {match}"):
            resolve(resolved(tmp_path, f"x={path}"))
    config = layout(resolved(tmp_path, f"x={adapter}"))
    [(name, model)] = registered(config).items()
    assert [(f.level, f.detail) for f in _adapters(name, model, BUNDLED_MODEL)] == [("ok", "of upbeat-demo: x")]
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["lm_head"]}')
    with pytest.raises(ConfigError, match="lm_head is not served with an adapter"):
        resolve(resolved(tmp_path, f"x={adapter}"))
    [finding] = _adapters(name, model, BUNDLED_MODEL)
    assert finding.level == "fail" and "merge it" in finding.remedy


def test_their_memory_is_beside_the_weights(tmp_path: Path, adapter: Path) -> None:
    flags = resolved(tmp_path, f"x={adapter}", f"y={adapter}")
    config, plain = resolve(flags), resolve(Flags(nodes=1, data=tmp_path / "d", run_dir=tmp_path / "r"))
    need = adapters_bytes(config, "upbeat-demo", BUNDLED_MODEL)
    assert need > 0 and adapters_bytes(plain, "upbeat-demo", BUNDLED_MODEL) == 0
    more = with_demo_memory(config, flags).kv.hbm_gib - with_demo_memory(plain, Flags()).kv.hbm_gib
    assert more * 2**30 == pytest.approx(need)


def test_upbeat_models_lists_them_behind_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    show_models(Console(width=200), [{"id": "m", "state": "active"}, {"id": "x", "parent": "m", "state": "active"}])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:2] == ["m", "active"] and lines[-1] == ["x", "m", "active"] and ["adapter", "of", "state"] in lines
