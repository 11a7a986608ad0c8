"""Pods of the chart: hardened as compose.yaml's containers, with probes and limits, each with its own secrets only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.vllm_places import vllm_places
from scheduler.metrics import metrics_port
from tests.deploy.helm import KINDS, ROOT, Object, Rendered, config_of, nodes_of, rendered, template

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


def mounts(container: Object) -> dict[str, Object]:
    """What a container mounts, by path."""
    return {each["mountPath"]: each for each in container["volumeMounts"]}


def secrets_of(pod: Object, container: Object) -> set[str]:
    """The secrets whose files a container sees."""
    named = {each["name"] for each in container["volumeMounts"]}
    found = set()
    for volume in pod["volumes"] + [each["metadata"] for each in pod.get("volumeClaimTemplates", [])]:
        if volume["name"] in named:
            found |= {volume["secret"]["secretName"]} if "secret" in volume else set()
            found |= {each["secret"]["name"] for each in volume.get("projected", {}).get("sources", [])}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_can_do_no_more_than_in_compose(kind: str) -> None:
    hardened = COMPOSE["x-service"]
    assert hardened["user"] == "10001:10001" and hardened["read_only"] and hardened["cap_drop"] == ["ALL"]
    for pod, container in rendered(kind).containers:
        assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (10001, 10001, 10001)
        assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] and own["runAsNonRoot"] and own["capabilities"] == {"drop": ["ALL"]}
        assert own["allowPrivilegeEscalation"] is False and "privileged" not in own
        assert "hostPort" not in str(container.get("ports"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_container_has_probes_and_limits(kind: str) -> None:
    for _, container in rendered(kind).containers:
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys(), container["name"]
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys() and "memory" in resources["limits"]
    for workload in rendered(kind).workloads:
        pod = workload["spec"]["template"]["spec"]
        for volume in pod["volumes"]:
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"], volume["name"]


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_files_for_those_who_need_them(kind: str) -> None:
    made = rendered(kind)
    for workload in made.workloads:
        component, pod = made.component(workload), workload["spec"]["template"]["spec"]
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            said = secrets_of(pod, container)
            keys = {name for name in said if name.endswith(("-keys", "upbeat-gateway")) and "tls" not in name}
            cluster = {name for name in said if name.endswith(("-cluster", "fleet-secret"))}
            bucket = {name for name in said if name.endswith(("bucket", "kvstore"))}
            assert bool(keys) == (component == "gateway"), "API keys"
            assert bool(cluster) == (container["name"] not in ("gateway", "certificates")), "the cluster's secret"
            assert not bucket or container["name"] == "kvstore"
            assert not [name for name in said if name == "hub-token"] or container["name"].startswith("vllm-server")
            certs = {name for name in said if "tls-" in name}
            if component == "node":
                assert bool(certs) == (container["name"] == "certificates"), "one container sees nodes' keys"
                assert all(re.search(r"tls-node-\d+$", name) for name in certs)
            else:
                assert {name.rpartition("-")[2] for name in certs} == {component}
            assert not any("operator" in name or name.endswith("-ca") for name in said)
            for each in container.get("env", []):
                assert "secretKeyRef" not in each.get("valueFrom", {}), "a secret in an environment"
        for volume in pod["volumes"]:
            said = volume.get("secret") or volume.get("projected")
            assert said is None or said["defaultMode"] == 0o440, "for the group of the service alone"


@pytest.mark.parametrize("kind", ["gpus", "vllm"])
def test_no_secret_is_in_the_configuration_that_all_read(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    assert not config.kv.blob_options and not config.gateway.token_secret and not config.vllm.api_key
    assert "s3cr3t" not in made.config_text and "2bb80d537b1d" not in made.config_text
    tenants = {"gpus": ["research", "chat-app"], "vllm": ["research"]}[kind]
    assert [key.tenant for key in config.gateway.api_keys] == tenants, "whether there are several is no secret"
    assert all(re.fullmatch(r"sha256:0{60}\d{4}", key.key) for key in config.gateway.api_keys), "no text has this hash"


def test_every_command_is_a_program_with_its_own_flags() -> None:
    flags: dict[str, set[str]] = {}
    for kind in KINDS:
        for _, container in rendered(kind).containers:
            program, *arguments = container["command"]
            if container["name"] != "certificates":
                flags.setdefault(program, set()).update(each for each in arguments if each.startswith("--"))
    assert set(flags) == {
        f"upbeat-{name}" for name in ("gateway", "scheduler", "kvstore", "worker", "vllm-server", "sidecar")
    }
    for program, its in flags.items():
        asked = [str(Path(sys.executable).with_name(program)), "--help"]
        help_text = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        assert all(flag in help_text for flag in its)


@pytest.mark.parametrize("kind", KINDS)
def test_ports_and_probes_are_those_of_the_configuration(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    places = config.node(0)
    ports = {"gateway": {config.gateway.port}, "kvstore": set()}
    ports["kvstore"] = {port_of(places.store_listen), port_of(places.socket_listen), places.store_metrics_port}
    address = port_of(config.scheduler_listen(0))
    ports["scheduler"] = {address, metrics_port(config, address)}
    asked = {"kvstore": port_of(places.store_listen), "scheduler": address}
    for device in places.devices:
        suffix = f"-{device.number}" if len(places.devices) > 1 else ""
        for name in ("worker", "sidecar"):
            ports[name + suffix] = {port_of(device.worker_listen), device.metrics_port}
            asked[name + suffix] = port_of(device.worker_listen)
    for _, container in made.containers:
        name = container["name"]
        if name != "certificates" and not name.startswith("vllm-server"):
            assert {port["containerPort"] for port in container["ports"]} == ports[name]
        assert all(len(port["name"]) <= 15 for port in container.get("ports", []))
        if name in asked:
            who = "scheduler" if name == "scheduler" else '"node-$NODE"'
            for probe, flag in (("startup", " --alive"), ("readiness", ""), ("liveness", " --alive")):
                said = container[f"{probe}Probe"]["exec"]["command"]
                assert said == ["sh", "-c", f"exec upbeat probe{flag} grpc://127.0.0.1:{asked[name]} {who}"]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_vllm_servers_probe_asks_its_socket(tmp_path: Path) -> None:
    made = rendered("vllm")
    config = config_of(made, tmp_path, run_dir="/run/upbeat")
    (server,) = [c for _, c in made.containers if c["name"] == "vllm-server"]
    socket = str(vllm_places(config, 2).socket).replace("vllm-2", "vllm-$NODE")
    assert server["readinessProbe"]["exec"]["command"][-1] == f"exec upbeat probe unix:{socket} "
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= config.vllm.start_s == 2400
    assert server["resources"]["limits"] == {"memory": "160Gi", "nvidia.com/gpu": 2}
    environment = {each["name"]: each.get("value") for each in server["env"]}
    assert environment["UPBEAT__RUN_DIR"] == "/run/upbeat" and environment["HF_TOKEN_PATH"] == "/etc/upbeat/hub/token"
    (sidecar,) = [c for _, c in made.containers if c["name"] == "sidecar"]
    assert mounts(sidecar)["/run/upbeat"]["name"] == mounts(server)["/run/upbeat"]["name"] == "run"
    assert mounts(sidecar)["/cache"] == {"name": "models", "mountPath": "/cache", "readOnly": True}
    assert "/shm" in mounts(server) and "nvidia.com/gpu" not in str(sidecar["resources"])
    assert all(c["image"].startswith("registry.example.org/upbeat-vllm:") for c in (server, sidecar))


def test_gpus_are_given_to_workers_alone_one_container_a_device(tmp_path: Path) -> None:
    made = rendered("gpus")
    for number, each in nodes_of(made).items():
        pod = each["spec"]["template"]["spec"]
        with_gpu = {c["name"] for c in pod["containers"] if "nvidia.com/gpu" in c["resources"].get("limits", {})}
        assert with_gpu == {"worker-0", "worker-1"} and pod["runtimeClassName"] == "nvidia"
        assert pod["nodeSelector"] == {"accelerator": "h100" if number < 2 else "l40s"}
        image = pod["containers"][0]["image"]
        assert image.startswith("registry.example.org/upbeat@sha256:")


@pytest.mark.parametrize("kind", KINDS)
def test_the_arena_fits_its_tmpfs_and_memory_covers_it(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    arena = config.kv.dram_gib * 1024 + (config.worker.images_gib or 0) * 1024
    for each in nodes_of(made).values():
        pod = each["spec"]["template"]["spec"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == "arena"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert arena + 64 <= mib(volume["emptyDir"]["sizeLimit"]) <= arena * 1.02 + 65
        containers = {c["name"]: c for c in pod["containers"]}
        store = containers["kvstore"]["resources"]
        assert mib(store["limits"]["memory"]) >= config.kv.dram_gib * 1024 + 1024
        for name, container in containers.items():
            if name.startswith(("kvstore", "worker", "vllm-server")):
                assert mounts(container)["/shm"]["name"] == "arena"
            if name.startswith("worker"):
                least = (config.kv.hbm_gib + config.kv.dram_gib + (config.worker.images_gib or 0)) * 1024
                assert mib(container["resources"]["limits"]["memory"]) >= least + 1024


def mib(quantity: str) -> int:
    """A quantity of the chart in MiB."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_is_given_the_time_that_its_stop_takes(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    for workload in made.workloads:
        given = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert given >= {"gateway": config.gateway.drain_s + 10, "scheduler": 5, "node": 55}[made.component(workload)]


def test_pods_start_again_when_the_configuration_changes() -> None:
    sums = []
    for made in (rendered("minimal"), Rendered(template("minimal", "--set", "config.log_level=debug").stdout)):
        (said,) = {each["spec"]["template"]["metadata"]["annotations"]["checksum/config"] for each in made.workloads}
        sums.append(said)
    assert sums[0] != sums[1]


def test_gateways_that_are_several_store_no_responses(tmp_path: Path) -> None:
    assert config_of(rendered("minimal"), tmp_path).gateway.responses_keep_s == 0
    alone = Rendered(template("minimal", "--set", "gateway.replicas=1").stdout)
    assert config_of(alone, tmp_path).gateway.responses_keep_s > 0
    (gateway,) = [c for _, c in alone.containers if c["name"] == "gateway"]
    assert "/data" in mounts(gateway)
