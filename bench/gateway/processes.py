"""The benchmark's processes: the measured one on one core, the others on the remaining cores."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from cli.own_certificates import with_own_certificates
from loadtest.stack import free_ports
from runtime.config_file import dump_config, load_config

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".cache" / "bench-proxies"
#: The compared release.
PINNED = ("litellm[proxy]==1.106.2",)
_START_S = 90.0


class Processes:
    """Starts processes and ends them with the `with` block. Files go to `scratch`. port: listening ports by name."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._running: dict[str, psutil.Process] = {}
        self.port: dict[str, int] = {}
        cores = sorted(os.sched_getaffinity(0))
        #: Cores of the measured process, and cores of the others.
        self.core, self.others = cores[:1], cores[1:] or cores

    def __enter__(self) -> Processes:
        self._before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.others)
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in self._running.values():
            try:
                process.wait(10)
            except psutil.TimeoutExpired:
                process.kill()
        os.sched_setaffinity(0, self._before)

    def start(self, name: str, command: list[str], port: int, *, measured: bool, **environment: str) -> None:
        """Start a process and wait until it listens. Raises RuntimeError with the end of its log."""
        log = self._scratch / f"{name}.log"
        with log.open("wb") as file:
            cores = self.core if measured else self.others
            process = psutil.Popen(
                command, stdout=file, stderr=file, cwd=self._scratch,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
        self._running[name], self.port[name] = process, port
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                return
            time.sleep(0.1)
        raise RuntimeError(f"{name} did not listen on port {port}: {log.read_text(errors='replace')[-800:]}")

    def upbeat(self, together: int) -> None:
        """Start a scheduler, a gateway, and the backend as the only node."""
        base = free_ports(10)
        scheduler, gateway, grpc, http = base, base + 1, base + 2, base + 3
        config = self._scratch / "upbeat.yaml"
        settings: dict[str, Any] = {
            "data": str(self._scratch / "data"),
            "run_dir": str(self._scratch / "run"),
            "log_level": "warning",
            "scheduler": {"port": scheduler, "hints_per_s": 1e6, "hint_burst": 1e6},
            "gateway": {"port": gateway, "max_advisories_per_s": 1e9},
            "nodes": {"count": 1},
            "model_name": "bench",
        }
        # With certificates, as `upbeat up` has them (tls.automatic).
        config.write_text(dump_config(with_own_certificates(load_config(None, settings))))
        self.start("scheduler", [sys.executable, "-m", "scheduler", "--config", str(config)], scheduler, measured=False)
        backend = [
            sys.executable,
            str(ROOT / "bench" / "gateway" / "backend.py"),
            "--grpc-port",
            str(grpc),
            "--http-port",
            str(http),
        ]
        backend += ["--scheduler", f"127.0.0.1:{scheduler}", "--together", str(together), "--config", str(config)]
        self.start("backend", backend, http, measured=False)
        self.start("gateway", [sys.executable, "-m", "gateway", "--config", str(config)], gateway, measured=True)

    def bare(self) -> None:
        """Start the bare proxy in front of the backend."""
        port = free_ports(1)
        script = ROOT / "bench" / "gateway" / "bare_proxy.py"
        self.start(
            "bare",
            [sys.executable, str(script), str(port), f"http://127.0.0.1:{self.port['backend']}"],
            port,
            measured=True,
        )

    def litellm(self) -> None:
        """Start LiteLLM's proxy in front of the backend: one worker, no logging, no database."""
        python = environment()
        port = free_ports(1)
        config = self._scratch / "litellm.yaml"
        params = {"model": "openai/bench", "api_base": f"http://127.0.0.1:{self.port['backend']}/v1", "api_key": "none"}
        config.write_text(yaml.safe_dump({"model_list": [{"model_name": "bench", "litellm_params": params}]}))
        quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "PYTHONPATH": ""}
        # no key: it listens on loopback, and a check costs time
        quiet["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
        command = [
            str(python.with_name("litellm")),
            "--config",
            str(config),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        self.start("litellm", [*command, "--num_workers", "1"], port, measured=True, **quiet)

    def cpu_s(self, name: str) -> float:
        """Processor seconds used by process `name`."""
        times = self._running[name].cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self, name: str) -> int:
        """Resident memory of process `name`."""
        return int(self._running[name].memory_info().rss)


def environment() -> Path:
    """The interpreter of LiteLLM's environment, which is made if missing."""
    python, done = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed"
    if not done.exists() or done.read_text() != " ".join(PINNED):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PINNED], check=True)
        done.write_text(" ".join(PINNED))
    return python


@contextlib.contextmanager
def measured(processes: Processes, name: str) -> Iterator[dict[str, float]]:
    """Yields a dict that has `cpu_s` of process `name` and `seconds` after the block."""
    found: dict[str, float] = {}
    cpu_s, began = processes.cpu_s(name), time.perf_counter()
    yield found
    found["seconds"] = time.perf_counter() - began
    found["cpu_s"] = processes.cpu_s(name) - cpu_s
