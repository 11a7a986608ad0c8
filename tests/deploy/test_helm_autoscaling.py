"""The chart's autoscaling of nodes: what KEDA or an HPA gets, and that the scheduler's policy has the same limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.helm import ROOT, Rendered, config_of, errors, helm, template

KEDA = ("--set=nodes.autoscaling.enabled=true,nodes.autoscaling.minNodes=2,nodes.autoscaling.keySecret=scaler-key",)
HPA = ("--set=nodes.autoscaling.enabled=true,nodes.autoscaling.by=hpa",)
PAGE = ROOT / "docs" / "autoscaling.md"


def made(*arguments: str) -> Rendered:
    done = template("scaled", *arguments)
    assert done.returncode == 0, done.stderr
    return Rendered(done.stdout)


def test_keda_asks_the_gateway_within_the_policys_limits(tmp_path: Path) -> None:
    scaled = made(*KEDA)
    assert [error for each in scaled.objects for error in errors(each)] == []
    pool = next(each for each in scaled.of("StatefulSet") if scaled.component(each) == "node")
    assert "replicas" not in pool["spec"], "an upgrade would set them back"
    spec = scaled.one("ScaledObject", "up-upbeat-nodes")["spec"]
    assert spec["scaleTargetRef"]["name"] == pool["metadata"]["name"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 4)
    (trigger,) = spec["triggers"]
    asked = trigger["metadata"]
    assert asked["url"] == "http://up-upbeat-gateway.llm.svc:8080/v1/scale", "the service's port"
    assert (asked["valueLocation"], asked["targetValue"], trigger["metricType"]) == (
        "desired_nodes",
        "1",
        "AverageValue",
    )
    (key,) = scaled.one("TriggerAuthentication", trigger["authenticationRef"]["name"])["spec"]["secretTargetRef"]
    assert key == {"parameter": "token", "name": "scaler-key", "key": "token"}
    policy = config_of(scaled, tmp_path).autoscale
    assert (policy.min_nodes, policy.max_nodes) == (2, 4)
    assert len([each for each in scaled.of("Service") if "upbeat.internal/node" in each["metadata"]["labels"]]) == 4


def test_an_hpa_follows_an_external_metric() -> None:
    scaled = made(*HPA)
    assert [error for each in scaled.objects for error in errors(each)] == []
    spec = scaled.one("HorizontalPodAutoscaler", "up-upbeat-nodes")["spec"]
    (metric,) = spec["metrics"]
    assert metric["external"]["metric"]["name"] == "upbeat_desired_nodes"
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 0, "the policy has a window of its own"
    assert "ScaledObject" not in {each["kind"] for each in scaled.objects}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("nodes.autoscaling.enabled=true",), "nodes.autoscaling.keySecret: KEDA shows a key"),
        (
            ("nodes.autoscaling.enabled=true,nodes.autoscaling.by=hpa,nodes.autoscaling.minNodes=5",),
            "more than the pool",
        ),
        (
            ("nodes.autoscaling.enabled=true,nodes.autoscaling.by=hpa,nodes.pools[1].name=b,nodes.pools[1].count=1",),
            "needs one pool",
        ),
        (("nodes.autoscaling.by=vpa",), "/nodes/autoscaling/by"),
        (("config.autoscale.max_nodes=3",), "additional properties 'max_nodes' not allowed"),
        (("config.autoscale.target_utilisation=2",), "/config/autoscale/target_utilisation"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(said: tuple[str, ...], expected: str) -> None:
    done = template("scaled", *(f"--set={each}" for each in said))
    assert done.returncode != 0 and re.search(expected, done.stderr), done.stderr


@pytest.mark.parametrize("arguments", [KEDA, HPA])
def test_helm_finds_nothing_to_say(arguments: tuple[str, ...]) -> None:
    done = helm(
        "lint", "--strict", "deploy/helm/upbeat", "--values", "tests/deploy/helm_values/scaled.yaml", *arguments
    )
    assert done.returncode == 0, done.stdout + done.stderr


def documented() -> list[dict[str, Any]]:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [each for block in blocks for each in Rendered(block).objects if "kind" in each]


def test_the_objects_of_the_page_are_valid_and_ask_what_the_gateway_serves() -> None:
    found = documented()
    assert {each["kind"] for each in found} == {"ScaledObject", "TriggerAuthentication", "HorizontalPodAutoscaler"}
    assert [error for each in found for error in errors(each)] == []
    (asked,) = next(each for each in found if each["kind"] == "ScaledObject")["spec"]["triggers"]
    assert asked["metadata"]["url"].endswith("/v1/scale") and asked["metadata"]["valueLocation"] == "desired_nodes"
