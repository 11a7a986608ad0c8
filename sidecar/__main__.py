"""`upbeat-sidecar`: wires the process that makes a vLLM server the worker of its device."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from contracts.context import ContextBound
from contracts.errors import ConfigError
from contracts.http_flights import MESSAGE_BYTES
from contracts.kv import KvShape
from contracts.models import ModelWire
from contracts.v1 import worker_pb2_grpc
from runtime import rpc, telemetry
from runtime.config import Config
from runtime.config_file import cluster_secret
from runtime.directory_lock import DirectoryLock
from runtime.kept import kept
from runtime.metrics_page import serve_metrics
from runtime.model_directory import weight_bytes
from runtime.model_names import hub_id
from runtime.registry import registered
from runtime.reporter import Reported, Reporter
from runtime.service import Tasks, arguments, run, serve
from runtime.vllm_checks import model_of
from runtime.vllm_device import served_dtype
from runtime.vllm_places import VllmPlaces, make_private, new_key, server_url, vllm_places
from sidecar.client import VllmClient
from sidecar.core.flights import Flights
from sidecar.core.served import Facts
from sidecar.core.shape import kv_shape
from sidecar.engine import ServedModel
from sidecar.metrics import SidecarMetrics
from sidecar.relay import Limits, Relay
from sidecar.service import SidecarServer
from sidecar.wake import WakeSocket
from sidecar.warming import Warming
from sidecar.watching import Watching

log = telemetry.logger("sidecar")
#: Bytes by which a gateway may lengthen a body.
_HEAD_BYTES = 1 << 20
#: Calls at a time: two of each gateway, health checks.
_CALLS = 256
_LOOK_S = 0.05


class SidecarProcess:
    """Everything one sidecar holds: a device's connection to its vLLM server, and what the fleet sees of it."""

    def __init__(self, config: Config, number: int, device: int, tasks: Tasks) -> None:
        """number: the node's; device: its device's. Raises ConfigError when the node has no such device, or serves no
        model in vLLM."""
        self.config, self.places, self.own, self.tasks = (
            config,
            config.node(number),
            config.device(number, device),
            tasks,
        )
        self.model = model_of(config, number)
        self.entry = registered(config)[self.model]
        self.vllm = vllm_places(config, number, device)
        self._place: Path | str = server_url(config, number, device) or self.vllm.socket
        self.reporter: Reporter | None = None
        self._wake: WakeSocket | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._metrics: WSGIServer | None = None

    async def start(self) -> None:
        """Listen, watch the server, and report once it serves."""
        config, own = self.config, self.own
        self._lock = DirectoryLock(own.lock, "worker", "node or device number (--node, --device)")
        await asyncio.to_thread(self._lock.take)
        make_private(self.vllm.directory)
        self.flights = Flights()
        self.client = VllmClient(self._place, _key_of(config, self._place, self.vllm))
        self.watching = Watching(self.client, self.model, self.flights, self._changed, config.kv.cache)
        self.served = ServedModel(self.model, self._shape(None), self.flights, self.watching)
        self.handler = SidecarServer(self.model, self.flights)
        body_bytes = config.gateway.max_body_bytes + _HEAD_BYTES
        limits = Limits(
            body_bytes,
            max(config.gateway.body_memory_bytes, body_bytes),
            config.worker.max_waiting,
            len({key.tenant for key in config.gateway.api_keys}) > 1,
        )
        self.handler.relay = Relay(
            self.client,
            self.watching,
            self.served,
            self.flights,
            cluster_secret(config.data),
            limits,
            lambda: self.handler.draining,
        )
        self.warming = Warming(self.client, self.model, self.flights, self.watching)
        self._wake = WakeSocket(self.vllm.wake, self.watching.wake, self.warming.offer)
        await self._wake.open()
        self._serve_metrics()
        self.server, self._health = rpc.server(
            own.worker_listen,
            ["upbeat.v1.Worker"],
            {
                "grpc.max_receive_message_length": MESSAGE_BYTES,
                "grpc.max_concurrent_streams": _CALLS,
            },
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self.handler, self.server)  # type: ignore[no-untyped-call]
        await rpc.set_serving(self._health, False)
        await self.server.start()
        self.tasks.start(self.watching.run(), "watching")
        self.tasks.start(self.warming.run(), "warming")
        self.tasks.start(self._report(), "reporter")
        log.info("waiting for the vLLM server", model=self.model, at=str(self._place))

    async def _report(self) -> None:
        while (facts := self.watching.facts) is None or not self.watching.up:  # noqa: ASYNC110 - another task's state
            await asyncio.sleep(_LOOK_S)
        # vLLM may just have downloaded it.
        self.served.shape = self._shape(await asyncio.to_thread(_model_config, [self.entry.path, Path(facts.root)]))
        self.reporter = self._reporter(facts)
        await self.reporter.run()

    def _shape(self, model_config: dict[str, Any] | None) -> KvShape:
        dtype = served_dtype(self.config, self.entry)
        return kv_shape(model_config, self.model, self.config.kv.chunk_tokens, dtype)

    def _reporter(self, facts: Facts) -> Reporter:
        config, entry = self.config, self.entry
        reported = Reported(
            self.served,
            ContextBound(facts.max_tokens),
            int(time.time()),
            weight_bytes(entry.path) if entry.path.is_dir() else 0,
            entry.ttft_s,
            entry.tpot_s,
            entry.engine,
            ModelWire.HTTP,
            lambda: self.watching.up,
        )
        return Reporter(
            [reported],
            schedulers=config.scheduler_addresses,
            node=self.places.name,
            address=self.own.worker_address,
            device=self.own.number,
            devices=len(self.places.devices),
            rates={},
            draining=lambda: self.handler.draining,
            leave=self._leave,
        )

    def _changed(self) -> None:
        if self.reporter is not None:
            self.reporter.wake()
        self.tasks.start(rpc.set_serving(self._health, self.watching.up and not self.handler.draining), "health")

    def _serve_metrics(self) -> None:
        """Serve Prometheus metrics on the device's port; a failure only logs a warning."""
        metrics = SidecarMetrics(self.served, self.watching, self.flights, self.handler.relay.tally, self.warming)
        telemetry.REGISTRY.register(metrics)
        try:
            host = self.own.worker_listen.rpartition(":")[0]
            self._metrics = serve_metrics(host, self.own.metrics_port)
        except OSError as e:
            log.warning("no metrics", error=str(e))

    def _leave(self) -> None:
        if self._leaving is None:
            log.info("the node is to leave the fleet")
            self._leaving = self.tasks.start(self._end_and_leave(), "leave")

    async def _end_and_leave(self) -> None:
        await self.drain()
        self.tasks.left.set()

    async def drain(self) -> None:
        """Tell schedulers and gateways at once, then finish what the server has."""
        self.handler.draining = True
        if self.reporter is not None:
            self.reporter.wake()
        await self.handler.drain()

    async def stop(self) -> None:
        """Stop listening."""
        await self.tasks.cancel()
        await self.server.stop(0.2)
        if self._wake is not None:
            self._wake.close()
        await self.client.close()
        if self._metrics is not None:
            threading.Thread(target=_ended, args=(self._metrics,), daemon=True).start()  # it looks twice a second


def _ended(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()


def _key_of(config: Config, place: Path | str, vllm: VllmPlaces) -> Callable[[], str]:
    """How the server's key is read. Raises ConfigError when its variable is not set."""
    if isinstance(place, Path):
        key = kept(vllm.key, new_key)
        return lambda: key
    name = config.vllm.api_key_env
    key = config.vllm.api_key or (os.environ.get(name, "") if name else "")
    if name and not key:
        raise ConfigError(f"vllm.api_key_env = {name!r}: this variable is not set; set it to the server's API key")
    return lambda: key


def _model_config(places: Sequence[Path]) -> dict[str, Any] | None:
    """The model's config.json, from the first of these directories or hub ids that is here; None: none is."""
    for place in places:
        file: Any = place / "config.json"
        if not place.is_dir() and (asked := hub_id(str(place))) is not None:
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(asked.repo, "config.json", revision=asked.revision)
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            continue
        if isinstance(found, dict):
            return found
    log.warning("the model's config.json is not here: the sizes of its KV are taken for a common model's")
    return None


async def _main() -> int:
    config, number, device = arguments("sidecar", with_node=True, with_device=True)
    tasks = Tasks()
    try:
        process = SidecarProcess(config, number, device, tasks)
        return await serve(process, tasks.failed, drain_s=20.0, left=tasks.left)
    except ConfigError as error:
        log.error("cannot start", error=str(error))
        return 2


def main() -> None:
    """Entry point."""
    run(_main())


if __name__ == "__main__":
    main()
