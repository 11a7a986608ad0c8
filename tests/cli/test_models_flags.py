"""`upbeat up --model NAME=DIR`, several times: which models a stack has, which node serves which, and what is
refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from stand_in_stack import UpbeatUp

from cli.doctor import examine
from cli.models import asked_models, idle, memory_of, shared_devices, show_models
from cli.settings import BUNDLED_MODEL, Flags, layout, resolve
from contracts.errors import ConfigError
from runtime.config_file import load_config
from runtime.registry import models_of


@pytest.fixture
def two(tmp_path: Path) -> dict[str, str]:
    """Two directories of models, by name."""
    made = {name: tmp_path / name for name in ("small", "large")}
    for directory in made.values():
        directory.mkdir()
        for name in ("config.json", "tokenizer.json"):
            shutil.copyfile(BUNDLED_MODEL / name, directory / name)
        (directory / "model.safetensors").write_bytes(b"")
    return {name: str(directory) for name, directory in made.items()}


def test_one_without_a_name_or_some_with_one() -> None:
    assert asked_models(None) == (None, {})
    assert asked_models(["models/demo"]) == ("models/demo", {})
    assert asked_models(["a=/m/a", "b=Qwen/Qwen3-0.6B"]) == (None, {"a": "/m/a", "b": "Qwen/Qwen3-0.6B"})


def test_a_directory_that_is_there_may_have_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert asked_models([str(tmp_path / "a=b")]) == (str(tmp_path / "a=b"), {})


@pytest.mark.parametrize("texts", [["/m/a", "/m/b"], ["a=/m/a", "/m/b"], ["a=/m/a", "a=/m/b"], ["=/m/a"], ["a="]])
def test_what_names_no_model_is_refused_with_an_example(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--model .*(--model small=|its own name)"):
        asked_models(texts)


def test_as_many_models_as_nodes_have_one_each_in_order(two: dict[str, str]) -> None:
    config = layout(Flags(nodes=2, models=two))
    assert [models_of(config, n) for n in range(2)] == [["small"], ["large"]]


def test_of_other_numbers_every_node_has_all_unless_the_file_says_which(two: dict[str, str], tmp_path: Path) -> None:
    for nodes in (1, 3):
        config = layout(Flags(nodes=nodes, models=two))
        assert [models_of(config, n) for n in range(nodes)] == [["small", "large"]] * nodes
    file = tmp_path / "given.yaml"
    file.write_text(
        "models: {small: {path: /elsewhere, nodes: [0, 2], ttft_s: 0.5}, large: {path: /elsewhere, nodes: [1]}}\n"
    )
    config = layout(Flags(nodes=3, models=two, config=file))
    assert [models_of(config, n) for n in range(3)] == [["small"], ["large"], ["small"]]
    small = config.models["small"]
    assert (str(small.path), small.ttft_s) == (two["small"], 0.5), "flags say the directory, the file says the rest"


def test_the_models_of_the_file_are_replaced_by_those_of_flags(two: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text(f"models: {{small: {{path: {two['small']}}}, large: {{path: {two['large']}}}}}\n")
    assert list(resolve(Flags(nodes=2, config=file, data=tmp_path / "d", run_dir=tmp_path / "r")).models) == [
        "small",
        "large",
    ]
    config = layout(Flags(nodes=2, config=file, model=two["large"]))
    assert (config.models, config.served_model) == ({}, "upbeat-large")


def test_a_directory_that_is_no_model_is_named_with_its_model(two: dict[str, str], tmp_path: Path) -> None:
    places = {"data": tmp_path / "d", "run_dir": tmp_path / "r"}
    with pytest.raises(ConfigError, match=r"--model large: /nowhere: no such directory"):
        resolve(Flags(nodes=2, models=two | {"large": "/nowhere"}, **places))
    with pytest.raises(ConfigError, match=r"--revision v1: there are several models"):
        resolve(Flags(nodes=2, models=two, revision="v1", **places))


def test_the_launcher_starts_a_worker_with_each_and_says_so(up: UpbeatUp, two: dict[str, str]) -> None:
    up.serving(nodes=2, model=[f"{name}={path}" for name, path in two.items()])
    assert "Upbeat serves small and large on" in up.said()
    assert "started upbeat-worker of node-1 with large (pid" in up.said()
    written = load_config(up.run_dir / "config.yaml")
    assert [models_of(written, n) for n in range(2)] == [["small"], ["large"]]


def test_doctor_looks_at_every_model(two: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("worker: {kernels: torch}\n")
    flags = Flags(nodes=2, models=two | {"large": "/nowhere"}, data=tmp_path, config=file)
    found = [f for f in examine(layout(flags)) if f.check == "model"]
    assert [f.level for f in found] == ["ok", "fail"]


def test_the_table_has_a_line_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        {
            "node": "node-0",
            "state": "active",
            "kv_bytes_used": 1 << 20,
            "kv_bytes_cached": 2 << 20,
            "kv_bytes_limit": 3 << 20,
            "idle_s": 7.2,
        },
        {"node": "node-1", "state": "active", "layers_lent": 12, "idle_s": 9.0},
    ]
    small = {
        "id": "small",
        "state": "active",
        "nodes": nodes,
        "weight_bytes": 5 << 20,
        "layers": 24,
        "ttft_slo_s": 0.5,
        "tpot_slo_s": 0,
        "slo_turns": {"ttft": {"turns": 8, "attained": 7}, "tpot": {"turns": 0, "attained": 0}},
        "priority": 2,
        "pinned": True,
    }
    large = {"id": "large", "state": "cold", "nodes": [], "weight_bytes": 0}
    show_models(Console(width=200), json.loads(json.dumps([small, large])))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "model state nodes weights KV in use KV cached idle priority TTFT, TPOT".split()
    there = "node-0 (active), node-1 (active, 12 of 24 lent)"
    told = f"small active {there} 5.0 MiB 1.0 MiB of 3.0 MiB 2.0 MiB 7 s 2, pinned 0.5 s (88 %), -"
    assert lines[1].split() == told.split()
    assert lines[2].split() == "large cold - - - - - 0 -".split()


@pytest.mark.parametrize(("seconds", "words"), [(None, "-"), (0.0, "busy"), (3.4, "3 s"), (600.0, "10 min")])
def test_how_long_a_model_has_had_no_request(seconds: float | None, words: str) -> None:
    assert idle(seconds) == words


def test_models_that_share_a_device_have_a_line_each_with_what_they_hold(capsys: pytest.CaptureFixture[str]) -> None:
    memory = [
        {"use": "weights", "name": "small", "bytes": 5 << 20},
        {"use": "kv", "name": "small", "bytes": 3 << 20},
        {"use": "free", "name": "", "bytes": 9 << 20},
    ]
    models = [
        {"name": "small", "state": "active", "running": 2, "waiting": 0, "idle_s": 0.0, "layers": 24},
        {"name": "large", "state": "loading", "running": 0, "waiting": 1, "idle_s": 30.0, "activation_s": 0.25},
    ]
    device = {"node": "node-0", "memory": memory, "models": models}
    assert memory_of(device, "weights", "kv") == "5.0 MiB, 3.0 MiB" and memory_of({}, "free") == "-"
    alone = {"node": "node-1", "models": models[:1]}
    assert shared_devices([alone]) is None
    shown = shared_devices([alone, device])
    assert shown is not None
    Console(width=200).print(shown)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == "node-0 small active 2, 0 5.0 MiB 3.0 MiB busy".split()
    assert lines[2].split() == "large loading, 0.2 s left 0, 1 - - 30 s".split()
    models[0]["layers_lent"] = 12
    lends = shared_devices([alone | {"memory": memory}])
    assert lends is not None, "also where it is the only model"
    Console(width=200).print(lends)
    told = capsys.readouterr().out.splitlines()[1]
    assert told.split() == "node-1 small active 2, 0 5.0 MiB, 12 of 24 lent 3.0 MiB busy".split()
