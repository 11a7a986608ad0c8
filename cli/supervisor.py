"""Runs a stack: starts its processes, restarts those that die, and stops them in order.

Invariants: a planned process has at most one running instance; nothing starts once `stopping` is set; when `run`
returns, no process, no arena and no unused image of weights of the stack is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import machine
from cli.addresses import base_url, unverified
from cli.core.plan import STOP_ORDER, Planned, compute_threads, own_cores
from cli.core.restart import AT_ONCE_S, RestartPolicy, Verdict
from cli.core.secrets import HUB_TOKEN_PATH, passed_on
from cli.display import Display
from cli.logs import Logs
from cli.process import Process, log_end
from cli.written import configuration_file, hub_token_file, secrets_file
from contracts.exits import LEFT, START_AGAIN
from runtime.config import Config
from runtime.process_session import end_left_behind
from runtime.registry import models_of
from runtime.service import SUPERVISED
from runtime.vllm_places import vllm_places

TAIL_LINES = 20
MIB = 1 << 20
_POLL_S = 0.1
#: A second signal within this time is the first one delivered twice (to the launcher and to its group), in seconds.
_SAME_SIGNAL_S = 0.5


_WORKER, _VLLM_SERVER = "upbeat-worker", "upbeat-vllm-server"
_OF_DEVICES = (_WORKER, _VLLM_SERVER, "upbeat-sidecar")


@dataclass(frozen=True, slots=True)
class Run:
    """What is run. plan: its processes, in starting order. ready: whether all of it serves (status 200), and else what
    is missing. announce: says that it serves for the first time, after so many seconds."""

    plan: Sequence[Planned]
    ready: Callable[[], Awaitable[tuple[int, str]]]
    announce: Callable[[float], None]


class Supervisor:
    """Runs one stack, or a part of one, in the foreground. keep_open: descriptors that every process inherits."""

    def __init__(self, config: Config, programs: Path, display: Display, keep_open: Sequence[int], run: Run) -> None:
        self._config, self._programs, self._display, self._keep_open = config, programs, display, tuple(keep_open)
        self._logs = Logs(config.run_dir / "logs", int(config.log_mib * MIB), config.log_files, keep_open, display.line)
        self._running: dict[str, Process] = {}
        self._plan, self._run = list(run.plan), run
        self._has_served = False
        #: Processes that have ended for good, and that are to end so.
        self._left, self._to_end = set[str](), set[str]()
        self._status = 0
        self._stop_asked_s = 0.0

    async def run(self) -> int:
        """Serve until a signal, or until a service cannot be started. Returns the exit status."""
        self._stopping, self._at_once, self._died = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_signal)
        self._logs.open(planned.name for planned in self._plan)
        machine.remove_shared_memory(self._config)
        self._lives = {
            planned.name: asyncio.create_task(self._live(planned), name=planned.name) for planned in self._plan
        }
        readiness = asyncio.create_task(self._watch_readiness())
        try:
            await self._stopping.wait()
            readiness.cancel()
            await self._stop()
        finally:
            for process in self._running.values():
                process.send(signal.SIGKILL)
            results = await asyncio.gather(*self._lives.values(), readiness, return_exceptions=True)
            await self._logs.close()
            machine.remove_shared_memory(self._config)
            await asyncio.to_thread(self._end_left_behind)
            self._note_pids()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self._status

    def _on_signal(self) -> None:
        now = time.monotonic()
        if not self._stopping.is_set():
            self._stop_asked_s = now
            self._stopping.set()
        elif now - self._stop_asked_s > _SAME_SIGNAL_S:
            self._at_once.set()

    async def _live(self, planned: Planned) -> None:
        try:
            await self._keep_alive(planned)
        except BaseException:
            self._status = 1
            self._stopping.set()
            raise

    def _end_left_behind(self) -> None:
        """End what vLLM servers that were killed have left."""
        for planned in self._plan:
            if planned.program == _VLLM_SERVER and planned.node is not None:
                end_left_behind(vllm_places(self._config, planned.node, planned.device).record)

    async def _keep_alive(self, planned: Planned) -> None:
        # A vLLM server notices late what is wrong with its model or its arguments.
        policy = RestartPolicy(self._config.vllm.start_s if planned.program == _VLLM_SERVER else AT_ONCE_S)
        while not self._stopping.is_set():
            if planned.name in self._to_end:  # its node has left while it waited
                self._has_left(planned)
                return
            process = self._start(planned)
            status = await process.ended()
            del self._running[planned.name]
            self._note_pids()
            if self._stopping.is_set():
                return
            if status == LEFT or planned.name in self._to_end:
                self._has_left(planned)
                return
            alive_s = time.monotonic() - process.started_s
            await self._logs.settled()
            last = "".join(log_end(process.log, 1))
            verdict = policy.exited(alive_s=alive_s, status=status, last_line=last, has_served=self._has_served)
            self._show_exit(planned, process, status, alive_s, verdict)
            if verdict.delay_s is None:
                self._status = 1
                self._stopping.set()
                return
            self._died.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(verdict.delay_s):
                    await self._stopping.wait()

    def _has_left(self, planned: Planned) -> None:
        """A process of a node that leaves the fleet has ended. A vLLM server ends with its sidecar, and whatever is
        left of a node with its store; a launcher without processes ends, too."""
        self._display.line(f"{planned.name} has ended, as its node leaves the fleet")
        self._left.add(planned.name)
        of_node = [p for p in self._plan if p.node == planned.node]
        if planned.program == "upbeat-kvstore":
            self._to_end |= {p.name for p in of_node}
        elif planned.program == "upbeat-sidecar":
            self._to_end |= {p.name for p in of_node if p.program == _VLLM_SERVER and p.device == planned.device}
        for process in self._running_of([p.name for p in of_node if p.name in self._to_end]):
            process.send(signal.SIGTERM)
        if len(self._left) == len(self._plan):
            self._stopping.set()

    def _start(self, planned: Planned) -> Process:
        process = Process(
            self._programs / planned.program,
            self._arguments(planned),
            log=self._logs.path(planned.name),
            output=self._logs.output(planned.name),
            environment=self._environment(planned),
            keep_open=self._keep_open,
        )
        self._running[planned.name] = process
        self._note_pids()
        self._display.line(f"started {planned.program}{self._place_of(planned)} (pid {process.pid})")
        return process

    def _arguments(self, planned: Planned) -> list[str]:
        secrets = secrets_file(self._config, planned.program)
        more = ["--secrets", str(secrets)] if secrets.exists() else []
        return [*planned.arguments(str(configuration_file(self._config))), *more]

    def _place_of(self, planned: Planned) -> str:
        """For messages: the node or device, and the models if there are several."""
        if planned.node is None:
            return ""
        if planned.program not in _OF_DEVICES:
            return f" of node-{planned.node}"
        models = f" with {' and '.join(models_of(self._config, planned.node))}" if len(self._config.models) > 1 else ""
        return f" of {self._config.device(planned.node, planned.device).name}{models}"

    def _environment(self, planned: Planned) -> dict[str, str]:
        # The written configuration includes the environment's settings: do not apply them twice.
        said = {name: value for name, value in os.environ.items() if not name.startswith("UPBEAT__")}
        environment = passed_on(said, os.path.isfile)
        environment[SUPERVISED] = "1"
        cores = sorted(os.sched_getaffinity(0))
        if planned.program == _VLLM_SERVER:
            if (token := hub_token_file(self._config)).exists():
                environment[HUB_TOKEN_PATH] = str(token)
            return environment | self._cores_of(planned, cores, environment)
        threads = compute_threads(self._config.worker.threads, len(cores), self._config.devices)
        threads = threads if planned.program == _WORKER else 1
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = str(
            threads
        )
        return environment

    def _cores_of(self, planned: Planned, cores: Sequence[int], said: dict[str, str]) -> dict[str, str]:
        """Where a vLLM server on the CPU binds its threads, if others share the cores: by itself it takes all."""
        config, name = self._config, "VLLM_CPU_OMP_THREADS_BIND"
        if name in said or config.devices < 2 or planned.node is None:
            return {}
        own = own_cores(cores, planned.node * config.nodes.devices + planned.device, config.devices)
        return {name: ",".join(map(str, own))}

    def _show_exit(self, planned: Planned, process: Process, status: int, alive_s: float, verdict: Verdict) -> None:
        if status == START_AGAIN:
            self._display.line(f"{planned.name} (pid {process.pid}) ended after {alive_s:.1f} s to be started again")
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        then = "giving up" if verdict.delay_s is None else f"starting it again in {verdict.delay_s:.1f} s"
        self._display.line(f"{planned.name} (pid {process.pid}) {how} after {alive_s:.1f} s; {then}", "bold red")
        if verdict.show_log:
            tail = "\n  ".join(log_end(process.log, TAIL_LINES)) or "(empty)"
            self._display.line(f"the end of {process.log}:\n  {tail}")

    async def _watch_readiness(self) -> None:
        """Announce when the whole stack serves: at first, and again after a service died."""
        since = time.monotonic()
        while True:
            while True:
                status, why = await self._run.ready()
                if status == 200:
                    break
                waited = int(time.monotonic() - since) // 30 * 30
                hint = f" (waited {waited} s; see {self._config.run_dir / 'logs'})" if waited else ""
                self._display.wait(f"waiting for the stack to serve{why and ': ' + why}{hint}")
                await asyncio.sleep(_POLL_S)
            self._display.wait("")
            took_s = time.monotonic() - since
            if self._has_served:
                self._display.line(f"serving again after {took_s:.1f} s", "green")
            else:
                self._run.announce(took_s)
            self._has_served = True
            self._died.clear()
            await self._died.wait()
            since = time.monotonic()
            # Until the others notice the death, /ready may still be true.
            await asyncio.sleep(1.0)

    async def _stop(self) -> None:
        self._display.wait("")
        self._display.line("stopping: finishing requests and write-back (Ctrl-C again stops at once)")
        began = time.monotonic()
        lost: list[str] = []
        at_once = asyncio.create_task(self._at_once.wait())
        for program, deadline_s in STOP_ORDER:
            names = [planned.name for planned in self._plan if planned.program == program]
            for process in self._running_of(names):
                process.send(signal.SIGTERM)
            ends = asyncio.gather(*(self._lives[name] for name in names), return_exceptions=True)
            left_s = max(0.0, began + deadline_s - time.monotonic())
            awaited: list[asyncio.Future[Any]] = [ends, at_once]
            await asyncio.wait(awaited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            lost += [name for name in names if name in self._running]
            for process in self._running_of(names):
                process.send(signal.SIGKILL)
            await ends
        at_once.cancel()
        took_s = time.monotonic() - began
        note = f"; killed before it had finished: {', '.join(lost)}" if lost else ""
        self._display.line(f"stopped in {took_s:.1f} s{note}")
        self._status = self._status or (1 if lost else 0)

    def _running_of(self, names: list[str]) -> list[Process]:
        return [self._running[name] for name in names if name in self._running]

    def _note_pids(self) -> None:
        """Write RUN_DIR/pids.json, pids by process name, atomically."""
        path = self._config.run_dir / "pids.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({name: process.pid for name, process in self._running.items()}))
        fresh.replace(path)


async def ask_ready(config: Config) -> tuple[int, str]:
    """The status of the gateway's /ready?all=1, and what is missing; status 0 if it does not answer."""
    host, port = base_url(config).partition("://")[2].rsplit(":", 1)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=unverified(config))
            writer.write(f"GET /ready?all=1 HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read(65_536)).partition(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]), _reason(body)
    except (OSError, TimeoutError, ValueError, IndexError):
        return 0, "the gateway does not answer yet"
    finally:
        if writer is not None:
            writer.close()


def _reason(body: bytes) -> str:
    try:
        return "; ".join(json.loads(body)["missing"])
    except (ValueError, KeyError, TypeError):
        return ""
