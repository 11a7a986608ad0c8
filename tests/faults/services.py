"""A stack whose processes a test starts one by one, each where and of which version it likes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from runtime.config import Config
from storelink.arena_sharing import arenas_of, remove_dead

ROOT = Path(__file__).parents[2]
READY_S, STOP_S = 90.0, 40.0


class Services:
    """A scheduler, a gateway and the configured nodes. Use as a context manager."""

    def __init__(self, config: Config, file: Path, tree: Path = ROOT) -> None:
        """tree: the checkout that they run from at first."""
        self.config, self._file, self._tree = config, file, tree
        self._processes: dict[tuple[str, int | None], subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.gateway.port}"

    def __enter__(self) -> Services:
        try:
            self.start("scheduler")
            for service in ("kvstore", "worker"):
                for node in range(self.config.nodes.count):
                    self.start(service, node)
            self.start("gateway")
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def inside(self, node: int) -> list[str]:
        """What comes before the command of a node's process."""
        return []

    def start(self, service: str, node: int | None = None, tree: Path | None = None) -> None:
        """tree: another checkout."""
        where, which = ([], []) if node is None else (self.inside(node), ["--node", str(node)])
        with self._file.with_name(f"{service}-{node}.log").open("ab") as log:
            command = [*where, sys.executable, "-m", service, "--config", str(self._file), *which]
            checkout = tree or self._tree
            environment = os.environ | {"PYTHONPATH": str(checkout)}
            self._processes[service, node] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=checkout, env=environment
            )

    def end(self, service: str, node: int | None = None) -> None:
        """Has it drain and end."""
        process = self._processes.pop((service, node))
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.url}/ready?all=1", timeout=2)
                nodes = httpx.get(f"{self.url}/v1/fleet", timeout=2).json()["nodes"]
                if answer.status_code == 200 and len(nodes) == self.config.nodes.count:
                    return
            time.sleep(0.2)
        logs = "\n".join(f"{log.name}: {log.read_text()[-500:]}" for log in self._file.parent.glob("*.log"))
        raise AssertionError(f"not ready within {READY_S:.0f} s\n{logs}")

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for service, node in list(self._processes):
            self.end(service, node)
        for node in range(self.config.nodes.count):
            remove_dead(arenas_of(self.config.node(node).arena_stem))
