"""`upbeat-worker`: wires the worker's process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time

import torch

from contracts.errors import ConfigError
from contracts.exits import START_AGAIN, WRONG_USAGE
from contracts.kv import tenant_salt
from contracts.models import ModelState
from contracts.v1 import worker_pb2_grpc
from runtime import rpc, telemetry
from runtime.clock import RealClock
from runtime.collector import keep_what_is_here
from runtime.config import Config
from runtime.config_file import cluster_secret
from runtime.directory_lock import DirectoryLock
from runtime.gpus import others, show_only
from runtime.metrics_page import serve_metrics
from runtime.registry import as_only, load_links, registered
from runtime.reporter import PlacedWeights, Reported, Reporter
from runtime.service import Tasks, arguments, run, serve
from storelink.link import StoreLink
from worker.adopting import Adopting, StartWithFewer
from worker.devices.device import choose_device
from worker.engine import failpoints
from worker.engine.device_loop import DeviceLoop
from worker.measure.initial_pace import compute_threads, measured_rates
from worker.memory.device_memory import DeviceMemory
from worker.memory.preparing import Preparing
from worker.service.hosted import Hosted
from worker.service.metrics import WorkerMetrics
from worker.service.server import WorkerServer
from worker.service.vllm_names import VllmNames
from worker.serving import Serving, present, serve_all
from worker.text.tokenising import Tokenising
from worker.training import NoTraining, harvesting_of, why_not

log = telemetry.logger("worker")
#: Interpreter switch interval, in seconds (see `main`).
SWITCH_S = 2e-4


class WorkerProcess:
    """Everything one worker process holds: a device, and the models that its node serves."""

    def __init__(self, config: Config, number: int, tasks: Tasks, device: int = 0) -> None:
        """number: the node's; device: its device's. Raises ConfigError if the node has no such device."""
        self.places, self.own, self.tasks = config.node(number), config.device(number, device), tasks
        self.config, self._number = config, number
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the models, serve, attach to the store, report to the scheduler. Raises StartWithFewer."""
        places, own = self.places, self.own
        await self._lock()
        adopting = Adopting(self.config, self._number, own.adopting)
        config = self.config = adopting.config
        self._models = present(as_only(config, self._number))
        threads = compute_threads(config)
        failpoints.arm(config.worker.failpoints)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        began = time.monotonic()
        if len(places.devices) > 1 and config.worker.device != "cpu":
            show_only(own.number, others(own.number, len(places.devices), load_links(config, len(self._models))))
        secret = cluster_secret(config.data)
        salts: dict[str, bytes] = {}

        def salt_of(tenant: str) -> bytes:
            return salts.setdefault(tenant, tenant_salt(secret, tenant))

        with adopting:
            device = choose_device(config, threads, [each.model for each in self._models.values()])
            self.served = serve_all(self._models, device, threads, salt_of)
        self.servings = self.served.servings
        self.harvesting = harvesting_of(self.served, device.memory, device.partition, config)
        self.device_loop = DeviceLoop(
            [serving.engine for serving in self.servings],
            device.niceness,
            self.served.placing,
            Preparing(device.memory).turn,
            self.harvesting,
        )
        self.device_loop.on_crash = self._engine_died
        for serving in self.servings:
            serving.loader.on_crash = self._engine_died
            serving.loader.start()
        self.device_loop.start()
        self._serve_metrics(device.memory)
        tokenising = Tokenising()
        hosted = [
            Hosted(s.engine, s.image.codec, s.max_tokens, s.image.model.config.vocab_size, config.worker, tokenising)
            for s in self.servings
        ]
        self.handler = WorkerServer(hosted, tokenising)
        self.server, health = rpc.server(own.worker_listen, ["upbeat.v1.Worker"])
        worker_pb2_grpc.add_WorkerServicer_to_server(self.handler, self.server)  # type: ignore[no-untyped-call]
        await self.server.start()
        await rpc.set_serving(health, True)
        if config.kv.cache:
            ends = [serving.end for serving in self.servings]
            log_of_link = telemetry.logger("storelink.link")
            link = StoreLink(
                places.store_address, own.name, ends, log_of_link, config.kv.hugepages, own.number, places.name
            )
            for serving in self.servings:
                serving.executor.link = serving.loader.link = link
            self.tasks.start(link.run(), "store link")
        memory, granule, placing = device.memory, config.worker.granule_bytes, self.served.placing
        self.reporter = Reporter(
            [self._reported(serving, each) for serving, each in zip(self.servings, hosted, strict=True)],
            schedulers=config.scheduler_addresses,
            node=places.name,
            address=own.worker_address,
            device=own.number,
            devices=len(places.devices),
            rates=measured_rates(self.servings[0].profile),
            draining=lambda: self.handler.draining,
            device_bytes=memory.total * granule,
            free_bytes=lambda: memory.free * granule,
            expect=placing.expect if placing is not None else _ignored,
            spare=placing.spare if placing is not None else _ignored,
            memory=memory.shares,
            trains=self.harvesting or NoTraining(why_not(self.served, device.partition, config)),
            left_out=adopting.left_out,
            restart=self._restart,
            leave=self._leave,
        )
        if placing is not None:
            placing.on_moves = self._report_soon
        if self.harvesting is not None:
            self.harvesting.on_progress = self._report_soon
        self.tasks.start(self.reporter.run(), "reporter")
        keep_what_is_here()
        for s in self.servings:
            log.info(
                "serving",
                model=s.image.name,
                max_tokens=s.max_tokens,
                pages=s.pool.total,
                start_s=round(time.monotonic() - began, 2),
            )

    def _reported(self, serving: Serving, hosted: Hosted) -> Reported:
        entry = registered(self.config)[hosted.name]
        return Reported(
            serving.engine,
            hosted.bound,
            int(time.time()),
            serving.image.model.weight_bytes,
            entry.ttft_s,
            entry.tpot_s,
            entry.engine,
            placed=functools.partial(self._placed, serving),
        )

    def _placed(self, serving: Serving) -> PlacedWeights:
        idle_s, model = serving.engine.idle_s, serving.image.name
        if self.served.placing is None:
            return PlacedWeights(idle_s=idle_s)
        residency = self.served.placing.residency
        resident = residency.models[model]
        may_lend = resident.may_lend(serving.engine.counts.running, RealClock().now())
        return PlacedWeights(
            resident.state, residency.activation_s(model), idle_s, resident.moves, resident.layers_lent, may_lend
        )

    def _state(self, model: str) -> ModelState:
        placing = self.served.placing
        return ModelState.ACTIVE if placing is None else placing.residency.models[model].state

    def _report_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
            self._loop.call_soon_threadsafe(self.reporter.wake)

    async def _lock(self) -> None:
        """Lock the device, as two workers of one name would report as one. Raises ConfigError if it is locked."""
        self._directory_lock = DirectoryLock(self.own.lock, "worker", "node or device number (--node, --device)")
        try:
            await asyncio.to_thread(self._directory_lock.take)
        except OSError as e:
            log.warning(
                "the node's directory cannot be locked: make sure that no other worker has this node's and "
                "device's number",
                error=str(e),
            )

    def _serve_metrics(self, memory: DeviceMemory) -> None:
        """Serve Prometheus metrics on the device's port; a failure only logs a warning."""
        placing = self.served.placing
        telemetry.REGISTRY.register(
            WorkerMetrics(
                [serving.engine for serving in self.servings],
                memory.usage,
                placing.residency if placing is not None else None,
                placing.circulations if placing is not None else {},
            )
        )
        if self.config.worker.vllm_names:
            telemetry.REGISTRY.register(VllmNames([serving.engine for serving in self.servings], self._state))
        host = self.own.worker_listen.rpartition(":")[0]
        try:
            serve_metrics(host, self.own.metrics_port)
        except OSError as e:
            log.warning("no metrics", error=str(e))

    def _restart(self) -> None:
        log.info("a scheduler asks for a restart")
        self.tasks.start_again.set()

    def _leave(self) -> None:
        if self._leaving is None:
            log.info("the node is to leave the fleet")
            self._leaving = self.tasks.start(self._end_and_leave(), "leave")

    async def _end_and_leave(self) -> None:
        await self.drain()
        self.tasks.left.set()

    def _engine_died(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.tasks.fail, error)

    async def drain(self) -> None:
        """Tell the schedulers at once, then finish running requests and their write-back."""
        self.handler.draining = True
        self.reporter.wake()
        await self.handler.drain()

    async def stop(self) -> None:
        """Stop listening and end the threads."""
        await self.tasks.cancel()
        await self.server.stop(0.2)
        await self.handler.stop()
        self.device_loop.stop()
        for serving in self.servings:
            serving.loader.stop()
        self.served.close()


def _ignored(*said: object) -> None:
    """What the scheduler says of models, where weights stay."""


async def _main() -> int:
    config, number, device = arguments("worker", with_node=True, with_device=True)
    tasks = Tasks()
    try:
        process = WorkerProcess(config, number, tasks, device)
        return await serve(process, tasks.failed, drain_s=20.0, start_again=tasks.start_again, left=tasks.left)
    except StartWithFewer:
        return START_AGAIN
    except ConfigError as error:
        log.error("cannot start", error=str(error))
        return WRONG_USAGE


def main() -> None:
    """Entry point."""
    # A step calls native code several times per layer, and the engine thread reacquires the interpreter lock after each
    # call. At the default interval, threads that read prompts could delay it by 5 ms each time.
    sys.setswitchinterval(SWITCH_S)
    run(_main())


if __name__ == "__main__":
    main()
