"""compose.yaml says only what the programs understand: flags, settings, addresses, volumes, health checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from cli.core.plan import stack_plan
from contracts import identity
from contracts.errors import ConfigError
from runtime.config import Config
from runtime.config_file import load_config
from runtime.registry import models_of
from runtime.vllm_checks import vllm_nodes
from scheduler.metrics import metrics_port

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
#: The stack, and what the profiles `vllm` and `gpu` add.
IDENTITIES = ("gateway", "scheduler", "operator", *(f"node-{n}" for n in range(4)))
EVERY = {name: service for name, service in COMPOSE["services"].items() if name != "certs"}
SERVICES = {name: service for name, service in EVERY.items() if "profiles" not in service}
OF_VLLM = {name: service for name, service in EVERY.items() if service.get("profiles") == ["vllm"]}
OF_GPU = {name: service for name, service in EVERY.items() if service.get("profiles") == ["gpu"]}
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
IMAGE_SETTINGS = dict(re.findall(r"\b(UPBEAT__\w+)=(\S+)", DOCKERFILE))


def environment(service: str, key: str = "a-key-for-tests") -> dict[str, str]:
    """What the container sees; for the gateway with its secret's key too."""
    said = IMAGE_SETTINGS | EVERY[service]["environment"]
    if "secrets" in EVERY[service]:
        said["UPBEAT__GATEWAY__API_KEYS"] = json.dumps([{"key": key}])
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in said.items()}


def config_of(service: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in [name for name in os.environ if name.startswith("UPBEAT__")]:
        monkeypatch.delenv(name)
    for name, value in environment(service).items():
        monkeypatch.setenv(name, value)
    return load_config()


STACK = stack_plan(2)
NODE_OF_VLLM = [planned for planned in stack_plan(3, vllm=[2]) if planned.node == 2]
NODE_OF_GPU = [planned for planned in stack_plan(4) if planned.node == 3]


def test_it_is_the_stack_that_the_launcher_starts() -> None:
    assert set(SERVICES) == {planned.name for planned in STACK}
    assert set(OF_VLLM) == {planned.name for planned in NODE_OF_VLLM}
    assert set(OF_GPU) == {planned.name for planned in NODE_OF_GPU}
    assert len(EVERY) == len(SERVICES) + len(OF_VLLM) + len(OF_GPU)


@pytest.mark.parametrize("planned", [*STACK, *NODE_OF_VLLM, *NODE_OF_GPU], ids=lambda planned: planned.name)
def test_every_command_is_a_program_with_its_own_flags(planned: Any) -> None:
    program, *flags = EVERY[planned.name]["command"]
    assert program == planned.program
    node = [] if planned.node is None else ["--node", str(planned.node)]
    secret = ["--secrets", "/run/secrets/gateway.yaml"] if planned.name == "gateway" else []
    assert flags == node + secret
    help_text = subprocess.run(
        [str(Path(sys.executable).with_name(program)), "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for flag in ["--config", *flags[::2]]:
        assert flag in help_text


@pytest.mark.parametrize("service", EVERY)
def test_every_setting_is_one_that_exists_and_is_valid(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in environment(service) if name.startswith("UPBEAT__")]
    assert names
    for name in names:
        model: type[BaseModel] = Config
        for part in name.removeprefix("UPBEAT__").lower().split("__"):
            assert part in model.model_fields, f"{service}: {name} is no setting"
            inner = model.model_fields[part].annotation
            model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else model
    config_of(service, monkeypatch)


def test_services_agree_on_every_setting() -> None:
    gateways = {"UPBEAT__GATEWAY__HOST", "UPBEAT__GATEWAY__API_KEYS"}
    first = {name: value for name, value in environment("gateway").items() if name not in gateways}
    assert environment("gateway").keys() - first.keys() == gateways
    others = SERVICES.keys() - {"gateway"}
    assert all(environment(service) == first for service in others), "and none has the key"
    node = environment("sidecar-2")
    assert all(environment(service) == node for service in OF_VLLM)
    own = {"MODEL", "MODELS", "NODES__COUNT", "NODES__WORKER_HOST", "KV__HBM_GIB", "RUN_DIR"}
    assert {name for name in first.keys() | node.keys() if first.get(name) != node.get(name)} == {
        f"UPBEAT__{name}" for name in own
    }


def test_a_node_of_vllm_is_one_more_with_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, node = config_of("gateway", monkeypatch), config_of("sidecar-2", monkeypatch)
    assert vllm_nodes(node) == [2] and fleet.nodes.count == 2
    assert fleet.scheduler_addresses == node.scheduler_addresses and fleet.data == node.data
    places = node.node(2)
    assert (places.store_address, places.devices[0].worker_address) == ("kvstore-2:8120", "sidecar-2:8121")
    for service, address in (("kvstore-2", places.store_listen), ("sidecar-2", places.devices[0].worker_listen)):
        asked = f"grpc://127.0.0.1:{port_of(address)}"
        assert EVERY[service]["healthcheck"]["test"] == ["CMD", "upbeat", "probe", asked, "node-2"]
    mounts = {name: dict(m.split(":")[:2] for m in service["volumes"]) for name, service in OF_VLLM.items()}
    assert all(mount["data"] == str(node.data) for mount in mounts.values())
    assert mounts["kvstore-2"]["node-2-arena"] == mounts["vllm-server-2"]["node-2-arena"] == str(node.shm_dir)
    assert mounts["vllm-server-2"]["node-2-run"] == mounts["sidecar-2"]["node-2-run"] == str(node.run_dir)


def test_a_node_with_a_gpu_is_one_more_with_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment("worker-3") == environment("kvstore-3")
    fleet, node = config_of("gateway", monkeypatch), config_of("worker-3", monkeypatch)
    assert fleet.scheduler_addresses == node.scheduler_addresses and fleet.data == node.data
    assert list(models_of(node, 3)) == ["gpu"] and node.worker.device == "cuda" and fleet.nodes.count == 2
    places = node.node(3)
    assert (places.store_address, places.devices[0].worker_address) == ("kvstore-3:8130", "worker-3:8131")
    for service, address in (("kvstore-3", places.store_listen), ("worker-3", places.devices[0].worker_listen)):
        asked = f"grpc://127.0.0.1:{port_of(address)}"
        assert EVERY[service]["healthcheck"]["test"] == ["CMD", "upbeat", "probe", asked, "node-3"]
    mounts = [
        dict(m.rsplit(":", 2)[:2] if m.endswith(":ro") else m.split(":") for m in EVERY[name]["volumes"])
        for name in OF_GPU
    ]
    assert all(each["node-3-arena"] == str(node.shm_dir) and each["data"] == str(node.data) for each in mounts)
    assert mounts[1]["${UPBEAT_MODELS:-./models}"] == "/models" and str(node.models["gpu"].path) == "/models/demo"
    (device,) = EVERY["worker-3"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert [name for name, service in EVERY.items() if "deploy" in service] == ["worker-3"], "nobody else has a GPU"


def test_without_a_key_the_gateway_refuses_to_listen_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("gateway").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UPBEAT__GATEWAY__API_KEYS", "[]")
    with pytest.raises(ConfigError, match=r"gateway\.api_keys"):
        load_config()


def test_keys_are_a_file_for_the_gateway_alone() -> None:
    assert {name for name, service in EVERY.items() if "secrets" in service} == {"gateway"}
    (name,) = SERVICES["gateway"]["secrets"]
    assert f"/run/secrets/{name}" in SERVICES["gateway"]["command"] and "file" in COMPOSE["secrets"][name]
    assert not any(re.search(r"KEY|SECRET|TOKEN", name) for each in EVERY.values() for name in each["environment"])


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_a_container_can_do_no_more_than_its_service(service: str) -> None:
    said = COMPOSE["services"][service]
    assert said["read_only"] is True and said["cap_drop"] == ["ALL"] and "cap_add" not in said
    assert said["security_opt"] == ["no-new-privileges:true"] and said["user"] == "10001:10001"
    assert said["mem_limit"] and said["pids_limit"] and said["cpus"], "limits"
    inside = ["inside"]
    assert said["networks"] == (inside if service not in ("gateway", "vllm-server-2") else [*inside, "outside"])
    assert COMPOSE["networks"]["inside"] == {"internal": True}


def test_the_base_image_is_named_by_digest_everywhere_alike() -> None:
    (base,) = re.findall(r"^ARG BASE=(.*)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base), "a tag may name another image tomorrow"
    for service in COMPOSE["services"].values():
        assert service["build"]["args"]["BASE"] == f"${{UPBEAT_BASE_IMAGE:-{base}}}"
    stages = set(re.findall(r" AS (\w+)", DOCKERFILE))
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) <= {"${BASE}", *stages}


def test_addresses_are_the_services_names(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gateway", monkeypatch)
    assert config.scheduler_addresses[0].partition(":")[0] in SERVICES
    for n in range(config.nodes.count):
        places = config.node(n)
        assert places.store_address.partition(":")[0] in SERVICES
        assert places.devices[0].worker_address.partition(":")[0] in SERVICES
        assert places.store_listen.startswith("0.0.0.0:")


def test_health_checks_ask_the_port_that_each_service_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gateway", monkeypatch)
    expected = {
        "gateway": f"http://127.0.0.1:{config.gateway.port}",
        "scheduler": f"grpc://{config.scheduler_addresses[0]}",
    }
    for n in range(config.nodes.count):
        places = config.node(n)
        expected[f"kvstore-{n}"] = f"grpc://127.0.0.1:{places.store_listen.rpartition(':')[2]}"
        expected[f"worker-{n}"] = f"grpc://127.0.0.1:{places.devices[0].worker_listen.rpartition(':')[2]}"
    for service, address in expected.items():
        who = [] if service == "gateway" else [f"node-{service[-1]}" if service[-1].isdigit() else service]
        assert SERVICES[service]["healthcheck"]["test"] == ["CMD", "upbeat", "probe", address, *who]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_prometheus_scrapes_every_service_at_the_port_where_it_shows_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gateway", monkeypatch)
    expected = {"gateway": config.gateway.port, "scheduler": metrics_port(config, port_of(config.scheduler_listen(0)))}
    for n in range(config.nodes.count):
        places = config.node(n)
        expected[f"worker-{n}"] = places.devices[0].metrics_port
        expected[f"kvstore-{n}"] = places.store_metrics_port
    assert set(expected) == set(SERVICES)
    scraped = {}
    for job in yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]:
        for group in job["static_configs"]:
            (target,) = group["targets"]
            name, _, port = target.partition(":")
            scraped[name] = int(port)
            program, _, number = name.partition("-")
            assert group["labels"] == {"service": program} | ({"node": f"node-{number}"} if number else {}), target
            if name != "gateway":
                who = identity.node(f"node-{number}") if number else identity.SCHEDULER
                assert job["scheme"] == "https" and job["tls_config"]["server_name"] == who.dns
                assert str(config.tls.directory / "operator") == str(Path(job["tls_config"]["key_file"]).parent)
    assert scraped == expected


def test_metrics_are_shown_where_prometheus_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gateway", monkeypatch)
    reachable = {"0.0.0.0", "scheduler"}
    listening = [config.gateway.host, config.scheduler_listen(0).rpartition(":")[0]]
    listening += [
        address.rpartition(":")[0]
        for n in range(2)
        for address in (config.device(n, 0).worker_listen, config.node(n).store_listen)
    ]
    assert set(listening) <= reachable, "never loopback: Prometheus runs in a container of its own"


def test_a_node_shares_one_arena_and_everybody_who_stores_shares_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("gateway", monkeypatch)
    for n in range(config.nodes.count):
        for kind in ("kvstore", "worker"):
            mounts = dict(mount.split(":")[:2] for mount in SERVICES[f"{kind}-{n}"]["volumes"])
            certs = str(config.tls.directory)
            assert mounts == {
                "data": str(config.data),
                f"node-{n}-certs": certs,
                f"node-{n}-arena": str(config.shm_dir),
            }
        volume = COMPOSE["volumes"][f"node-{n}-arena"]["driver_opts"]
        assert (volume["type"], volume["device"]) == ("tmpfs", "tmpfs")
    arenas = {f"node-{n}-arena" for n in range(4)}
    certificates = {"certs", *(f"{who}-certs" for who in IDENTITIES)}
    assert set(COMPOSE["volumes"]) == {"data", "node-2-run", "models", *certificates, *arenas}


def test_every_service_waits_for_its_own_certificate_which_only_their_maker_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = str(config_of("gateway", monkeypatch).tls.directory)
    maker = COMPOSE["services"]["certs"]
    assert maker["command"] == ["upbeat", "certs", "init", directory, "--nodes", "4"], "with vLLM's, and a GPU's"
    assert maker["volumes"] == [f"certs:{directory}", *(f"{who}-certs:{directory}/{who}" for who in IDENTITIES)]
    for name, service in EVERY.items():
        assert service["depends_on"]["certs"] == {"condition": "service_completed_successfully"}
        node = re.fullmatch(r".*-(\d)", name)
        own = f"{f'node-{node[1]}' if node else name}-certs:{directory}:ro"
        assert [mount for mount in service["volumes"] if "certs" in mount] == [own], "no other identity's key"


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    assert {name for name, service in EVERY.items() if "ports" in service} == {"gateway"}
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["gateway"]["ports"])


def test_a_container_is_given_the_time_that_a_stop_takes() -> None:
    assert {service["stop_grace_period"] for service in EVERY.values()} == {"30s"}


def test_the_image_holds_every_package_and_what_the_services_need() -> None:
    packages = re.search(r"include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert packages is not None
    for package in re.findall(r'"(\w+)[.*]', packages[1]):
        assert f"COPY {package} {package}" in DOCKERFILE
    for source in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / part).exists() for part in source.split()), source
