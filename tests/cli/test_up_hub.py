"""`upbeat up --model owner/name`: from a hub server on loopback to a stack that serves it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from stand_in_stack import UpbeatUp

from cli.settings import BUNDLED_MODEL, Flags, resolve
from contracts.errors import ConfigError
from loadtest.random_model import SHAPES, make_random_model
from runtime.config_file import load_config
from tests.runtime.hub_server import HubServer, files_of, in_shards

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    made = HubServer()
    yield made
    made.close()


@pytest.fixture
def home(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody with this hub and an empty cache."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}


@pytest.fixture
def demo() -> dict[str, bytes]:
    """The bundled model's files and `result.json`, which no download takes; without what trained it."""
    return {
        name: content for name, content in files_of(BUNDLED_MODEL).items() if name.endswith((".json", ".safetensors"))
    }


def test_a_hub_id_is_downloaded_and_names_the_model(
    up: UpbeatUp, hub: HubServer, home: dict[str, str], demo: dict[str, bytes]
) -> None:
    commit = hub.add("acme/demo", demo, revision="v1")
    up.serving(home, model="acme/demo", revision="v1")
    written = load_config(up.run_dir / "config.yaml")
    assert written.model.name == commit and files_of(written.model).keys() == (demo.keys() - {"result.json"})
    assert written.served_model == "acme/demo"
    assert "downloading acme/demo@v1" in up.said()


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        ("acme/other", {}, "MixtralForCausalLM"),
        ("acme/none", {}, "no such model"),
        ("acme/other", {"revision": "v9"}, "no such revision"),
        ("./acme/other", {}, "no such directory"),
        ("./acme/other", {"revision": "v9"}, "leave --revision out"),
    ],
)
def test_what_is_refused_is_refused_before_anything_starts(
    up: UpbeatUp,
    hub: HubServer,
    home: dict[str, str],
    demo: dict[str, bytes],
    model: str,
    changes: dict[str, str],
    named: str,
) -> None:
    config = json.loads(demo["config.json"]) | {"architectures": ["MixtralForCausalLM"]}
    hub.add("acme/other", demo | {"config.json": json.dumps(config).encode()})
    launcher = up.start(home, model=model, **changes)
    assert launcher.wait(timeout=60) == 2
    [line] = up.said().strip().splitlines()
    assert line.startswith("upbeat: ") and named in line and model.removeprefix("./") in line
    assert not up.journal()


def test_a_local_model_of_a_kind_that_is_not_served_is_refused_too(up: UpbeatUp) -> None:
    config = json.loads((up.model / "config.json").read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    (up.model / "config.json").write_text(json.dumps(config))
    launcher = up.start()
    assert launcher.wait(timeout=60) == 2
    assert "hqq" in up.said() and "--engine vllm" in up.said() and not up.journal()


def test_weights_get_the_memory_that_they_need_unless_somebody_said_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_random_model(tmp_path / "model", SHAPES["tiny"][0], 1, "float32")
    assert resolve(Flags(model="model")).kv.hbm_gib == 1
    os.truncate(model / "model.safetensors", 3 << 30)
    assert resolve(Flags(model="model")).kv.hbm_gib == 4
    assert resolve(Flags(model="model", hbm_gib=3.5)).kv.hbm_gib == 3.5
    with pytest.raises(ConfigError, match=r"--hbm-gib 2: the weights of .*model alone need 3\.00 GiB.*--hbm-gib 4"):
        resolve(Flags(model="model", hbm_gib=2))
    monkeypatch.setenv("UPBEAT__WORKER__DTYPE", "bfloat16")
    assert resolve(Flags(model="model")).kv.hbm_gib == 3


def test_the_doctor_looks_a_hub_id_up_and_downloads_no_weights(
    hub: HubServer, home: dict[str, str], demo: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("acme/demo", demo)

    def model_said(name: str) -> dict[str, str]:
        command = [sys.executable, "-c", "from cli.main import app; app()", "doctor", "--json", "--model", name]
        environment = os.environ | home | {"PYTHONPATH": str(ROOT), "UPBEAT__WORKER__KERNELS": "torch"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment, check=False
        )
        assert done.stdout, done.stderr
        return next(found for found in json.loads(done.stdout)["findings"] if found["check"] == "model")

    said = model_said("acme/demo")
    assert said["level"] == "ok" and "0.01 GiB of its weights are not here yet" in said["detail"]
    assert not hub.asked("/store/")
    said = model_said("acme/none")
    assert (
        said["level"] == "fail"
        and "no such model" in said["detail"]
        and "hf auth login" in said["detail"] + said["remedy"]
    )


@pytest.mark.stack
def test_a_stack_serves_a_model_from_a_hub(
    hub: HubServer, home: dict[str, str], demo: dict[str, bytes], tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    hub.add("acme/demo", in_shards(demo))
    port = free_ports(50)
    command = [
        sys.executable,
        "-c",
        "from cli.main import app; app()",
        "up",
        "--model",
        "acme/demo",
        "--nodes",
        "1",
        "--port",
        str(port),
    ]
    command += ["--hbm-gib", "0.2", "--dram-gib", "0.1", "--data", "data", "--run-dir", "run", "--json"]
    environment = os.environ | home | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, start_new_session=True
    )
    try:
        assert launcher.stdout is not None
        serving = next(said for line in launcher.stdout if (said := json.loads(line))["event"] == "serving")
        assert serving["model"] == "acme/demo"
        question = [{"role": "user", "content": "My name is Ada. What is my name?"}]
        url = f"http://127.0.0.1:{port}/v1"
        answer = httpx.post(
            f"{url}/chat/completions",
            json={"model": "acme/demo", "messages": question, "temperature": 0, "max_tokens": 12},
            timeout=60,
        ).json()
        assert answer["usage"]["completion_tokens"] > 0 and answer["choices"][0]["message"]["content"].strip(), answer
        assert httpx.get(f"{url}/models/acme/demo", timeout=60).json()["id"] == "acme/demo"
    finally:
        os.killpg(launcher.pid, signal.SIGINT)
        launcher.wait(timeout=60)
