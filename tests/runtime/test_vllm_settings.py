"""vLLM servers in the configuration: what is refused, where a server keeps its sockets, what its connector is told."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import dump_config, load_config
from runtime.vllm_checks import model_of, vllm_models, vllm_nodes
from runtime.vllm_places import make_private, missing_python, server_url, vllm_places
from runtime.vllm_transfer import transfer_config

ONE: dict[str, Any] = {"models": {"m": {"path": "/models/m", "engine": "vllm"}}}


def of(**more: Any) -> Config:
    return load_config(None, ONE | more)


def mixed(a: list[int], b: list[int], count: int = 2) -> Config:
    models = {"a": {"path": "/a", "engine": "vllm", "nodes": a}, "b": {"path": "/b", "nodes": b}}
    return load_config(None, {"models": models, "nodes": {"count": count}})


def test_a_fleet_mixes_native_and_vllm_nodes_by_model() -> None:
    config = mixed([1], [0])
    assert vllm_models(config) == ["a"] and vllm_nodes(config) == [1] and model_of(config, 1) == "a"
    with pytest.raises(ConfigError, match="--node 0"):
        model_of(config, 0)
    assert vllm_nodes(load_config(None)) == [] and vllm_nodes(of(nodes={"count": 3})) == [0, 1, 2]


@pytest.mark.parametrize("engines", [("vllm", "native"), ("vllm", "vllm")])
def test_a_model_in_vllm_has_its_node_for_itself(engines: tuple[str, str]) -> None:
    models = {name: {"path": f"/{name}", "engine": engine} for name, engine in zip("ab", engines, strict=True)}
    with pytest.raises(ConfigError, match=r"node 0 serves a and b.*models\.a\.nodes: \[0\] and models\.b\.nodes"):
        load_config(None, {"models": models, "nodes": {"count": 1}})


@pytest.mark.parametrize("key", ["ssd_codec", "blob_codec"])
@pytest.mark.parametrize("codec", ["fp8", "k16v8", "cachegen"])
def test_a_codec_that_knows_only_our_layout_is_refused_by_name(key: str, codec: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv\.{key} = '{codec}'.*m has them.*set kv\.{key}: raw"):
        of(kv={key: codec})
    native = load_config(None, {"kv": {key: codec}})
    with pytest.raises(ConfigError, match=rf"kv\.{key}"):
        transfer_config(native, 0, 0, Path("/w"))
    assert of(kv={key: codec, "cache": False}).kv.cache is False, "without a cache nothing is encoded"


def test_a_chunk_must_be_a_block_of_vllms() -> None:
    with pytest.raises(ConfigError, match=r"kv\.chunk_tokens = 20"):
        of(kv={"chunk_tokens": 20})
    assert of(kv={"chunk_tokens": 32}).kv.chunk_tokens == 32
    assert load_config(None, {"kv": {"chunk_tokens": 20}}).kv.chunk_tokens == 20, "our own engine takes any"


@pytest.mark.parametrize(
    "argument", ["--uds", "--uds=/x", "--api-key=k", "--api_key", "--served_model_name=x", "--block-size", "--port"]
)
def test_arguments_that_the_sidecar_relies_on_are_refused_by_name(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.args .*remove it"):
        of(vllm={"args": ["--seed", "1", argument]})
    models = {"m": {"path": "/m", "engine": "vllm", "vllm_args": [argument]}}
    with pytest.raises(ConfigError, match=r"models\.m\.vllm_args .*remove it"):
        load_config(None, {"models": models})


def test_arguments_of_a_model_that_is_not_in_vllm_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.vllm_args .*set models\.m\.engine: vllm"):
        load_config(None, {"models": {"m": {"path": "/m", "vllm_args": ["--seed", "1"]}}})


@pytest.mark.parametrize(
    "value", ["https://a:1", "http://a:1/v1", "a:1", "http://user@a:1", "http://a:1?x=y", "http://a b:1"]
)
def test_the_url_of_a_server_elsewhere_has_a_host_and_a_port_only(value: str) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.server"):
        of(vllm={"server": value})


def test_each_device_may_have_its_server_elsewhere() -> None:
    config = of(vllm={"server": "http://vllm-{n}-{d}:8000"})
    assert server_url(config, 1, 2) == "http://vllm-1-2:8000" and server_url(of(), 0, 0) == ""


def test_the_default_interpreter_is_the_checkouts() -> None:
    assert load_config(None).vllm.python == Path(__file__).parents[2] / ".cache" / "vllm" / "bin" / "python"
    assert "make vllm" in missing_python(Path("/x")) and "vllm.python" in missing_python(Path("/x"))


def test_the_section_survives_being_written(tmp_path: Path) -> None:
    config = of(vllm={"python": "/env/python", "args": ["--seed", "1"], "start_s": 60})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file).vllm == config.vllm and load_config(file).models == config.models


# ---- places ----------------------------------------------------------------------------------------------------------
def test_each_device_has_a_directory_for_itself(tmp_path: Path) -> None:
    one = vllm_places(of(run_dir=str(tmp_path)), 3)
    two = vllm_places(of(run_dir=str(tmp_path), nodes={"devices": 2}), 3, 1)
    assert one.directory == tmp_path / "vllm-3" and two.directory == tmp_path / "vllm-3-1"
    assert {one.socket.parent, one.key.parent, one.wake.parent, one.record.parent} == {one.directory}


def test_a_directory_too_deep_for_sockets_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"run_dir = .*characters too long.*--run-dir"):
        vllm_places(of(run_dir="/" + "d" * 100), 0)


def test_a_private_directory_keeps_other_users_out(tmp_path: Path) -> None:
    place = make_private(tmp_path / "deep" / "vllm-0")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(0o777)
    assert stat.S_IMODE(make_private(place).stat().st_mode) == 0o700
    link = tmp_path / "link"
    link.symlink_to(place)
    with pytest.raises(ConfigError, match="not a directory of this user"):
        make_private(link)
    if os.geteuid() == 0:
        os.chown(place, 12345, 12345)
        with pytest.raises(ConfigError, match="not a directory of this user"):
            make_private(place)


# ---- the connector ---------------------------------------------------------------------------------------------------
def test_the_connector_is_told_its_store_and_where_the_sidecar_hears(tmp_path: Path) -> None:
    config = of(data=str(tmp_path / "data"), run_dir=str(tmp_path / "run"))
    told = transfer_config(config, 0, 0, vllm_places(config, 0).wake)
    json.dumps(told)
    assert told["kv_load_failure_policy"] == "recompute"
    assert told["kv_connector_extra_config"] == {
        "store": config.node(0).store_address,
        "secret": str(tmp_path / "data" / "secret"),
        "device": 0,
        "wake": str(tmp_path / "run" / "vllm-0" / "wake.sock"),
        "warm_up": True,
    }
    with pytest.raises(ConfigError, match="--node 9"):
        transfer_config(config, 9, 0, Path("/w"))
