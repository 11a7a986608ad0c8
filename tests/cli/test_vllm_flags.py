"""`upbeat up --engine vllm`: which models run in vLLM, which processes that starts, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from stand_in_stack import UpbeatUp

from cli.core.plan import STOP_ORDER, joining_plan, own_cores, stack_plan
from cli.core.restart import RestartPolicy
from cli.doctor import examine
from cli.join import served_by, settings
from cli.main import app
from cli.settings import BUNDLED_MODEL, Flags, layout, resolve
from contracts.errors import ConfigError
from runtime.config_file import load_config
from runtime.registry import models_of


# ---- flags -----------------------------------------------------------------------------------------------------------
def engines(flags: Flags) -> dict[str, tuple[str, str]]:
    """(path, engine) of each model."""
    return {name: (str(m.path), m.engine) for name, m in layout(flags).models.items()}


def test_one_engine_runs_all_models_that_are_given() -> None:
    assert engines(Flags(model="/m/a", engine="vllm")) == {"upbeat-a": ("/m/a", "vllm")}
    both = {"a": "/m/a", "b": "/m/b"}
    assert engines(Flags(nodes=2, models=both, engine="vllm")) == {"a": ("/m/a", "vllm"), "b": ("/m/b", "vllm")}
    assert engines(Flags(model="/m/a", engine="native")) == {} and layout(Flags(model="/m/a")).models == {}


def test_a_hub_model_has_its_repositorys_name_and_its_revision() -> None:
    found = engines(Flags(model="Qwen/Qwen3-0.6B", revision="main", engine="vllm"))
    assert found == {"Qwen/Qwen3-0.6B": ("Qwen/Qwen3-0.6B@main", "vllm")}


def test_without_a_model_vllm_runs_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert engines(Flags(engine="vllm")) == {"upbeat-demo": (str(BUNDLED_MODEL), "vllm")}


def test_the_file_says_which_models_of_several_run_in_vllm(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("models: {a: {path: /m/a, engine: vllm, nodes: [1], vllm_args: [--seed, '1']}, b: {path: /m/b}}\n")
    with pytest.raises(ConfigError, match="node 1 serves a and b"):
        layout(Flags(config=file))
    file.write_text("models: {a: {path: /m/a, engine: vllm}, b: {path: /m/b}}\n")
    config = layout(Flags(config=file))
    assert [models_of(config, n) for n in range(2)] == [["a"], ["b"]], "as many models as nodes have one each"
    assert {name: m.engine for name, m in config.models.items()} == {"a": "vllm", "b": "native"}
    assert {name: m.engine for name, m in layout(Flags(config=file, engine="native")).models.items()} == {
        "a": "native",
        "b": "native",
    }


def test_arguments_are_split_as_a_shell_does_and_follow_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("vllm: {args: [--seed, '1']}\n")
    said = layout(Flags(config=file, model="/m/a", engine="vllm", vllm_args="--chat-template 'my file' -O0"))
    assert said.vllm.args == ["--seed", "1", "--chat-template", "my file", "-O0"]


def test_a_directory_for_vllm_need_not_be_one_of_ours(tmp_path: Path) -> None:
    places = {"data": tmp_path / "d", "run_dir": tmp_path / "r"}
    strange = tmp_path / "strange"
    strange.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(Flags(models={"m": str(strange)}, engine="vllm", **places))
    (strange / "config.json").write_text('{"architectures": ["SomethingNew"], "quantization_config": {"bits": 4}}')
    assert resolve(Flags(models={"m": str(strange)}, engine="vllm", **places)).models["m"].path == strange
    with pytest.raises(ConfigError, match="no such directory"):
        resolve(Flags(models={"m": "/nowhere"}, engine="vllm", **places))
    hub = resolve(Flags(models={"m": "owner/name@main"}, engine="vllm", **places))
    assert str(hub.models["m"].path) == "owner/name@main", "vLLM downloads it"


def test_weights_that_leave_no_room_for_kv_are_refused_on_a_cpu(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "given.yaml"
    model.mkdir()
    file.write_text("worker: {device: cpu}\n")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(2 << 20))
    places = {"data": tmp_path / "d", "run_dir": tmp_path / "r", "config": file}
    with pytest.raises(ConfigError, match="--hbm-gib"):
        resolve(Flags(models={"m": str(model)}, engine="vllm", hbm_gib=0.001, **places))
    file.write_text("worker: {device: cuda}\n")
    assert resolve(Flags(models={"m": str(model)}, engine="vllm", hbm_gib=0.001, **places)).kv.hbm_gib == 0.001


# ---- the plan --------------------------------------------------------------------------------------------------------
def test_a_node_in_vllm_has_a_server_and_a_sidecar_instead_of_a_worker() -> None:
    assert [p.name for p in stack_plan(2, vllm=[1])] == [
        "scheduler",
        "kvstore-0",
        "kvstore-1",
        "worker-0",
        "vllm-server-1",
        "sidecar-1",
        "gateway",
    ]
    both = [p for p in stack_plan(1, devices=2, vllm=[0]) if p.device == 1]
    assert [(p.name, p.program) for p in both] == [
        ("vllm-server-0-1", "upbeat-vllm-server"),
        ("sidecar-0-1", "upbeat-sidecar"),
    ]
    elsewhere = {p.program for p in stack_plan(1, vllm=[0], servers=False)}
    assert "upbeat-vllm-server" not in elsewhere and "upbeat-sidecar" in elsewhere


def test_a_joining_node_has_a_sidecar_and_its_store() -> None:
    assert [p.name for p in joining_plan(2, store=True)] == ["kvstore-2", "sidecar-2"]
    assert [p.name for p in joining_plan(2, store=False)] == ["sidecar-2"]


def test_a_sidecar_stops_before_its_server_and_that_before_the_store() -> None:
    order = [program for program, _ in STOP_ORDER]
    assert order.index("upbeat-gateway") < order.index("upbeat-sidecar") < order.index("upbeat-vllm-server")
    assert order.index("upbeat-vllm-server") < order.index("upbeat-kvstore")
    assert {p.program for p in stack_plan(2, vllm=[1])} == set(order)


def test_servers_on_one_machine_share_its_cores() -> None:
    cores = [0, 1, 2, 5, 6, 7]
    assert [own_cores(cores, n, 3) for n in range(3)] == [[0, 1], [2, 5], [6, 7]]
    assert [own_cores([0, 4], n, 3) for n in range(3)] == [[0], [4], [0]], "fewer cores than servers"


def test_a_server_that_fails_late_and_always_alike_is_given_up() -> None:
    policy = RestartPolicy(at_once_s=600.0)
    verdicts = [policy.exited(alive_s=40.0, status=1, last_line="no room", has_served=False) for _ in range(5)]
    assert [v.delay_s is None for v in verdicts] == [False] * 4 + [True]
    assert RestartPolicy(600.0).exited(alive_s=40.0, status=2, last_line="", has_served=False).delay_s is None


# ---- the launcher ----------------------------------------------------------------------------------------------------
@pytest.fixture
def environment(up: UpbeatUp) -> Path:
    """An interpreter that is there."""
    python = up.directory / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return python


def test_the_launcher_starts_servers_and_stops_them_after_their_sidecars(up: UpbeatUp, environment: Path) -> None:
    launcher = up.serving({"UPBEAT__VLLM__PYTHON": str(environment)}, nodes=2, engine="vllm", vllm_args="--seed 1")
    names = {"gateway", "scheduler", "kvstore-0", "kvstore-1"}
    assert set(up.pids()) == names | {f"{kind}-{n}" for kind in ("vllm-server", "sidecar") for n in range(2)}
    assert "started upbeat-vllm-server of node-1 (pid" in up.said()
    written = load_config(up.run_dir / "config.yaml")
    assert written.vllm.args == ["--seed", "1"] and written.models["upbeat-model"].engine == "vllm"
    up.until(lambda: {"vllm-server-0", "vllm-server-1"} <= set(up.events("serving")), "the servers are there")
    noted = {str(entry["name"]): entry for entry in up.journal()}
    cores = sorted(os.sched_getaffinity(0))
    for n in range(2):
        assert noted[f"vllm-server-{n}"]["bind"] == ",".join(map(str, own_cores(cores, n, 2)))
        assert noted[f"sidecar-{n}"]["omp"] == "1"
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 0
    ends = up.events("drained")
    places = {kind: [i for i, name in enumerate(ends) if name.startswith(kind)] for kind in ("sidecar", "vllm", "kv")}
    assert max(places["sidecar"]) < min(places["vllm"]) and max(places["vllm"]) < min(places["kv"])


def test_a_killed_server_is_started_again(up: UpbeatUp, environment: Path) -> None:
    up.serving({"UPBEAT__VLLM__PYTHON": str(environment)}, engine="vllm")
    before = up.pids()["vllm-server-0"]
    os.kill(before, signal.SIGKILL)
    up.until(lambda: up.pids().get("vllm-server-0", before) != before, "it is started again")
    assert "vllm-server-0 (pid" in up.said() and "was killed by SIGKILL" in up.said()


def test_a_lone_server_binds_its_threads_as_vllm_likes(up: UpbeatUp, environment: Path) -> None:
    up.serving({"UPBEAT__VLLM__PYTHON": str(environment)}, engine="vllm")
    up.until(lambda: "vllm-server-0" in up.events("serving"), "the server is there")
    (noted,) = [entry for entry in up.journal() if entry["name"] == "vllm-server-0"]
    assert noted["bind"] is None and noted["omp"] == os.environ.get("OMP_NUM_THREADS")


@pytest.fixture
def refused(up: UpbeatUp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which the program refuses."""

    def run(**changes: object) -> str:
        monkeypatch.chdir(up.directory)
        monkeypatch.setattr(sys, "argv", ["upbeat", *up.flags(**changes)])
        with pytest.raises(SystemExit) as ended:
            app()
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert not up.journal(), "nothing was started"
        return line

    return run


def test_a_missing_environment_says_make_vllm(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT__VLLM__PYTHON", "/nowhere/python")
    line = refused(engine="vllm")
    assert "make vllm" in line and "vllm.python = '/nowhere/python'" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "sglang"}, ["--engine sglang", "native or vllm"]),
        ({"engine": "vllm", "vllm_args": "--uds /x"}, ["--uds", "run_dir"]),
        ({"engine": "vllm", "vllm_args": "'"}, ["--vllm-args", "quot"]),
        ({"vllm_args": "--seed 1"}, ["--vllm-args --seed 1", "--engine vllm"]),
    ],
)
def test_wrong_flags(refused: Callable[..., str], changes: dict[str, str], words: list[str]) -> None:
    line = refused(**changes)
    assert all(word in line for word in words), line


def test_several_models_on_one_node_are_refused(up: UpbeatUp, refused: Callable[..., str]) -> None:
    line = refused(engine="vllm", model=[f"a={up.model}", f"b={up.model}"])
    assert "node 0 serves a and b" in line and "models.a.nodes" in line


def test_a_run_dir_too_deep_for_sockets_is_refused(up: UpbeatUp, environment: Path, refused: Callable[..., str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("UPBEAT__VLLM__PYTHON", str(environment))
    assert "--run-dir" in refused(engine="vllm", run_dir=up.directory / ("d" * 100))


def test_profiles_are_of_our_own_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                        tmp_path: Path) -> None:  # fmt: skip
    file = tmp_path / "given.yaml"
    file.write_text(f"models: {{m: {{path: {BUNDLED_MODEL}, engine: vllm}}}}\n")
    monkeypatch.setattr(sys, "argv", ["upbeat", "profile", "--config", str(file), "--data", str(tmp_path / "d")])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 2 and "runs in vLLM" in capsys.readouterr().err


def test_doctor_looks_at_vllms_environment(tmp_path: Path, environment: Path) -> None:
    file = tmp_path / "given.yaml"
    for python, level in ((environment, "ok"), (Path("/nowhere/python"), "fail")):
        file.write_text(f"worker: {{kernels: torch}}\nvllm: {{python: {python}}}\n")
        flags = Flags(models={"m": str(BUNDLED_MODEL)}, engine="vllm", data=tmp_path, config=file)
        found = {f.check: f for f in examine(layout(flags))}
        assert (found["model"].level, found["vllm"].level) == ("ok", level)
        assert "weights" not in found
    assert "make vllm" in found["vllm"].remedy


# ---- join ------------------------------------------------------------------------------------------------------------
class Server(BaseHTTPRequestHandler):
    """GET /v1/models of a vLLM server, for those who have its key."""

    answer: ClassVar[Any] = {"data": [{"id": "theirs", "root": "/models/theirs"}, {"id": "other"}]}

    def do_GET(self) -> None:
        good = self.headers.get("authorization") == "Bearer sesame" and self.path == "/v1/models"
        body = json.dumps(self.answer if good else {}).encode()
        self.send_response(200 if good else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_says_which_model_joins(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served_by(url, "sesame") == ("theirs", "/models/theirs")
    monkeypatch.setenv("THEIR_KEY", "sesame")
    monkeypatch.setenv("UPBEAT__TLS__DIRECTORY", "/certs")
    config = settings(layout(Flags(schedulers=["a:1", "b:2"])), f"{url}/", None, "THEIR_KEY")
    assert config.scheduler_addresses == ("a:1", "b:2") and config.served_model == "theirs"
    assert (config.vllm.server, config.vllm.api_key_env) == (url, "THEIR_KEY")
    assert config.models["theirs"].engine == "vllm" and str(config.models["theirs"].path) == "/models/theirs"


def test_a_model_that_is_named_need_not_be_asked_for_and_keeps_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text("models: {m: {path: /m, nodes: [0], ttft_s: 0.5}, n: {path: /n, nodes: [1]}}\n")
    config = settings(load_config(file), "http://127.0.0.1:1", "m", "")
    (model,) = config.models.values()
    assert (model.engine, model.ttft_s, model.nodes, str(model.path)) == ("vllm", 0.5, None, "/m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": ""}, ["answered 401", "--api-key-env"]),
        ({"url": "http://127.0.0.1:1"}, ["cannot be asked", "start the server"]),
        ({"answer": {"data": []}}, ["names no model"]),
        ({"answer": [1]}, ["names no model"]),
    ],
)
def test_a_server_that_cannot_join_says_why(
    url: str, change: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "answer", change.get("answer", Server.answer))
    with pytest.raises(ConfigError) as refused:
        served_by(change.get("url", url), change.get("key", "sesame"))
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--vllm", "127.0.0.1:8000"], ["vllm.server"]),
        (["--vllm", "https://127.0.0.1:8000"], ["vllm.server"]),
        (["--vllm", "http://127.0.0.1:1", "--scheduler", "nowhere"], ["scheduler.addresses", "host:port"]),
        (["--vllm", "http://127.0.0.1:1", "--api-key-env", "NOT_SET_AT_ALL"], ["--api-key-env NOT_SET_AT_ALL"]),
        (["--vllm", "http://127.0.0.1:1", "--model", "m"], ["has no file `secret`"]),
        (["--vllm", "http://127.0.0.1:1", "--node", "-1"], ["--node -1"]),
        (["--vllm", "http://127.0.0.1:1", "--host", "x"], ["--host x", "leave out --vllm"]),
        (["--no-store"], ["--vllm"]),
        (["--node", "1000"], ["--node 1000"]),
        ([], ["has no file `secret`"]),
    ],
)
def test_what_join_refuses(
    flags: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["upbeat", "join", *flags])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line


def test_a_joining_servers_store_is_that_of_join_with_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["upbeat", "vllm-config", "--port", "18080", "--nodes", "2", "--node", "1", "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        app()
    assert not ended.value.code
    store = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]["store"]
    assert store == layout(Flags(nodes=2, port=18080)).node(1).store_address
