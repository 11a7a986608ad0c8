"""Images of weights count as memory: what `upbeat up` refuses, and what `upbeat doctor` says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli import doctor, images, machine
from cli.images import images_bytes, left_bytes
from cli.settings import BUNDLED_MODEL
from contracts.errors import ConfigError
from runtime import weight_images
from runtime.adopted_models import adopt
from runtime.config import Config
from runtime.config_file import load_config
from runtime.model_config import ADAPTER_KEY
from runtime.sections import GIB

WEIGHTS_BYTES = 6 << 20


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A configuration of two models of 6 MiB of float32 weights; shm_dir is a folder of its own."""
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
        shutil.copyfile(BUNDLED_MODEL / "config.json", tmp_path / name / "config.json")
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(WEIGHTS_BYTES)
    (tmp_path / "shm").mkdir()
    models = {name: {"path": str(tmp_path / name)} for name in ("small", "large")}

    def made(**said: Any) -> Config:
        kv = {"dram_gib": 0.001, "hbm_gib": 0.001}
        return load_config(None, {"models": models, "shm_dir": str(tmp_path / "shm"), "kv": kv} | said)

    return made


def test_images_take_the_weights_of_all_models_that_come_and_go_once_for_all_nodes(config: Any) -> None:
    both = 2 * WEIGHTS_BYTES
    for sharing, nodes, needed in (
        ("prism", 1, both),
        ("swap", 3, both),
        ("serverless", 1, both),
        ("elastic", 1, 0),
        ("static", 1, 0),
    ):
        assert images_bytes(config(sharing=sharing, nodes={"count": nodes})) == needed


def test_a_model_alone_on_its_nodes_has_no_image(config: Any, tmp_path: Path) -> None:
    apart = {name: {"path": str(tmp_path / name), "nodes": [n]} for n, name in enumerate(("small", "large"))}
    assert images_bytes(config(models=apart, nodes={"count": 2})) == 0


def test_layers_that_lend_their_memory_need_an_image_also_of_a_model_alone(config: Any, tmp_path: Path) -> None:
    remap, one = {"remap": "auto"}, {"small": {"path": str(tmp_path / "small")}}
    alone = config(models=one, worker=remap)
    assert images_bytes(alone) == WEIGHTS_BYTES and images_bytes(config(models=one)) == 0
    apart = {name: {"path": str(tmp_path / name), "nodes": [n]} for n, name in enumerate(("small", "large"))}
    assert images_bytes(config(models=apart, nodes={"count": 2}, worker=remap)) == 2 * WEIGHTS_BYTES
    apart["large"]["engine"] = "vllm"
    assert images_bytes(config(models=apart, nodes={"count": 2}, worker=remap)) == WEIGHTS_BYTES
    (finding,) = doctor._memory(config(models=one, worker=remap | {"device": "cpu"}))
    assert "images of weights" in finding.detail


def test_no_more_than_the_workers_allow_themselves(config: Any) -> None:
    assert images_bytes(config(worker={"images_gib": 0.001})) == int(0.001 * GIB)
    assert images_bytes(config(worker={"images_gib": 0})) == 0


def test_without_a_limit_half_of_what_is_free_beside_the_arenas(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda directory: 9 << 20)
    arenas = machine.shared_memory_bytes(config())[0]
    assert images_bytes(config()) == ((9 << 20) - arenas) // 2


def test_a_stack_whose_images_do_not_fit_is_refused_by_key_and_remedy(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda directory: 9 << 20)
    tight = config(worker={"images_gib": 1})
    with pytest.raises(ConfigError, match=r"worker\.images_gib = 1: images of weights .*; lower it") as refused:
        machine.check_memory(tight, images_bytes(tight), left_bytes(tight))
    assert "\n" not in str(refused.value)
    (finding,) = doctor._shared_memory(tight)
    assert finding.level == "fail" and "worker.images_gib" in finding.detail + finding.remedy
    (tight.shm_dir / f"{weight_images.PREFIX}0.image").write_bytes(
        bytes(2 * WEIGHTS_BYTES)
    )  # is opened again, or deleted
    machine.check_memory(tight, images_bytes(tight), left_bytes(tight))


def test_images_count_as_memory_of_the_machine(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(worker={"device": "cpu"})
    need, total = machine.memory_bytes(given)
    machine.check_memory(given, images_bytes(given))
    with pytest.raises(ConfigError, match=r"and worker\.images_gib \(not set\) need .*; lower them"):
        machine.check_memory(given, total)
    (finding,) = doctor._memory(given)
    assert "images of weights" in finding.detail
    available = psutil.virtual_memory()._replace(available=need + images.images_bytes(given) - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    (finding,) = doctor._memory(given)
    assert finding.level == "warn" and "worker.images_gib" in finding.remedy


def test_models_that_were_adopted_count_too(config: Any, tmp_path: Path) -> None:
    said = config(data=str(tmp_path / "data"))
    shutil.copytree(tmp_path / "small", tmp_path / "merged")
    file = tmp_path / "merged" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {ADAPTER_KEY: "0" * 64}))
    adopt(said, "small:mine", "small", tmp_path / "merged")
    assert images_bytes(said) == 3 * WEIGHTS_BYTES
