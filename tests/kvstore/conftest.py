"""Real kvstore processes on loopback, each stack in a directory of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from runtime.config import Config
from runtime.config_file import dump_config, load_config
from storelink.arena_sharing import arenas_of, remove_dead

_EXIT_S = 40


class Stack:
    """Two nodes' stores and, where a test wants one, a scheduler of the test's own on
    `config.scheduler_addresses[0]`."""

    def __init__(self, config: Config, file: Path) -> None:
        self.config = config
        self.file = file
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, environment: Mapping[str, str] | None = None) -> None:
        """Start a node's store, with these variables added to the environment; returns at once."""
        command = [sys.executable, "-m", "kvstore", "--config", str(self.file), "--node", str(node)]
        log = self.file.with_name(f"kvstore-{node}.log").open("ab")
        self.processes[node] = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=Path(__file__).parents[2], env={**os.environ, **(environment or {})}
        )

    def signal(self, node: int, number: int) -> None:
        """Send a signal and, when it ends the process, wait for that."""
        process = self.processes[node]
        process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            process.wait(_EXIT_S)

    def log(self, node: int) -> str:
        """What the store logged."""
        return self.file.with_name(f"kvstore-{node}.log").read_text()

    def address(self, node: int) -> str:
        """Where the store listens."""
        return self.config.node(node).store_address

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(_EXIT_S)
        for node in self.processes:
            remove_dead(arenas_of(self.config.node(node).arena_stem))


@pytest.fixture
def make_stack(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Callable[..., Stack]]:
    """A function: a stack of two nodes (or so many) with these `kv` settings; nothing is started."""
    stacks: list[Stack] = []

    def make(
        *,
        nodes: int = 2,
        shm_dir: str = "",
        telemetry: dict[str, Any] | None = None,
        log_level: str = "info",
        **kv: Any,
    ) -> Stack:
        first = free_ports(10 * nodes + 20)
        overrides = {
            "data": str(tmp_path / "data"),
            "run_dir": str(tmp_path / "run"),
            "shm_dir": shm_dir or str(_shm(tmp_path)),
            "nodes": {"base_port": first, "count": nodes},
            "scheduler": {"port": first + 10 * nodes + 15},
            "gateway": {"port": first + 10 * nodes + 16},
            "kv": {"dram_gib": 0.0625, **kv},
            "telemetry": telemetry or {},
            "log_level": log_level,
        }
        config = load_config(None, overrides)
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        stack = Stack(config, file)
        stacks.append(stack)
        return stack

    yield make
    for stack in stacks:
        stack.stop()


def _shm(fallback: Path) -> Path:
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else fallback
