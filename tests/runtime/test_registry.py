"""The models of a configuration: what may be said of them, and which nodes serve which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import dump_config, load_config
from runtime.registry import adapters_of, as_only, models_of, registered

TWO = {"small": {"path": "/models/s", "nodes": [0]}, "large": {"path": "/models/l", "nodes": [1], "dtype": "bfloat16"}}


def config_of(models: dict[str, Any], nodes: int = 2, **more: Any) -> Config:
    return load_config(None, {"models": models, "nodes": {"count": nodes}, **more})


def test_a_single_model_is_one_entry_that_every_node_serves() -> None:
    config = load_config(None, {"model": "/models/s", "model_name": "small"})
    assert {name: model.path for name, model in registered(config).items()} == {"small": Path("/models/s")}
    assert [models_of(config, n) for n in range(2)] == [["small"], ["small"]]
    assert list(registered(load_config())) == ["upbeat-demo"]


def test_a_node_serves_the_models_that_name_it_and_those_that_name_none() -> None:
    config = config_of(TWO)
    assert [models_of(config, n) for n in range(2)] == [["small"], ["large"]]
    assert models_of(config_of({"a": {"path": "/a"}}, nodes=3), 2) == ["a"]


def test_the_first_of_several_is_what_model_and_model_name_say() -> None:
    config = config_of(TWO)
    assert (config.served_model, config.model) == ("small", Path("/models/s"))


def test_a_worker_reads_each_of_its_models_as_the_only_one() -> None:
    [config] = as_only(config_of(TWO), 1).values()
    assert (config.served_model, config.model, config.worker.dtype) == ("large", Path("/models/l"), "bfloat16")
    assert as_only(config_of(TWO), 0)["small"].worker.dtype == "auto"
    both = as_only(config_of({"a": {"path": "/a"}, "b": {"path": "/b"}}, nodes=1), 0)
    assert {name: (each.served_model, each.model) for name, each in both.items()} == {
        "a": ("a", Path("/a")),
        "b": ("b", Path("/b")),
    }


def test_what_is_written_down_is_read_back(tmp_path: Path) -> None:
    config = config_of(TWO)
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config))
    assert load_config(written) == config


def test_models_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT__MODELS__SMALL__PATH", "/models/s")
    assert list(registered(load_config())) == ["small"]


@pytest.mark.parametrize(
    ("models", "nodes", "key", "remedy"),
    [
        ({"a": {"path": "/a", "nodes": [0]}}, 2, "node 1 serves no model", "models.a.nodes: [..., 1]"),
        ({"a": {"path": "/a", "nodes": [2]}}, 2, "models.a.nodes = [2]", "0 to 1"),
        ({"a": {"path": "/a", "nodes": [0, 0]}}, 1, "models.a.nodes = [0, 0]", "once"),
        ({"a": {"path": "/a", "nodes": []}}, 1, "models.a.nodes", "at least 1"),
        ({"a": {"path": "/a", "min_nodes": 3}}, 2, "models.a.min_nodes = 3", "lower it"),
        ({"a": {"path": "/a", "ttft_s": -1}}, 2, "models.a.ttft_s = -1", "greater"),
        ({"a": {"path": "/a", "engine": "sglang"}}, 2, "models.a.engine", "'native' or 'vllm'"),
        ({"a": {}}, 2, "models.a.path", "required"),
        ({"a b": {"path": "/a"}}, 2, "models.a b", "pattern"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(models: dict[str, Any], nodes: int, key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(models, nodes)
    assert key in str(refused.value) and remedy in str(refused.value)


def test_model_beside_models_must_mean_one_of_them() -> None:
    with pytest.raises(
        ConfigError,
        match=r"models names small, large as well; remove model and model_name, or move them to models\.NAME",
    ):
        config_of(TWO, model="/models/other")
    assert config_of(TWO, model="/models/l", model_name="large").served_model == "large"


def test_an_unknown_way_of_sharing_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"sharing = 'fair'.*'prism', 'elastic', 'static', 'swap' or 'serverless'"):
        config_of(TWO, sharing="fair")


@pytest.mark.parametrize("sharing", ["elastic", "static", "swap", "serverless"])
def test_layers_lend_their_memory_only_where_models_share_it_as_prism(sharing: str) -> None:
    remap: dict[str, Any] = {"remap": "auto"}
    with pytest.raises(ConfigError, match=rf"worker\.remap = 'auto': with sharing: {sharing} .*set worker\.remap: off"):
        load_config(None, {"sharing": sharing, "worker": remap})
    load_config(None, {"sharing": sharing})
    assert load_config(None, {"worker": remap}).worker.remap == "auto"
    models = {name: {"path": "/m", "engine": "vllm", "nodes": [n]} for n, name in enumerate("ab")}
    said = {"models": models, "nodes": {"count": 2}, "worker": remap}
    with pytest.raises(ConfigError, match=r"worker\.remap = 'auto': every model's engine is vllm.*: off"):
        load_config(None, said)
    models["a"]["engine"] = "native"
    load_config(None, said)
    with pytest.raises(ConfigError, match=r"worker\.remap = 'auto' with worker\.images_gib = 0: .*raise that"):
        load_config(None, {"worker": remap | {"images_gib": 0}})


@pytest.mark.parametrize("sharing", ["swap", "serverless"])
def test_a_model_that_stays_and_models_that_take_the_whole_device_in_turn_do_not_go_together(sharing: str) -> None:
    models = {"a": {"path": "/a"}, "b": {"path": "/b", "pinned": True}}
    with pytest.raises(ConfigError, match=rf"models\.b\.pinned: with sharing: {sharing} .*set sharing: prism"):
        load_config(None, {"models": models, "sharing": sharing})
    load_config(None, {"models": models})
    load_config(None, {"models": {"b": models["b"]}, "sharing": sharing})


def test_a_model_that_leaves_when_it_is_idle_cannot_be_kept_on_nodes() -> None:
    models = {"a": {"path": "/a"}, "b": {"path": "/b", "min_nodes": 1}}
    with pytest.raises(ConfigError, match=r"models\.b\.min_nodes: .*set sharing: prism"):
        load_config(None, {"models": models, "sharing": "serverless"})
    load_config(None, {"models": models, "sharing": "swap"})
    load_config(None, {"models": {"b": models["b"]}, "sharing": "serverless"})


def test_adapters_belong_to_one_model_each_and_are_absolute(tmp_path: Path) -> None:
    config = config_of({"a": {"path": "/a", "adapters": {"x": "some/dir", "a:y": "/y"}}, "b": {"path": "/b"}}, nodes=1)
    assert adapters_of(config) == {"x": "a", "a:y": "a"}
    assert config.models["a"].adapters["x"] == Path("some/dir").absolute()
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config))
    assert load_config(written) == config
    assert adapters_of(load_config()) == {}


@pytest.mark.parametrize(
    ("models", "match"),
    [
        ({"a": {"path": "/a", "adapters": {"b": "/x"}}, "b": {"path": "/b"}}, "adapters.b: a model has this name"),
        ({n: {"path": f"/{n}", "adapters": {"x": "/x"}} for n in "ab"}, "models.b.adapters.x: models.a has an adapter"),
        ({"a": {"path": "/a", "engine": "vllm", "adapters": {"x": "/x"}}}, "that vLLM serves cannot be asked by name"),
        ({"a": {"path": "/a", "adapters": {"no name": "/x"}}}, "adapters"),
        ({"a": {"path": "/a", "adapters": {f"x{n}": "/x" for n in range(65)}}}, "64"),
    ],
)
def test_adapters_that_cannot_be_are_named(models: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config_of(models, nodes=1)
