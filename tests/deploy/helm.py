"""The chart as Helm itself renders it, and Kubernetes' schemas for what comes out."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from runtime.config import Config
from runtime.config_file import load_config

ROOT = Path(__file__).parents[2]
CHART, VALUES = ROOT / "deploy" / "helm" / "upbeat", Path(__file__).parent / "helm_values"
HELM, SCHEMAS = ROOT / ".cache" / "helm" / "helm", ROOT / ".cache" / "helm" / "kubernetes.json"
#: The kinds of values that are shown to be valid.
KINDS = ("minimal", "gpus", "vllm", "cert-manager", "scaled", "hardened")
NAMESPACE = "llm"
Object = dict[str, Any]
#: The parser in C, where PyYAML has it: ten times as fast.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def need() -> None:
    """Skip the test where there is no Helm."""
    if not HELM.exists() or not SCHEMAS.exists():
        pytest.skip("Helm is not there; `make helm` fetches it")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Helm with these arguments."""
    need()
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def template(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart with the values of `kind`."""
    return helm(
        "template", "up", str(CHART), "--namespace", NAMESPACE, "--values", str(VALUES / f"{kind}.yaml"), *arguments
    )


class Rendered:
    """The objects of one rendering."""

    def __init__(self, text: str) -> None:
        self.objects: list[Object] = [each for each in yaml.load_all(text, _LOADER) if each]

    def of(self, kind: str) -> list[Object]:
        """Objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        """The object of that name."""
        (found,) = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        return found

    @property
    def workloads(self) -> list[Object]:
        """What makes pods."""
        return self.of("Deployment") + self.of("StatefulSet")

    @property
    def containers(self) -> Iterator[tuple[Object, Object]]:
        """Each container, with its pod's specification; those that start first, too."""
        for workload in self.workloads:
            pod = workload["spec"]["template"]["spec"]
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                yield pod, container

    @property
    def config_text(self) -> str:
        """What the services read."""
        (found,) = self.of("ConfigMap")
        return str(found["data"]["config.yaml"])

    def component(self, workload: Object) -> str:
        """gateway, scheduler or node."""
        return str(workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


@functools.cache
def rendered(kind: str) -> Rendered:
    """The chart with the values of `kind`; nobody changes it."""
    done = template(kind)
    assert done.returncode == 0, done.stderr
    return Rendered(done.stdout)


def config_of(made: Rendered, folder: Path, **sections: Any) -> Config:
    """The configuration as the services' own loader reads it."""
    file = folder / "config.yaml"
    file.write_text(made.config_text)
    return load_config(file, sections)


def nodes_of(made: Rendered) -> dict[int, Object]:
    """The StatefulSet of each node, by number."""
    return {
        number: each
        for each in made.of("StatefulSet")
        if made.component(each) == "node"
        for number in range(
            each["spec"]["ordinals"]["start"], each["spec"]["ordinals"]["start"] + each["spec"]["replicas"]
        )
    }


@functools.cache
def _schemas() -> tuple[dict[tuple[str, str], str], Object, Object]:
    known = json.loads(SCHEMAS.read_text())
    names = {}
    for name, part in known["$defs"].items():
        for said in part.get("x-kubernetes-group-version-kind", []):
            names[("/".join(filter(None, (said["group"], said["version"]))), said["kind"])] = name
    return names, known["$defs"], json.loads((Path(__file__).parent / "crds.json").read_text())


@functools.cache
def _validator(version: str, kind: str) -> jsonschema_rs.Draft202012Validator:
    names, definitions, custom = _schemas()
    if kind in custom:
        return jsonschema_rs.Draft202012Validator(custom[kind])
    schema = {"$ref": f"#/$defs/{names[(version, kind)]}", "$defs": definitions}
    return jsonschema_rs.Draft202012Validator(schema)


def errors(each: Object) -> list[str]:
    """What the schema of an object's kind says against it. Raises KeyError for an unknown kind."""
    found = _validator(each["apiVersion"], each["kind"]).iter_errors(each)
    return [
        f"{each['kind']} {each['metadata']['name']}: {'.'.join(map(str, e.instance_path))}: {e.message}" for e in found
    ]
