"""Helm renders the chart with six kinds of values, Kubernetes' strict schemas accept all, wrong values are refused."""

from __future__ import annotations

import copy
import json
import re
import runpy
from typing import Any

import pytest
import yaml

from tests.deploy.helm import CHART, KINDS, ROOT, VALUES, Rendered, errors, helm, rendered, template

SCHEMA = runpy.run_path(str(ROOT / "deploy" / "helm" / "schema.py"))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_valid_for_kubernetes(kind: str) -> None:
    made = rendered(kind)
    assert len(made.objects) > 10
    assert [error for each in made.objects for error in errors(each)] == []
    names = [(each["kind"], each["metadata"]["name"]) for each in made.objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "redinessProbe"), {}),
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "http"),
        ("ServiceMonitor", ("spec", "endpoints", 0, "schema"), "https"),
    ],
)
def test_the_schemas_refuse_what_kubernetes_would(kind: str, path: tuple[Any, ...], value: Any) -> None:
    wrong = copy.deepcopy(rendered("hardened").of(kind)[0])
    part = wrong
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert errors(wrong)


def test_a_misspelt_field_of_cert_manager_is_refused() -> None:
    wrong = copy.deepcopy(rendered("cert-manager").of("Certificate")[-1])
    wrong["spec"]["renewedBefore"] = "1h"
    assert errors(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_helm_finds_nothing_to_say(kind: str) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(VALUES / f"{kind}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kinds_of_values_differ_in_what_they_make() -> None:
    made = {kind: {each["kind"] for each in rendered(kind).objects} for kind in KINDS}
    only = {"HorizontalPodAutoscaler": "scaled", "Ingress": "cert-manager", "ServiceMonitor": "hardened"}
    for what, where in only.items():
        assert [kind for kind in KINDS if what in made[kind]] == [where]
    assert [kind for kind in KINDS if "Certificate" in made[kind]] == ["cert-manager", "scaled"]
    assert "Secret" not in made["hardened"], "all secrets are made elsewhere"
    assert all({"NetworkPolicy", "PodDisruptionBudget"} <= kinds for kinds in made.values())


def test_what_is_off_is_not_there() -> None:
    off = ("networkPolicy", "gateway.podDisruptionBudget", "scheduler.podDisruptionBudget", "nodes.podDisruptionBudget")
    done = template("minimal", *(f"--set={key}.enabled=false" for key in off))
    assert {each["kind"] for each in Rendered(done.stdout).objects} == {
        "ConfigMap", "Deployment", "Secret", "Service", "ServiceAccount", "StatefulSet"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("gatway.replicas=2", "additional properties 'gatway' not allowed"),
        ("gateway.replica=2", "additional properties 'replica' not allowed"),
        ("config.kv.encrpyt=true", "additional properties 'encrpyt' not allowed"),
        ("config.kv.dram_gib=4", "additional properties 'dram_gib' not allowed"),
        ("config.tls.automatic=true", "additional properties 'tls' not allowed"),
        ("config.worker.max_batch=0", "/config/worker/max_batch"),
        ("models.m.pth=x", "additional properties 'pth' not allowed"),
        ("models.m.nodes[0]=1", "additional properties 'nodes' not allowed"),
        ("nodes.devices=17", "/nodes/devices"),
        ("nodes.pools[0].name=scheduler", "/nodes/pools/0/name"),
        ("certificates.mode=openssl", "/certificates/mode"),
        ("nodes.pools[0].name=a,nodes.pools[0].count=2", "2 nodes share one blob tier; set blob.url"),
        (
            "nodes.pools[0].name=cpu,nodes.pools[0].count=1,nodes.pools[0].models={m}",
            r"nodes.pools\[cpu\].models: m is not in models",
        ),
        ("nodes.disk.type=hostPath", "nodes.disk.hostPath: name a directory"),
        ("gateway.existingSecret=keys", "gateway.apiKeys and gateway.existingSecret"),
        ("gateway.apiKeys=null", "gateway.apiKeys: a gateway in a cluster needs keys"),
        ("image.repository=", "image.repository: there is no published image"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(said: str, expected: str) -> None:
    done = template("minimal", "--set", said)
    assert done.returncode != 0 and re.search(expected, done.stderr), done.stderr


def test_a_pool_of_two_engines_and_a_model_without_a_pool_are_refused() -> None:
    done = template("vllm", "--set", "nodes.pools[0].models={demo,qwen}")
    assert (
        done.returncode != 0 and "demo, qwen run in native and vllm; give each engine a pool of its own" in done.stderr
    )
    done = template("vllm", "--set", "models.lost.path=/models/lost")
    assert done.returncode != 0 and "models.lost: no pool serves it" in done.stderr


def test_the_schema_and_the_table_of_values_are_those_of_today() -> None:
    made = SCHEMA["schema"]()
    assert json.loads(SCHEMA["SCHEMA"].read_text()) == made, "make chart"
    page = SCHEMA["PAGE"].read_text()
    assert SCHEMA["with_table"](page, made) == page, "make chart"


def test_every_value_has_a_meaning_and_is_in_the_schema() -> None:
    made = SCHEMA["schema"]()
    shown = {key: meaning for key, _, meaning in SCHEMA["rows"](made)}
    assert all(shown.values())

    def keys(values: Any, before: str) -> list[str]:
        if before in shown or not isinstance(values, dict) or not values:
            return [before]
        return [key for name, value in values.items() for key in keys(value, f"{before}.{name}" if before else name)]

    said = keys(yaml.safe_load(SCHEMA["VALUES"].read_text()), "")
    assert [key for key in said if key not in shown and not any(key.startswith(f"{each}.") for each in shown)] == []
