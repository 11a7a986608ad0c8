"""Schedulers, and the reporters of workers that train in no time: for tests of fine-tuning jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from contracts.context import ContextBound
from contracts.finetune import Job
from contracts.finetune_wire import job_to_wire
from contracts.identity import SCHEDULER
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1 import scheduler_pb2_grpc
from runtime import rpc
from runtime.adopted_models import adopted
from runtime.config_file import load_config
from runtime.reporter import Reported, Reporter
from runtime.service import Tasks
from scheduler.server import SchedulerService
from tests.played_trainer import PlayedTrainer
from tests.runtime.test_reporter import PlayedEngine


class FinetuneStack:
    """Schedulers, and a worker a node with a store beside it."""

    def __init__(self, data: Path, port: int, nodes: int, schedulers: int = 1, **more: Any) -> None:
        settings: dict[str, Any] = {
            "model_name": "m",
            "data": data,
            "scheduler": {"port": port, "count": schedulers},
            "nodes": {"base_port": port + 10, "count": nodes},
        } | more
        self.config = load_config(None, settings)
        self.trainers: list[PlayedTrainer | None] = [PlayedTrainer(0.5 - 0.1 * n) for n in range(nodes)]
        #: Of each worker, beside adopted ones; and adopted ones that it leaves out, with the reason.
        self.models: list[list[str]] = [["m"] for _ in range(nodes)]
        self.left_out: list[dict[str, str]] = [{} for _ in range(nodes)]
        #: Workers that a scheduler had started again, in order.
        self.restarted: list[int] = []
        self.services: list[SchedulerService] = []
        self.running: list[asyncio.Future[Any]] = []

    async def start(self) -> None:
        for number in range(len(self.config.scheduler_addresses)):
            await self.start_scheduler(number)
        self.channels = [rpc.channel(address, SCHEDULER) for address in self.config.scheduler_addresses]
        self.stubs: list[Any] = [scheduler_pb2_grpc.SchedulerStub(channel) for channel in self.channels]
        for number in range(len(self.trainers)):
            self.running.append(asyncio.ensure_future(self._store(number)))
            self.start_worker(number)
        await until(self.serve)

    async def serve(self) -> bool:
        async for fleet in self.stubs[0].Watch(pb.WatchRequest()):
            return all(node.state == "serving" for node in fleet.nodes) and len(fleet.nodes) == len(self.trainers)
        return False

    async def start_scheduler(self, number: int) -> None:
        service = SchedulerService(self.config, Tasks(), number=number)
        self.services[number:number] = [service]
        await service.start()

    async def kill_scheduler(self) -> None:
        """Nothing is stored at its end."""
        service = self.services.pop(0)

        async def lost(**_: Any) -> None:
            pass

        service.finetunes.write = lost  # type: ignore[method-assign]
        await service.stop()

    def start_worker(self, number: int) -> asyncio.Future[Any]:
        def restart() -> None:
            self.restarted.append(number)
            running.cancel()
            self.start_worker(number)

        engines = []
        for name in [*self.models[number], *(adopted(self.config).keys() - self.left_out[number].keys())]:
            engines.append(PlayedEngine())
            engines[-1].model_name = name
        reporter = Reporter(
            [Reported(engine, ContextBound(100), 0) for engine in engines],  # type: ignore[arg-type]
            schedulers=self.config.scheduler_addresses,
            node=f"node-{number}",
            address=f"node-{number}:1",
            rates={},
            draining=lambda: False,
            trains=self.trainers[number],
            left_out=self.left_out[number],
            restart=restart,
        )
        running = asyncio.ensure_future(reporter.run())
        self.running.append(running)
        return running

    async def _store(self, number: int) -> None:
        async def said() -> AsyncIterator[pb.StoreReport]:
            hello = pb.StoreHello(node=f"node-{number}", address="a:1", instance="1")
            yield pb.StoreReport(hello=hello)
            await asyncio.Event().wait()

        async def hold(stub: Any) -> None:
            while True:
                try:
                    async for _ in stub.StoreReports(said(), wait_for_ready=True):
                        pass
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(hold(stub) for stub in self.stubs))

    async def stop(self) -> None:
        for running in self.running:
            running.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        for channel in self.channels:
            await channel.close(None)
        for service in self.services:
            await service.stop()

    def job(self, number: int = 1, **more: Any) -> pb.FinetuneJob:
        out = self.config.data / "out" / str(number)
        return job_to_wire(Job(f"ftjob-{number:08d}", "t", "m", "/data.jsonl", str(out), created_s=1.0, **more))

    async def get(self, number: int = 1) -> pb.Finetune:
        return await self.stubs[0].GetFinetune(pb.FinetuneName(id=f"ftjob-{number:08d}"), wait_for_ready=True)

    async def runs(self, state: str = "running") -> None:
        async def holds() -> bool:
            return (await self.get()).progress.state == state

        await until(holds)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(40):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
