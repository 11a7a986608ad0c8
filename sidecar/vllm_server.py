"""`upbeat-vllm-server`: runs the vLLM server of a device, in the environment that `vllm.python` names.

It ends the whole server when it ends, and whatever an earlier run of it has left before it starts. A server that ends
by itself ends this process too, so that the launcher starts both again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from pathlib import Path

from contracts.errors import ConfigError
from contracts.kv import DTYPE_BYTES
from runtime import gpus, telemetry
from runtime.config import Config
from runtime.config_file import cluster_secret
from runtime.directory_lock import DirectoryLock
from runtime.kept import kept
from runtime.model_directory import weight_bytes
from runtime.model_names import hub_id
from runtime.process_session import ProcessSession, end_left_behind
from runtime.registry import registered
from runtime.sections import GIB
from runtime.service import Tasks, arguments, run, serve
from runtime.vllm_checks import model_of
from runtime.vllm_device import is_cpu_build, served_dtype
from runtime.vllm_places import make_private, missing_python, new_key, vllm_places
from runtime.vllm_transfer import transfer_config
from sidecar.client import ServerGone, ServerSilent, VllmClient
from sidecar.core.command import Served, command, environment

log = telemetry.logger("sidecar.vllm_server")
#: Seconds for a server to end by itself; vLLM takes a few for its engine.
DRAIN_S = 6.0
#: Between two looks at a server that starts, and two notes that it runs.
_LOOK_S, _TOUCH_S = 0.25, 5.0
#: The status with which vLLM refuses its arguments, and with which the launcher gives up.
WRONG_USAGE = 2
#: The least memory for KV that is worth a server.
_LEAST_KV_BYTES = 16 << 20


class ServerEnded(RuntimeError):
    """The server ended by itself. status: of its process, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the vLLM server ended with status {status}; its last lines say why")
        self.status = status


class VllmServerProcess:
    """See the module."""

    def __init__(self, config: Config, number: int, device: int, tasks: Tasks) -> None:
        """number: the node's; device: its device's. Raises ConfigError when nothing there runs in vLLM, or the
        environment is not there."""
        self.config, self.tasks = config, tasks
        self._number, self._device = number, device
        self.own = config.device(number, device)
        self.places = vllm_places(config, number, device)
        self.served = served(config, number, device, is_cpu_build(config))
        python = config.vllm.python
        if not os.access(python, os.X_OK):
            raise ConfigError(missing_python(python))
        self._processes: ProcessSession | None = None

    async def start(self) -> None:
        """Start the server, and return when it serves. Raises ServerEnded, ConfigError, TimeoutError."""
        config, places = self.config, self.places
        make_private(places.directory)
        self._lock = DirectoryLock(places.directory / "lock", "vLLM server", "node or device number (--node, --device)")
        await asyncio.to_thread(self._lock.take)
        if left := await asyncio.to_thread(end_left_behind, places.record):
            log.warning("ended what an earlier vLLM server had left", processes=left)
        places.socket.unlink(missing_ok=True)
        key = kept(places.key, new_key)
        cluster_secret(config.data)
        if len(config.node(self._number).devices) > 1:
            gpus.show_only(self._device)
        line = command(str(config.vllm.python), str(places.socket), self.served)
        log.info("starting vLLM", command=shlex.join(line))
        self._processes = ProcessSession.start(line, environment(os.environ, key, self.served), places.record)
        await self._until_ready(asyncio.ensure_future(self._ended(self._processes)))

    async def _until_ready(self, ended: asyncio.Future[None]) -> None:
        """ended: fails when the server ends; watched from then on."""
        limit_s = self.config.vllm.start_s
        ready = asyncio.ensure_future(self._ready())
        try:
            done, _ = await asyncio.wait({ended, ready}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            ended.cancel()
            raise
        finally:
            ready.cancel()
        if ended in done:
            await ended
        if ready not in done:
            ended.cancel()
            raise TimeoutError(
                f"the vLLM server did not serve within {limit_s:g} s (vllm.start_s); its last lines say how far it came"
            )
        log.info("the vLLM server is up", model=self.served.name)
        self.tasks.start(self._watch(ended), "server")

    async def _watch(self, ended: asyncio.Future[None]) -> None:
        processes = self._processes
        while processes is not None and not ended.done():
            processes.touch()
            await asyncio.wait({ended}, timeout=_TOUCH_S)
        await ended

    async def _ended(self, processes: ProcessSession) -> None:
        """Raise ServerEnded when the server's first process has ended."""
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        try:
            fd = os.pidfd_open(processes.popen.pid)
        except ProcessLookupError:
            raise ServerEnded(processes.popen.wait()) from None
        try:
            loop.add_reader(fd, end.set)
            await end.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        raise ServerEnded(processes.popen.wait())

    async def _ready(self) -> None:
        """Return when the server answers that it is well."""
        client = VllmClient(self.places.socket, lambda: "")
        try:
            while True:
                with contextlib.suppress(ServerGone, ServerSilent):
                    if (await client.ask("/health"))[0] == 200:
                        return
                if self._processes is not None:
                    self._processes.touch()
                await asyncio.sleep(_LOOK_S)
        finally:
            await client.close()

    async def drain(self) -> None:
        """Ask the server to end, and wait for it."""
        if self._processes is not None:
            self._processes.terminate()
            await asyncio.to_thread(self._processes.popen.wait)

    async def stop(self) -> None:
        """End what is left of the server."""
        await self.tasks.cancel()
        if self._processes is not None:
            await asyncio.to_thread(self._processes.kill)
            self.places.socket.unlink(missing_ok=True)


def served(config: Config, number: int, device: int, on_cpu: bool) -> Served:
    """What the device's server serves. on_cpu: it computes on the CPU, in `kv.hbm_gib` of its memory. Raises
    ConfigError."""
    name = model_of(config, number)
    entry = registered(config)[name]
    asked = None if entry.path.is_dir() else hub_id(str(entry.path))
    dtype = served_dtype(config, entry)
    transfer = None
    if config.kv.cache:
        wake = vllm_places(config, number, device).wake
        transfer = transfer_config(config, number, device, wake)
    return Served(
        model=str(entry.path) if asked is None else asked.repo,
        revision=None if asked is None else asked.revision,
        name=name,
        dtype=dtype,
        chunk_tokens=config.kv.chunk_tokens,
        kv_bytes=_kv_bytes(config, entry.path, dtype) if on_cpu else None,
        transfer=transfer,
        arguments=[*config.vllm.args, *entry.vllm_args],
    )


def _kv_bytes(config: Config, path: Path, dtype: str) -> int:
    """What the weights leave of the device's memory, as far as they are here."""
    weights = 0.0
    if path.is_dir():
        weights = float(weight_bytes(path))
        with contextlib.suppress(OSError, ValueError, AttributeError):
            said = json.loads((path / "config.json").read_text(encoding="utf-8"))
            stored = said.get("dtype") or said.get("torch_dtype")
            if stored in DTYPE_BYTES and dtype in DTYPE_BYTES:
                weights *= DTYPE_BYTES[dtype] / DTYPE_BYTES[stored]
    return max(int(config.kv.hbm_gib * GIB - weights), _LEAST_KV_BYTES)


async def _main() -> int:
    config, number, device = arguments("vllm-server", with_node=True, with_device=True)
    tasks = Tasks()
    process: VllmServerProcess | None = None
    try:
        process = VllmServerProcess(config, number, device, tasks)
        return await serve(process, tasks.failed, drain_s=DRAIN_S)
    except (ConfigError, ServerEnded, TimeoutError) as error:
        if process is not None:
            await process.stop()
        log.error("cannot start", error=str(error))
        wrong = isinstance(error, ConfigError) or (isinstance(error, ServerEnded) and error.status == WRONG_USAGE)
        return WRONG_USAGE if wrong else 1


def main() -> None:
    """Entry point."""
    run(_main())


if __name__ == "__main__":
    main()
