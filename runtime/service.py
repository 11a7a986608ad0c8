"""A process's life: start, serve until a signal, drain, stop. The `main` of every service is one call of `run`.

The first SIGINT or SIGTERM drains (at most `drain_s`), a second one stops at once. Under `upbeat up`
(`UPBEAT_SUPERVISED=1`) only SIGTERM counts, once: Ctrl-C reaches the whole group, and the launcher stops services in
order. A signal during the start ends the service without a drain. A failed background task is logged and ends the
process, so that the supervisor restarts it whole; a ConfigError ends it with status WRONG_USAGE. A service may ask to
be started again (status START_AGAIN), or end because its node has left the fleet (LEFT): it drains first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import uvloop

from contracts import identity
from contracts.errors import ConfigError
from contracts.exits import LEFT, START_AGAIN, WRONG_USAGE
from contracts.identity import Identity, Role
from runtime import telemetry, tracing
from runtime.config import Config
from runtime.config_file import load_config
from runtime.own_certificate import use_certificate
from runtime.private import keep_private
from runtime.same_secret import use_secret

log = telemetry.logger("runtime.service")

#: Set to 1 by a launcher that stops services in order; they then ignore SIGINT.
SUPERVISED = "UPBEAT_SUPERVISED"


class Service(Protocol):
    """What `run` drives."""

    async def start(self) -> None:
        """Return when serving."""
        ...

    async def drain(self) -> None:
        """Refuse new work and finish what runs."""
        ...

    async def stop(self) -> None:
        """Release everything."""
        ...


class Tasks:
    """A service's background tasks. One that raises ends the service; `cancel` ends them all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Set by a service that is to be started again.
        self.start_again = asyncio.Event()
        #: Set by a service whose node has left the fleet.
        self.left = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` until it returns or `cancel`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            if isinstance(error, ConfigError):
                log.error("cannot serve", error=str(error))
            else:
                log.error("task failed", task=task.get_name(), exc_info=error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the service because of `error`."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks it as retrieved; it is logged already

    async def cancel(self) -> None:
        """End all tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    service: Service,
    failed: asyncio.Future[None],
    drain_s: float,
    start_again: asyncio.Event | None = None,
    left: asyncio.Event | None = None,
) -> int:
    """Start, wait for a signal, a failed task, `start_again` or `left`, drain, stop. Returns the exit status."""
    loop = asyncio.get_running_loop()
    telemetry.watch_tasks(loop)
    supervised = os.environ.get(SUPERVISED) == "1"
    wanted, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if wanted.is_set() and not supervised else wanted).set()

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    loop.add_signal_handler(signal.SIGINT, (lambda: None) if supervised else on_signal)
    stopping = asyncio.ensure_future(wanted.wait())
    starting = asyncio.ensure_future(service.start())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        log.info("stopped while starting")
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await starting
        with contextlib.suppress(Exception):
            await asyncio.wait_for(service.stop(), drain_s)
        return 0
    starting.result()
    again = asyncio.ensure_future((start_again or asyncio.Event()).wait())
    leaving = asyncio.ensure_future((left or asyncio.Event()).wait())
    ends: list[asyncio.Future[Any]] = [stopping, failed, again, leaving]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    asked = LEFT if leaving.done() else START_AGAIN if again.done() and not wanted.is_set() else 0
    for waiting in (stopping, again, leaving):
        waiting.cancel()
    crashed = failed.done()
    if not crashed:
        log.info("draining", limit_s=drain_s)
        drain = asyncio.ensure_future(service.drain())
        impatient = asyncio.ensure_future(hurry.wait())
        await asyncio.wait([drain, impatient], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for t in (drain, impatient):
            t.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await t
    await service.stop()
    await asyncio.to_thread(tracing.stop)
    log.info("stopped")
    if crashed:
        return WRONG_USAGE if isinstance(failed.exception(), ConfigError) else 1
    return asked


class Arguments(NamedTuple):
    """A parsed command line. number: of the node or the service; device: on its node."""

    config: Config
    number: int
    device: int


def arguments(service: str, *, with_node: bool = False, with_device: bool = False, numbered: bool = False) -> Arguments:
    """Parses the command line. Exits with status 2 and one line for a wrong configuration."""
    parser = argparse.ArgumentParser(prog=f"upbeat-{service}")
    parser.add_argument("--config", type=Path, default=None, help="YAML; UPBEAT__SECTION__KEY overrides it")
    parser.add_argument("--secrets", type=Path, default=None, help="YAML with secret settings, which overrides it, too")
    if with_node:
        parser.add_argument("--node", type=int, required=True, help="this node's number, from 0")
    if with_device:
        parser.add_argument(
            "--device", type=int, default=0, help="the device's number on its node, from 0 (nodes.devices)"
        )
    if numbered:
        parser.add_argument(
            "--number", type=int, default=0, help=f"which {service} of the configuration this is, from 0"
        )
    given = parser.parse_args()
    keep_private()
    number = given.node if with_node else given.number if numbered else 0
    try:
        config = load_config(given.config, secrets=given.secrets)
        use_certificate(config, identity.node(f"node-{number}") if with_node else Identity(Role(service)))
        key = use_secret(config.data, make=with_node)
    except ConfigError as e:
        print(f"upbeat-{service}: {e}", file=sys.stderr)
        raise SystemExit(2) from e
    device = given.device if with_device else 0
    name = f"{service}-{number}" if with_node or number else service
    if with_device and config.nodes.devices > 1:
        name = f"{name}-{device}"
    telemetry.configure_logs(name, config.log_level, key)
    try:
        tracing.start(config.telemetry, service, name, key)
    except ConfigError as e:
        print(f"upbeat-{service}: {e}", file=sys.stderr)
        raise SystemExit(2) from e
    return Arguments(config, number, device)


def run(main: Coroutine[Any, Any, int]) -> None:
    """Run a service's main on uvloop and exit with its status."""
    try:
        status = uvloop.run(main)
    except OSError as e:
        log.error("cannot start", error=str(e))
        status = 1
    sys.stderr.flush()
    # Not sys.exit: native threads (gRPC, UCX) could keep a stopped process alive.
    os._exit(status)
