"""`upbeat-worker`: wires the worker's process."""

from __future__ import annotations

import asyncio
import sys
import time

import torch
from prometheus_client import start_http_server

from contracts.errors import ConfigError
from contracts.kv import tenant_salt
from contracts.profile import Profile, Subject
from contracts.v1 import worker_pb2_grpc
from runtime import rpc, telemetry
from runtime.clock import RealClock
from runtime.collector import keep_what_is_here
from runtime.config import GIB, Config, cluster_secret
from runtime.directory_lock import DirectoryLock
from runtime.profiles import fitting
from runtime.registry import of_node, registered
from runtime.service import Tasks, arguments, run, serve
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.devices.platforms import choose_platform
from worker.devices.runner import Steps
from worker.engine import failpoints
from worker.engine.device import Device
from worker.engine.engine import Engine
from worker.link.kv_loader import KvLoader
from worker.link.loads import LoadTable
from worker.link.store_link import StoreLink
from worker.measure.profiles import compute_threads, measured_rates, profile_of, seed, seed_loads, subject
from worker.measure.steps import BRIEF, on_free_pages
from worker.memory.paged_kv import PagedKv
from worker.models.load import Model, load_model
from worker.service.metrics import WorkerMetrics
from worker.service.reporter import Reporter, Standing
from worker.service.server import WorkerServer, longest
from worker.text.codec import TextCodec

log = telemetry.logger("worker")
#: Counted from the worker's own port.
METRICS_PORT = 2
#: How long a thread may keep the interpreter's lock from others that want it, in seconds.
_SWITCH_S = 2e-4


class WorkerProcess:
    """Everything one worker process holds."""

    def __init__(self, config: Config, number: int, tasks: Tasks) -> None:
        self.config, self.places, self.tasks = of_node(config, number), config.node(number), tasks
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Load the model, serve, attach to the store, report to the scheduler."""
        config, places = self.config, self.places
        await self._lock()
        threads = compute_threads(config)
        failpoints.arm(config.worker.failpoints)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        began = time.monotonic()
        platform = choose_platform(config, threads)
        memory, granule = platform.memory, config.worker.granule_bytes
        w, digests = config.worker, config.run_dir / "digests"
        model = load_model(config.model, memory, w.dtype, w.device, config.kv.chunk_tokens, digests, platform.pack)
        codec = TextCodec.load(config.model)
        shape = model.shape
        kv = PagedKv(memory, shape, max(memory.free * granule // shape.piece_bytes, 1))
        slabs = memory.free // kv.slab_granules
        layers = shape.layers
        if slabs * kv.pages_per_slab < 4 * layers:
            raise ConfigError(
                f"kv.hbm_gib = {config.kv.hbm_gib}: weights take {model.weight_bytes / GIB:.2f} GiB, which leaves no room for KV; raise it"
            )
        pool = PagePool(slabs, kv.pages_per_slab, layers)
        table = LoadTable()
        secret = cluster_secret(config.data)
        salts: dict[str, bytes] = {}

        def salt_of(tenant: str) -> bytes:
            return salts.setdefault(tenant, tenant_salt(secret, tenant))

        runner, copier = platform.movers(model, kv)
        self.loader = KvLoader(kv, table, lambda event: self.engine.inbox.put(event), copier)
        profile = self._profile(model, kv, runner, subject(shape, threads, platform.computes))
        cache = HbmCache(pool, config.kv.layer_priority, config.kv.hold_hinted)
        device = Device(shape, kv, cache, table, self.loader, RealClock(), config.kv, salt_of)
        self.engine = Engine(device, runner, codec, model.eos_ids, config.served_model, config.worker, platform.niceness)
        seed(self.engine.core.pace, profile)
        seed_loads(self.engine.core.state.rates, profile, shape.piece_bytes)
        max_tokens = longest(model.max_tokens, pool.total, layers, shape.chunk_tokens)
        self.engine.on_crash = self._engine_died
        self.loader.start()
        self.engine.start()
        self._serve_metrics()
        self.handler = WorkerServer(self.engine, codec, max_tokens, model.config.vocab_size, w)
        self.server, health = rpc.server(places.worker_listen, ["upbeat.v1.Worker"])
        worker_pb2_grpc.add_WorkerServicer_to_server(self.handler, self.server)  # type: ignore[no-untyped-call]
        await self.server.start()
        await rpc.set_serving(health, True)
        if config.kv.cache:
            to_engine, to_loader = self.engine.inbox.put, self.loader.from_store
            link = StoreLink(places.store_address, places.name, shape, to_engine, to_loader, config.kv.hugepages)
            device.link = self.loader.link = link
            self.tasks.start(link.run(), "store link")
        said = registered(config)[config.served_model]
        self.reporter = Reporter(
            self.engine,
            schedulers=config.scheduler_addresses,
            node=places.name,
            address=places.worker_address,
            bound=self.handler.bound,
            created_s=int(time.time()),
            rates=measured_rates(profile),
            draining=lambda: self.handler.draining,
            standing=Standing(
                model.weight_bytes, memory.total * granule, lambda: memory.free * granule, said.ttft_s, said.tpot_s, said.engine
            ),
        )
        self.tasks.start(self.reporter.run(), "reporter")
        keep_what_is_here()
        log.info("serving", model=config.served_model, max_tokens=max_tokens, pages=pool.total, start_s=round(time.monotonic() - began, 2))

    async def _lock(self) -> None:
        """One worker for a node: two would report as one. Raises ConfigError when there is another."""
        self._directory_lock = DirectoryLock(self.places.directory / "worker.lock", "worker")
        try:
            await asyncio.to_thread(self._directory_lock.take)
        except OSError as e:
            log.warning("the node's directory cannot be locked: make sure that no other worker has this node's number", error=str(e))

    def _profile(self, model: Model, kv: PagedKv, runner: Steps, what: Subject) -> Profile:
        """The one that was made before, or else the least of one, measured now: the first requests are planned by it already."""
        profile, why = fitting(self.config, what)
        if profile is not None:
            log.info("profile", measured_on=profile.measured_on, sources=sorted(profile.loads))
            return profile
        w, steps = self.config.worker, list[str]()
        computed = on_free_pages(runner, kv, BRIEF.within(w.max_batch, w.step_tokens, model.max_tokens), RealClock(), steps.append)
        log.info("no profile", reason=why, measured=steps)
        return profile_of(what, self.config.served_model, model.shape, computed)

    def _serve_metrics(self) -> None:
        """Prometheus' text beside the worker's port; a worker without metrics still serves."""
        telemetry.REGISTRY.register(WorkerMetrics(self.engine))
        host, _, port = self.places.worker_listen.rpartition(":")
        try:
            start_http_server(int(port) + METRICS_PORT, addr=host, registry=telemetry.REGISTRY)
        except OSError as e:
            log.warning("no metrics", error=str(e))

    def _engine_died(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.tasks.fail, error)

    async def drain(self) -> None:
        """Finish what runs, then what is on its way down; the schedulers hear of it at once."""
        self.handler.draining = True
        self.reporter.wake()
        await self.handler.drain()

    async def stop(self) -> None:
        """Stop listening and end the threads."""
        await self.tasks.cancel()
        await self.server.stop(0.2)
        await self.handler.stop()
        self.engine.stop()
        self.loader.stop()


async def _main() -> int:
    config, number = arguments("worker", with_node=True)
    tasks = Tasks()
    try:
        return await serve(WorkerProcess(config, number, tasks), tasks.failed, drain_s=20.0)
    except ConfigError as error:
        log.error("cannot start", error=str(error))
        return 2


def main() -> None:
    """Entry point."""
    # A step calls native code some times a layer, and after each call the engine's thread asks for the interpreter's lock again. Threads
    # that read prompts would keep it waiting for 5 ms each time.
    sys.setswitchinterval(_SWITCH_S)
    run(_main())


if __name__ == "__main__":
    main()
