"""The chart fits the services: addresses, models and nodes, certificates, and who may call whom."""

from __future__ import annotations

import base64
import datetime
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from contracts.identity import GATEWAY, MAY_CALL, OPERATOR, SCHEDULER, Identity, Role, node
from gateway.openai.routes import routes
from runtime.own_certificate import checked
from runtime.registry import models_of
from scheduler.metrics import metrics_port
from storelink.credentials import Credentials
from tests.deploy.helm import KINDS, NAMESPACE, Object, Rendered, config_of, nodes_of, rendered, template

COMPONENTS = {Role.GATEWAY: "gateway", Role.SCHEDULER: "scheduler", Role.NODE: "node"}


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("kind", KINDS)
def test_the_services_own_loader_accepts_the_configuration(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    nodes = nodes_of(made)
    assert sorted(nodes) == list(range(config.nodes.count))
    for number, each in nodes.items():
        pool = each["metadata"]["labels"]["upbeat.internal/pool"]
        served = {"h100": ["small", "large"], "l40s": ["small", "rare"], "vllm": ["qwen"]}.get(pool)
        assert served is None or sorted(models_of(config, number)) == sorted(served)
        engines = {c["name"].partition("-")[0] for c in each["spec"]["template"]["spec"]["containers"]} - {"kvstore"}
        assert engines == ({"vllm", "sidecar"} if pool == "vllm" else {"worker"})


def test_settings_of_the_values_reach_the_services(tmp_path: Path) -> None:
    config = config_of(rendered("gpus"), tmp_path)
    assert (config.nodes.count, config.nodes.devices, config.devices) == (5, 2, 10)
    assert (config.kv.hbm_gib, config.kv.dram_gib, config.worker.images_gib) == (72, 256, 128)
    assert config.kv.ssd_gib == pytest.approx(0.85 * 800) and config.kv.blob_url == "s3://my-bucket/upbeat"
    assert config.kv.encrypt and config.kv.write_back_limit_bytes == 8 << 30
    assert config.gateway.max_body_bytes == 32 << 20, "a number and no 3.3e+07"
    assert config.worker.max_batch == 128 and config.gateway.limits.concurrent == 64 and config.log_level == "warning"
    alone = config_of(rendered("minimal"), tmp_path)
    assert alone.kv.ssd_gib + alone.kv.blob_gib <= 0.85 * 20, "both are on one disk"
    assert alone.gateway.port == 8080 and alone.finetune.files_gib == 0


@pytest.mark.parametrize("kind", KINDS)
def test_addresses_are_names_of_the_cluster_that_lead_to_one_pod_each(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    nodes = nodes_of(made)
    for number in range(config.nodes.count):
        places = config.node(number)
        (host,) = {a.partition(":")[0] for a in (places.store_address, places.socket_address)} | {
            device.worker_address.partition(":")[0] for device in places.devices
        }
        service = made.one("Service", host)["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
        pod = f"{nodes[number]['metadata']['name']}-{number}"
        labels = nodes[number]["spec"]["template"]["metadata"]["labels"]
        assert matches(service["selector"], labels | {"statefulset.kubernetes.io/pod-name": pod})
        assert service["selector"]["statefulset.kubernetes.io/pod-name"] == pod, "no other pod"
    for number, address in enumerate(config.scheduler_addresses):
        pod, _, domain = address.partition(":")[0].partition(".")
        (its,) = [each for each in made.of("StatefulSet") if made.component(each) == "scheduler"]
        assert pod == f"{its['metadata']['name']}-{number}" and number < its["spec"]["replicas"]
        assert domain == its["spec"]["serviceName"]
        service = made.one("Service", domain)["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
        assert matches(service["selector"], its["spec"]["template"]["metadata"]["labels"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_selector_finds_the_pods_of_its_component_and_no_others(kind: str) -> None:
    made = rendered(kind)
    pods = [(made.component(each), each["spec"]["template"]["metadata"]["labels"]) for each in made.workloads]
    for each in made.workloads:
        assert matches(each["spec"]["selector"]["matchLabels"], each["spec"]["template"]["metadata"]["labels"])
    for each in [*made.of("PodDisruptionBudget"), *made.of("NetworkPolicy")]:
        selector = each["spec"]["selector" if each["kind"] == "PodDisruptionBudget" else "podSelector"]["matchLabels"]
        found = {component for component, labels in pods if matches(selector, labels)}
        assert found == {each["metadata"]["labels"]["app.kubernetes.io/component"]}


# ---- who calls whom


def allowed(made: Rendered, config: Any) -> dict[tuple[str, str], set[int]]:
    """Ports by caller and called component, as both policies say: what goes out, and what comes in."""
    labels = {made.component(w): w["spec"]["template"]["metadata"]["labels"] for w in made.workloads}
    ways: dict[str, dict[tuple[str, str], set[int]]] = {"ingress": {}, "egress": {}}
    for policy in made.of("NetworkPolicy"):
        own = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        for way, peers in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(way, []):
                for peer in rule.get(peers, []):
                    if "podSelector" not in peer or "namespaceSelector" in peer:
                        continue
                    (other,) = [c for c, its in labels.items() if matches(peer["podSelector"]["matchLabels"], its)]
                    pair = (other, own) if way == "ingress" else (own, other)
                    ways[way].setdefault(pair, set()).update(port["port"] for port in rule["ports"])
    assert ways["ingress"] == ways["egress"], "what may go out may come in, and nothing else"
    return ways["ingress"]


@pytest.mark.parametrize("kind", KINDS)
def test_policies_allow_exactly_the_calls_of_the_table_of_roles(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    places = config.node(0)
    ports = {
        "Scheduler": {port_of(config.scheduler_addresses[0])},
        "KvStore": {port_of(places.store_address)},
        "Worker": {port_of(device.worker_address) for device in places.devices},
    }
    at = {"Scheduler": "scheduler", "KvStore": "node", "Worker": "node"}
    expected: dict[tuple[str, str], set[int]] = {}
    for method, roles in MAY_CALL.items():
        service = method.split("/")[1].rpartition(".")[2]
        for role in roles - {Role.OPERATOR}:
            if service in ports:
                expected.setdefault((COMPONENTS[role], at[service]), set()).update(ports[service])
    # Peers read each other's arena on the socket that KvStore's leases name.
    expected["node", "node"].add(port_of(places.socket_address))
    assert allowed(made, config) == expected


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def rules(made: Rendered, component: str, way: str) -> list[Object]:
    return [
        rule
        for policy in made.of("NetworkPolicy")
        if policy["metadata"]["labels"]["app.kubernetes.io/component"] == component
        for rule in policy["spec"].get(way, [])
    ]


def test_what_else_is_allowed_is_what_the_values_name(tmp_path: Path) -> None:
    made = rendered("hardened")
    config = config_of(made, tmp_path)
    places, scheduler = config.node(0), port_of(config.scheduler_addresses[0])
    prometheus = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}},
            "podSelector": {"matchLabels": {"app": "prometheus"}},
        }
    ]
    metrics = {"scheduler": [metrics_port(config, scheduler)]}
    metrics["node"] = sorted([places.devices[0].metrics_port, places.store_metrics_port])
    for component, expected in metrics.items():
        (rule,) = [rule for rule in rules(made, component, "ingress") if rule["from"] == prometheus]
        assert [port["port"] for port in rule["ports"]] == expected
    (rule,) = rules(made, "gateway", "ingress")
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
    assert rule == {"from": clients + prometheus, "ports": [{"port": 8080}]}
    bucket = {"ports": [{"port": 443}, {"port": 9000}], "to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}]}
    assert [rule for rule in rules(made, "node", "egress") if rule["to"][0].get("ipBlock")] == [bucket]
    for component in COMPONENTS.values():
        for rule in rules(made, component, "egress"):
            assert rule["to"] and rule["ports"], "nothing goes anywhere"


def test_only_pools_of_vllm_may_download() -> None:
    (policy,) = [p for p in rendered("vllm").of("NetworkPolicy") if p["metadata"]["name"].endswith("-hub")]
    assert policy["spec"]["podSelector"]["matchLabels"]["upbeat.internal/pool"] == "vllm"
    assert policy["spec"]["policyTypes"] == ["Egress"] and policy["spec"]["egress"] == [{"ports": [{"port": 443}]}]


def test_an_ingress_leads_to_every_route_but_metrics_and_probes() -> None:
    (ingress,) = rendered("cert-manager").of("Ingress")
    paths = [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"] if path["pathType"] == "Prefix"]
    inside = {"/metrics", "/health", "/ready"}
    public = {route.path for route in routes("m")} - inside
    assert len(public) > 20
    for route in public - {"/"}:
        assert any(route == path or route.startswith(f"{path}/") for path in paths), route
    assert not any(route == path or route.startswith(f"{path}/") for path in paths for route in inside)


# ---- certificates


def identities(count: int) -> list[Identity]:
    return [GATEWAY, SCHEDULER, OPERATOR, *(node(f"node-{n}") for n in range(count))]


def test_certificates_of_helm_are_those_that_the_services_use(tmp_path: Path) -> None:
    made = rendered("gpus")
    found = {}
    for who in identities(5):
        data = made.one("Secret", f"up-upbeat-tls-{who}")["data"]
        place = tmp_path / str(who)
        place.mkdir()
        for name, text in data.items():
            (place / name).write_bytes(base64.b64decode(text))
        until = checked(place / "tls.crt", who)
        assert until > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1000)
        found[who] = Credentials(place)
    authority = made.one("Secret", "up-upbeat-tls-ca")
    assert authority["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    handshake(found[SCHEDULER].server_context(), found[node("node-3")].client_context(any_name=True))
    other = Rendered(template("minimal").stdout).one("Secret", "up-upbeat-tls-gateway")["data"]
    (tmp_path / "other").mkdir()
    for name, text in other.items():
        (tmp_path / "other" / name).write_bytes(base64.b64decode(text))
    with pytest.raises(ssl.SSLError):
        handshake(found[SCHEDULER].server_context(), Credentials(tmp_path / "other").client_context(any_name=True))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake of both in memory. Raises SSLError."""
    ways = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(ways[0], ways[1], server_side=True),
        client.wrap_bio(ways[1], ways[0], server_hostname="scheduler.upbeat.internal"),
    ]
    done = [False, False]
    for _ in range(10):
        for i in (1, 0):
            try:
                ends[i].do_handshake()
                done[i] = True
            except ssl.SSLWantReadError:
                pass
    assert all(done)
    assert ends[0].getpeercert()


@pytest.mark.parametrize("kind", ["cert-manager", "scaled"])
def test_cert_manager_is_asked_for_each_identity(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    prefix = {"cert-manager": "llm-tls", "scaled": "up-upbeat-tls"}[kind]
    for who in identities(config.nodes.count):
        said = made.one("Certificate", f"{prefix}-{who}")["spec"]
        assert said["dnsNames"] == [who.dns] and said["secretName"] == f"{prefix}-{who}"
        assert {"server auth", "client auth"} <= set(said["usages"])
        if kind == "scaled":
            assert said["issuerRef"] == {"name": "fleet", "kind": "ClusterIssuer", "group": "cert-manager.io"}
        else:
            authority = made.one("Certificate", "llm-tls-ca")["spec"]
            assert (
                authority["isCA"]
                and made.one("Issuer", "llm-tls-ca")["spec"]["ca"]["secretName"] == authority["secretName"]
            )
            assert said["issuerRef"]["name"] == "llm-tls-ca"
    assert len(made.of("Certificate")) == len(identities(config.nodes.count)) + (kind == "cert-manager")


@pytest.mark.parametrize("kind", KINDS)
def test_every_certificate_that_a_pod_mounts_is_one_of_the_fleet(kind: str, tmp_path: Path) -> None:
    made = rendered(kind)
    config = config_of(made, tmp_path)
    assert str(config.tls.directory) == "/certs"
    names = set(re.findall(r"[a-z-]+tls-[a-z0-9-]+", str([w["spec"]["template"]["spec"] for w in made.workloads])))
    expected = {str(who) for who in identities(config.nodes.count)} - {"operator"}
    assert {re.sub(r".*tls-", "", name) for name in names if name != "nginx"} == expected


def test_a_node_is_handed_its_own_certificate_and_every_renewal(tmp_path: Path) -> None:
    """The container's own script, with its paths in a folder."""
    import subprocess
    import time

    (script,) = {c["command"][-1] for _, c in rendered("minimal").containers if c["name"] == "certificates"}
    every, own = tmp_path / "all-certs", tmp_path / "certs"
    own.mkdir()
    for number in (0, 1):
        (every / f"node-{number}").mkdir(parents=True)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (every / f"node-{number}" / name).write_text(f"{name} {number}")
    moved = script.replace("/all-certs", str(every)).replace("/certs/", f"{own}/").replace("sleep 20", "sleep 0.1")
    running = subprocess.Popen(["sh", "-euc", moved], env={"NODE": "1", "PATH": "/usr/bin:/bin"})
    try:

        def wait_for(text: str) -> None:
            until = time.monotonic() + 60
            while not (own / "tls.crt").exists() or (own / "tls.crt").read_text() != text:
                assert time.monotonic() < until and running.poll() is None
                time.sleep(0.02)

        wait_for("tls.crt 1")
        assert {path.name: path.read_text() for path in own.iterdir()} == {
            n: f"{n} 1" for n in ("tls.crt", "tls.key", "ca.crt")
        }
        assert {path.stat().st_mode & 0o777 for path in own.iterdir()} == {0o600}
        (every / "node-1" / "tls.crt").write_text("renewed")
        wait_for("renewed")
    finally:
        running.terminate()
    assert running.wait(10) == 0, "it ends at once"


# ---- monitors


def test_a_monitor_asks_each_node_by_its_own_name(tmp_path: Path) -> None:
    made = rendered("hardened")
    config = config_of(made, tmp_path)
    for number in range(config.nodes.count):
        monitor = made.one("ServiceMonitor", f"up-upbeat-node-{number}")
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (service,) = [
            s
            for s in made.of("Service")
            if matches(monitor["spec"]["selector"]["matchLabels"], s["metadata"]["labels"])
        ]
        assert service["metadata"]["name"] == config.node(number).store_address.partition(":")[0]
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        places = config.node(number)
        asked = {ports[each["port"]] for each in monitor["spec"]["endpoints"]}
        assert asked == {places.store_metrics_port, places.devices[0].metrics_port}
        for each in monitor["spec"]["endpoints"]:
            assert each["scheme"] == "https" and each["tlsConfig"]["serverName"] == node(f"node-{number}").dns
            assert each["tlsConfig"]["cert"]["secret"]["name"] == "fleet-tls-operator"
    scheduler = made.one("ServiceMonitor", "up-upbeat-scheduler")["spec"]["endpoints"][0]
    assert scheduler["tlsConfig"]["serverName"] == SCHEDULER.dns
    assert NAMESPACE not in str(made.objects), "objects belong to the release's namespace"
