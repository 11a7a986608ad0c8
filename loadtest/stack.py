"""A private stack for a test or benchmark: `upbeat up` in its own directory and on free ports.

Always cleans up: however the test ends (an exception, Ctrl-C, SIGTERM, or this process being killed), the stack's
processes get SIGINT, time to drain, and then SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

import psutil
import yaml

from contracts.identity import OPERATOR
from loadtest.ports import is_free
from runtime.config_file import load_config
from runtime.metrics_page import read_metrics
from runtime.places import device_ports, node_ports
from runtime.sections import NodesSection
from runtime.weight_images import remove_unused
from storelink.arena_sharing import arenas_of, remove_dead
from storelink.credentials import Credentials

#: `upbeat up` drains for at most 30 s.
STOP_S = 45.0
#: Range of a stack's ports.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
_PR_SET_PDEATHSIG = 1


class StackError(RuntimeError):
    """The stack did not start, or died. The message ends with the end of the launcher's log."""


class Stack:
    """`with Stack(model=…) as stack:` serves on `stack.url` until the block ends.

    models: several by name, instead of `model`. directory: for data, run files and the log; None: a temporary one,
    deleted at the end. settings: nested like the configuration file. ready_s, stop_s: time limits for starting and for
    draining. launcher: by default the `upbeat` beside this Python. Invariant: its processes run at most once at a time.
    """

    #: This process's stacks that were started and not closed.
    running: ClassVar[weakref.WeakSet[Stack]] = weakref.WeakSet()

    def __init__(
        self,
        *,
        model: Path | None = None,
        models: Mapping[str, Path] | None = None,
        nodes: int = 2,
        policy: str = "balanced",
        cache: bool = True,
        hbm_gib: float | None = None,
        dram_gib: float | None = None,
        directory: Path | None = None,
        settings: dict[str, Any] | None = None,
        ready_s: float = 180.0,
        stop_s: float = STOP_S,
        launcher: Sequence[str] | None = None,
    ) -> None:
        self._launcher = list(launcher or [str(Path(sys.executable).with_name("upbeat"))])
        self._stop_s = stop_s
        self._own_directory = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="upbeat-stack-")) if directory is None else directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.data, self.run_dir, self.log = self.directory / "data", self.directory / "run", self.directory / "up.log"
        self.nodes, self._ready_s, self._settings = nodes, ready_s, settings or {}
        self._flags = ["--nodes", str(nodes), "--policy", policy, "--cache", "on" if cache else "off"]
        for flag, value in (("--model", model and model.absolute()), ("--hbm-gib", hbm_gib), ("--dram-gib", dram_gib)):
            if value is not None:
                self._flags += [flag, str(value)]
        for name, path in (models or {}).items():
            self._flags += ["--model", f"{name}={path.absolute()}"]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The launcher's pid, which is also its processes' session id; 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    @property
    def command(self) -> list[str]:
        """The command line of the launcher."""
        places = [
            "--port",
            str(self.port),
            "--data",
            str(self.data),
            "--run-dir",
            str(self.run_dir),
            "--config",
            str(self.config_file),
        ]
        return [*self._launcher, "up", *self._flags, *places]

    @property
    def config_file(self) -> Path:
        """The configuration file given to the launcher."""
        return self.directory / "config.yaml"

    def __enter__(self) -> Stack:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, settings: dict[str, Any] | None = None) -> None:
        """Start, and wait until every node serves. settings: replace the earlier ones. Raises StackError."""
        if self._process is not None:
            raise StackError("the stack runs already; stop it first")
        if settings is not None:
            self._settings = settings
        sections = {
            name: dict(values) if isinstance(values, dict) else values for name, values in self._settings.items()
        }
        schedulers = sections.setdefault("scheduler", {}).get("count", 1)
        nodes = NodesSection.model_validate(sections.setdefault("nodes", {}) | {"count": self.nodes})
        ports = self.port = free_ports(1 + schedulers + len(node_ports(nodes)) + len(device_ports(nodes)))
        sections["scheduler"]["port"] = ports + 1
        sections["nodes"]["base_port"] = ports + 1 + schedulers
        self.config_file.write_text(yaml.safe_dump(sections))
        self.running.add(self)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent if threading.current_thread() is threading.main_thread() else None,
            )
        self._wait_ready(self._process)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._ready_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise StackError(f"`upbeat up` ended with status {process.returncode}\n{self.last_words()}")
            if self._get("/ready?all=1")[0] == 200:
                return
            time.sleep(0.1)
        raise StackError(f"the stack was not ready within {self._ready_s:.0f} s\n{self.last_words()}")

    def stop(self) -> None:
        """Send SIGINT to the process group, wait for the drain, SIGKILL the rest. Keeps the data. No effect
        if stopped."""
        process, self._process = self._process, None
        if process is None:
            return
        deadline = time.monotonic() + self._stop_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            while members(process.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            while left := members(process.pid):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            process.wait()

    def close(self) -> None:
        """Stop, and remove the arenas and images. Empties the files of a temporary directory now, and deletes it when
        this process ends: for minutes after many deletions, ext4 without a journal takes a millisecond to create a
        file, which would slow the next stack."""
        try:
            self.stop()
        finally:
            self.running.discard(self)
            if self.port:
                config = load_config(self.config_file, {"data": str(self.data), "nodes": {"count": self.nodes}})
                for number in range(self.nodes):
                    remove_dead(arenas_of(config.node(number).arena_stem))
                remove_unused(config.shm_dir)
            if self._own_directory:
                atexit.register(shutil.rmtree, self.directory, ignore_errors=True)
                for path in self.data.rglob("*"):
                    if path.is_file() and not path.is_symlink():
                        os.truncate(path, 0)

    def metrics(self, port: int) -> str:
        """The metrics page of one of its internal processes. Raises OSError."""
        return read_metrics("127.0.0.1", port, self.operator)

    def gateway_metrics(self) -> str:
        """The gateway's. Raises OSError."""
        return read_metrics("127.0.0.1", self.port, None)

    @property
    def operator(self) -> Credentials:
        """The certificate of an operator."""
        return Credentials(self.data / "tls" / str(OPERATOR))

    def model_name(self) -> str:
        """The id of the first model that it serves. Raises StackError if /v1/models fails."""
        status, body = self._get("/v1/models")
        if status != 200:
            raise StackError(f"/v1/models answered {status}")
        return str(json.loads(body)["data"][0]["id"])

    def last_words(self, lines: int = 25) -> str:
        """The end of the launcher's log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def _get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=2) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as e:
            return e.code, b""
        except OSError:
            return 0, b""


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """During the block, SIGTERM raises KeyboardInterrupt, so that every `finally` runs."""

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_ports(count: int) -> int:
    """The first of `count` consecutive free loopback ports. Raises StackError if there are none."""
    # Processes start at different ports, so that concurrent stacks rarely collide.
    span = _LAST_PORT - _FIRST_PORT
    for attempt in range(0, span, count):
        first = _FIRST_PORT + (os.getpid() * 97 + attempt) % (span - count)
        if all(is_free(port) for port in range(first, first + count)):
            return first
    raise StackError(f"no {count} consecutive free ports between {_FIRST_PORT} and {_LAST_PORT}")


def members(session: int) -> list[int]:
    """Pids of running processes of a session. A process whose first thread has ended runs until its other threads have:
    until then it keeps its files and its locks."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and (
                process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
            ):
                pids.append(process.pid)
    return pids


def _prctl() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None


_PRCTL = _prctl()


def die_with_parent() -> None:
    """A `preexec_fn`: the child gets SIGINT when its parent ends."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
