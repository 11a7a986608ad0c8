"""Runs the pods of a rendered chart as processes: their commands, files and environment, without containers.

Each pod has an address of its own in 127.77.0.0/16 in place of its name, and folders in place of its volumes.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.helm import ROOT, Object, Rendered

BIN = Path(sys.executable).parent
NODES, SCHEDULER, GATEWAY = "127.77.1.{n}", "127.77.2.1", "127.77.3.1"
#: What names and addresses in the cluster are here.
_HERE = {
    "UPBEAT__NODES__STORE_HOST": NODES,
    "UPBEAT__NODES__WORKER_HOST": NODES,
    "UPBEAT__NODES__LISTEN_HOST": "",
    "UPBEAT__SCHEDULER__LISTEN_HOST": "",
    "UPBEAT__SCHEDULER__ADDRESSES": json.dumps([f"{SCHEDULER}:8081"]),
    "UPBEAT__GATEWAY__HOST": GATEWAY,
}


@dataclass
class Running:
    """A container's process."""

    name: str
    container: Object
    environment: dict[str, str]
    paths: dict[str, str]
    address: str
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Start its command."""
        program, *arguments = [
            re.sub(r"\$\((\w+)\)", lambda m: self.environment[m[1]], p) for p in self.container["command"]
        ]
        line = [str(BIN / program) if program.startswith("upbeat") else program, *(self.moved(a) for a in arguments)]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(line, env=self.environment, cwd=self.log.parent, stdout=out, stderr=out)

    def moved(self, text: str) -> str:
        """`text` with this pod's paths and address."""
        known = "|".join(re.escape(inside) for inside in sorted(self.paths, key=len, reverse=True))
        text = re.sub(rf"(?:(?<![\w/])|(?<=file://))({known})(?![\w-])", lambda found: self.paths[found[1]], text)
        return text.replace("127.0.0.1", self.address)

    def probe(self, which: str) -> bool:
        """Whether a probe's own command passes."""
        command = [self.moved(part) for part in self.container[f"{which}Probe"]["exec"]["command"]]
        return (
            subprocess.run(command, env=self.environment, timeout=60, check=False, capture_output=True).returncode == 0
        )


class Kubelet:
    """The pods of `made`, below `folder`. arenas: a folder on a tmpfs."""

    def __init__(self, made: Rendered, folder: Path, arenas: Path) -> None:
        self._made, self._folder, self._arenas = made, folder, arenas
        self.running: list[Running] = []

    def start(self) -> None:
        """Start every container; those of `initContainers` first."""
        for workload in sorted(self._made.workloads, key=self._made.component, reverse=True):
            spec = workload["spec"]
            first = spec.get("ordinals", {}).get("start", 0)
            for number in range(first, first + spec["replicas"]):
                self._pod(workload, number)

    def _pod(self, workload: Object, number: int) -> None:
        name, pod = f"{workload['metadata']['name']}-{number}", workload["spec"]["template"]["spec"]
        volumes = {each["name"]: self._volume(name, each) for each in pod["volumes"]}
        for claim in workload["spec"].get("volumeClaimTemplates", []):
            volumes[claim["metadata"]["name"]] = self._folder_of(name, claim["metadata"]["name"])
        address = {"gateway": GATEWAY, "scheduler": SCHEDULER}.get(
            self._made.component(workload), NODES.replace("{n}", str(number))
        )
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            paths = {"/opt/upbeat/models/demo": str(ROOT / "models" / "demo")}
            for mount in container["volumeMounts"]:
                source = volumes[mount["name"]]
                if (inside := mount.get("subPath")) and mount["mountPath"] != "/etc/upbeat/config.yaml":
                    data = volumes["data"] / Path(mount["mountPath"]).name
                    data.write_bytes((source / inside).read_bytes())
                else:
                    paths[mount["mountPath"]] = str(source / inside if inside else source)
            one = Running(f"{name}/{container['name']}", container, {}, paths, address, self._log(name, container))
            own = self._folder_of(name, container["name"])
            if config := paths.get("/etc/upbeat/config.yaml"):
                (own / "config.yaml").write_text(one.moved(Path(config).read_text()))
                paths["/etc/upbeat/config.yaml"] = str(own / "config.yaml")
            one.environment = self._environment(container, number, one)
            one.start()
            self.running.append(one)
            if container in pod.get("initContainers", []):
                while not one.probe("startup"):
                    assert one.process.poll() is None, one.log.read_text()
                    time.sleep(0.1)

    def _environment(self, container: Object, number: int, one: Running) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if not name.startswith("UPBEAT")} | _HERE
        found["PATH"] = f"{BIN}:{found['PATH']}"
        for each in container.get("env", []):
            source: Any = each.get("valueFrom", {})
            if "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
                found[each["name"]] = str(number)
            elif "resourceFieldRef" in source:
                assert source["resourceFieldRef"] == {"resource": "limits.cpu", "divisor": "1"}
                found[each["name"]] = str(math.ceil(float(container["resources"]["limits"]["cpu"])))
            else:
                found[each["name"]] = one.moved(each["value"])
        return found

    def _volume(self, pod: str, volume: Object) -> Path:
        made = self._folder_of(pod, volume["name"])
        if volume["name"] == "arena":
            made = self._arenas / pod
            made.mkdir()
        if volume["name"] == "blob":
            made = self._folder_of("shared", "blob")
        if "configMap" in volume:
            for name, text in self._made.one("ConfigMap", volume["configMap"]["name"])["data"].items():
                (made / name).write_text(text)
        if "secret" in volume:
            self._secret(made, volume["secret"]["secretName"], volume["secret"].get("items"))
        for source in volume.get("projected", {}).get("sources", []):
            self._secret(made, source["secret"]["name"], source["secret"]["items"])
        return made

    def _secret(self, folder: Path, name: str, items: list[Object] | None) -> None:
        said = self._made.one("Secret", name)
        files = {key: base64.b64decode(value) for key, value in said.get("data", {}).items()}
        files |= {key: value.encode() for key, value in said.get("stringData", {}).items()}
        for item in items or [{"key": key, "path": key} for key in files]:
            (folder / item["path"]).parent.mkdir(parents=True, exist_ok=True)
            (folder / item["path"]).write_bytes(files[item["key"]])

    def _folder_of(self, *names: str) -> Path:
        made = self._folder.joinpath(*names)
        made.mkdir(parents=True, exist_ok=True)
        return made

    def _log(self, pod: str, container: Object) -> Path:
        return self._folder_of(pod) / f"{container['name']}.log"

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {one.name}\n{one.log.read_text()[-2000:]}" for one in self.running)

    def stop(self, limit_s: float) -> dict[str, int]:
        """Exit statuses after SIGTERM. What lives on after `limit_s` is killed."""
        for one in self.running:
            one.process.send_signal(signal.SIGTERM)
        found = {}
        for one in self.running:
            try:
                found[one.name] = one.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                one.process.kill()
                found[one.name] = one.process.wait()
        return found
