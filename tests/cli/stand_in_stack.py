"""Stand-ins for the services, and a launcher that runs them: what `upbeat up` does is tested with real processes.

A stand-in lives as the real services do (`runtime.service`), listens on the ports of its service, and writes what
happens to it into one journal. How it misbehaves is said by `BEHAVIOUR/NAME.json`: `exit` (status, at once), `drain_s`,
`deaf` (SIGTERM is ignored), `lines` (so many numbered ones on stdout and stderr, as fast as it can, from two threads
and a child). The gateway's `/ready?all=1` is 200 when everybody else's port answers, and `/ready` always.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from cli import machine
from cli.settings import BUNDLED_MODEL
from runtime.config_file import load_config

TIMEOUT_S = 40.0

_STAND_IN = r"""#!{python}
import asyncio, contextlib, json, os, signal, subprocess, sys, time
from pathlib import Path
from storelink.arena_sharing import path_of
from runtime.service import arguments, run, serve, Tasks

KIND = Path(sys.argv[0]).name.removeprefix("upbeat-")
OF_DEVICES = ("worker", "sidecar", "vllm-server")
config, number, device = arguments(KIND, with_node=KIND in ("kvstore", *OF_DEVICES), with_device=KIND in OF_DEVICES)
NAME = KIND if KIND in ("gateway", "scheduler") else f"{{KIND}}-{{number}}"
NAME += f"-{{device}}" if KIND in OF_DEVICES and config.nodes.devices > 1 else ""
place = Path(os.environ["STAND_IN_PLACE"])


def note(event):
    with (place / "journal").open("a") as f:
        f.write(json.dumps({{"event": event, "name": NAME, "pid": os.getpid(), "omp": os.environ.get("OMP_NUM_THREADS"),
                             "bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
                             "foreign": sorted(n for n in os.environ if n.startswith("UPBEAT__"))}}) + "\n")


behaviour = {{}}
with contextlib.suppress(FileNotFoundError):
    behaviour = json.loads((place / f"{{NAME}}.json").read_text())
if "exit" in behaviour:
    print("cannot go on: the disk is on fire", file=sys.stderr)
    raise SystemExit(behaviour["exit"])

node = config.node(number)
address = {{"gateway": f"{{config.gateway.host}}:{{config.gateway.port}}", "scheduler": config.scheduler_addresses[0],
           "kvstore": node.store_listen, "worker": node.devices[device].worker_listen,
           "sidecar": node.devices[device].worker_listen,
           "vllm-server": f"127.0.0.1:{{node.devices[device].metrics_port}}"}}[KIND]
others = [config.scheduler_addresses[0]]
for n in range(config.nodes.count):
    others += [config.node(n).store_address, *(d.worker_address for d in config.node(n).devices)]


async def answers(other):
    host, _, port = other.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


def speak(what, fd):
    for i in range(behaviour["lines"]):
        os.write(fd, f"{{os.getpid()}} {{what}} {{i}} {{'x' * (i % 90)}}.\n".encode())


def child_speaks():
    said = f"import os\nfor i in range({{behaviour['lines']}}): os.write(2, b'{{os.getpid()}} child %d .\\n' % i)"
    subprocess.run([sys.executable, "-c", said], check=True)


class StandIn:
    async def start(self):
        host, _, port = address.rpartition(":")
        self.server = await asyncio.start_server(self.answer, host, int(port))
        if KIND == "kvstore":
            path_of(node.arena_stem, b"stand-in").write_bytes(b"kv")
        if "lines" in behaviour:
            speakers = [asyncio.to_thread(speak, what, fd) for what, fd in (("out", 1), ("err", 2))]
            await asyncio.gather(*speakers, asyncio.to_thread(child_speaks))
            note("spoken")
        note("serving")

    async def answer(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            good = not head.startswith(b"GET /ready?all=1 ") or all([await answers(other) for other in others])
            body = b"{{}}" if good else json.dumps({{"missing": ["somebody"]}}).encode()
            head = "200 OK" if good else "503 Not now"
            opening = f"HTTP/1.1 {{head}}\r\ncontent-length: {{len(body)}}\r\nconnection: close\r\n\r\n"
            writer.write(opening.encode() + body)
            await writer.drain()
        writer.close()

    async def drain(self):
        note("draining")
        await asyncio.sleep(behaviour.get("drain_s", 0))
        note("drained")

    async def stop(self):
        self.server.close()


async def main():
    tasks = Tasks()
    if behaviour.get("deaf"):
        asyncio.get_running_loop().add_signal_handler = lambda *_: None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return await serve(StandIn(), tasks.failed, 60.0)


run(main())
"""


class UpbeatUp:
    """One `upbeat up` over stand-ins, in a session of its own. `close` leaves no process behind."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory, self.port = directory, port
        self.place = directory / "place"
        self.run_dir = directory / "run"
        self.output = directory / "output"
        self.bin = directory / "bin"
        self.model = directory / "model"
        self.sessions: list[int] = []
        for made in (self.place, self.bin, self.model):
            made.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            shutil.copyfile(BUNDLED_MODEL / name, self.model / name)
        (self.model / "model.safetensors").write_bytes(b"")
        for kind in ("gateway", "scheduler", "kvstore", "worker", "sidecar", "vllm-server"):
            program = self.bin / f"upbeat-{kind}"
            program.write_text(_STAND_IN.format(python=sys.executable))
            program.chmod(0o755)

    def flags(self, **changes: object) -> list[str]:
        """The command line of this stack, with flags changed (`dram_gib=1`), repeated (a list) or left out (None)."""
        flags = {
            "nodes": 1,
            "model": self.model,
            "port": self.port,
            "data": self.directory / "data",
            "run_dir": self.run_dir,
            "dram_gib": 0.1,
            "hbm_gib": 0.1,
            "bin_dir": self.bin,
        } | changes
        every = {
            name: value if isinstance(value, list) else [value] for name, value in flags.items() if value is not None
        }
        given = [[f"--{name.replace('_', '-')}", str(value)] for name, values in every.items() for value in values]
        return ["up", *(word for pair in given for word in pair)]

    def behave(self, name: str, **behaviour: object) -> None:
        """How the stand-in `name` behaves from its next start on."""
        (self.place / f"{name}.json").write_text(json.dumps(behaviour))

    def start(self, environment: dict[str, str] | None = None, **changes: object) -> subprocess.Popen[bytes]:
        """Start the launcher; returns at once."""
        with self.output.open("ab") as output:
            launcher = subprocess.Popen(
                [str(Path(sys.executable).with_name("upbeat")), *self.flags(**changes)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=os.environ | {"STAND_IN_PLACE": str(self.place)} | (environment or {}),
                start_new_session=True,
            )
        self.sessions.append(launcher.pid)
        return launcher

    def serving(self, environment: dict[str, str] | None = None, **changes: object) -> subprocess.Popen[bytes]:
        """Start the launcher and wait until it says that the stack serves."""
        already = self.said().count("Upbeat serves")
        launcher = self.start(environment, **changes)
        self.until(
            lambda: launcher.poll() is not None or self.said().count("Upbeat serves") > already, "the stack serves"
        )
        assert launcher.poll() is None, self.said()
        return launcher

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until `holds`; fail with the launcher's words when it does not come."""
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain until {what}\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        """Everything the launcher printed."""
        return self.output.read_text() if self.output.exists() else ""

    def journal(self) -> list[dict[str, object]]:
        """What happened to the stand-ins, in order."""
        path = self.place / "journal"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, event: str) -> list[str]:
        """The names to which `event` happened, in order."""
        return [str(entry["name"]) for entry in self.journal() if entry["event"] == event]

    def pids(self) -> dict[str, int]:
        """The running services, as the launcher notes them."""
        pids: dict[str, int] = json.loads((self.run_dir / "pids.json").read_text())
        return pids

    def ready(self) -> bool:
        """Whether the gateway's /ready?all=1 is 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready?all=1", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def members(self) -> list[psutil.Process]:
        """Living processes of every session that was started here."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in self.sessions and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
        return living

    def close(self) -> None:
        """Kill what is left."""
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.until(lambda: not self.members(), "nothing is left")
        machine.remove_shared_memory(load_config(None, {"data": self.directory / "data"}))
