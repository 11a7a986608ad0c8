"""What schedulers are told of a device: all of them, at once when its requests change, seldom when nothing happens."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from contracts.context import ContextBound
from contracts.counts import Counts
from contracts.kv import KvShape
from contracts.models import ModelState, ModelWire
from contracts.residency import MayLend, MemoryShare, Never, WeightsMove, Why
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from runtime import rpc
from runtime.clock import RealClock
from runtime.reporter import PlacedWeights, Reported, Reporter


class Listener(SchedulerServicer):
    """A scheduler that only listens to workers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.hellos: list[pb.WorkerHello] = []
        self.loads: list[pb.WorkerLoad] = []
        self.moves: list[pb.WeightsMoves] = []
        self.every_s = 0.1
        #: What it says to a worker that joins.
        self.says: list[pb.WorkerCommand] = []
        self.refuse = False

    async def start(self) -> None:
        self._server, _ = rpc.server(self.address, ["upbeat.v1.Scheduler"])
        add_SchedulerServicer_to_server(self, self._server)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def WorkerReports(
        self, reports: AsyncIterator[pb.WorkerReport], context: Any
    ) -> AsyncIterator[pb.WorkerCommand]:
        async for report in reports:
            kind = report.WhichOneof("kind")
            if kind == "hello":
                self.hellos.append(report.hello)
                yield pb.WorkerCommand(report_every_s=self.every_s)
                for said in self.says:
                    yield said
            elif kind == "load":
                self.loads.append(report.load)
            elif kind == "moves":
                self.moves.append(report.moves)

    @property
    def finished(self) -> list[str]:
        return [request for load in self.loads for request in load.finished]


class PlayedEngine:
    """As much of an engine as a reporter looks at."""

    def __init__(self) -> None:
        self.model_name = "m"
        self.placed = PlacedWeights()
        self.stalled_s = 0.0
        self.shape = KvShape.of_heads(b"f" * 32, 2, 1, 8, 16, "float32")
        self.finished: collections.deque[str] = collections.deque()
        self.on_requests: Callable[[], None] = lambda: None
        self.run()

    def run(self, *requests: str) -> None:
        """These are in flight now."""
        self.counts = Counts(len(requests), 0, 0, {0: 1.0 * len(requests)}, 0.0, 0.0, 8, 8, 0, requests)
        self.on_requests()


@pytest.fixture
async def world(free_ports: Callable[[int], int]) -> AsyncIterator[tuple[PlayedEngine, Reporter, list[Listener]]]:
    port = free_ports(2)
    listeners = [Listener(f"127.0.0.1:{port + n}") for n in range(2)]
    for listener in listeners:
        await listener.start()
    engine = PlayedEngine()
    reporter = Reporter(
        [Reported(engine, ContextBound(100, 9, 7), 0, 700, 0.5, 0.05, placed=lambda: engine.placed)],  # type: ignore[arg-type]
        schedulers=[x.address for x in listeners],
        node="node-0",
        address="a:1",
        rates={"ssd": 5.0},
        draining=lambda: False,
        device_bytes=1000,
        free_bytes=lambda: 44,
        memory=lambda: [MemoryShare("kv", "m", 956), MemoryShare("free", "", 44)],
    )
    running = asyncio.ensure_future(reporter.run())
    await until(lambda: all(x.loads for x in listeners))
    yield engine, reporter, listeners
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    for listener in listeners:
        await listener.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_reports_say_how_long_the_engine_has_done_nothing(
    world: tuple[PlayedEngine, Reporter, list[Listener]],
) -> None:
    engine, reporter, listeners = world
    engine.stalled_s = 3.5
    reporter.wake()
    async with asyncio.timeout(10):
        while True:
            if any(load.stalled_s == 3.5 for load in listeners[0].loads):
                break
            await asyncio.sleep(0.01)


async def test_every_scheduler_hears_of_every_request_that_ended_even_one_that_was_away(world) -> None:
    engine, _, (first, second) = world
    engine.run("a", "b")
    await until(lambda: all(list(x.loads[-1].in_flight) == ["a", "b"] for x in (first, second)))
    await second.stop()
    engine.finished.append("a")
    engine.run("b")
    await until(lambda: first.finished == ["a"] and list(first.loads[-1].in_flight) == ["b"])
    await second.start()
    await until(lambda: len(second.hellos) == 2 and list(second.loads[-1].in_flight) == ["b"])
    assert [h.connection for h in second.hellos] == [1, 2] and second.hellos[0].instance == second.hellos[
        1
    ].instance != ""
    assert second.loads[-1].number < first.loads[-1].number, "each stream counts its own reports from one"
    assert second.finished.count("a") <= 1 == first.finished.count("a")


async def test_what_changes_is_told_before_the_next_sign_of_life_is_due_and_nothing_else_is(world) -> None:
    engine, reporter, (first, _) = world
    await asyncio.sleep(0.5)
    quiet = len(first.loads)
    assert quiet <= 3, "an idle worker says so once a second"
    for n in range(5):
        engine.run(f"r{n}")
        await until(lambda n=n: list(first.loads[-1].in_flight) == [f"r{n}"])
    reporter.draining = lambda: True
    reporter.wake()
    await until(lambda: first.loads[-1].draining)


async def test_a_scheduler_of_many_nodes_hears_less_often(world) -> None:
    engine, reporter, (first, second) = world
    await second.stop()
    second.every_s = 30.0
    await second.start()
    await until(lambda: reporter.links[1].least_s == 30.0)
    told = len(second.loads)
    for n in range(8):
        engine.run(f"r{n}")
        await until(lambda n=n: list(first.loads[-1].in_flight) == [f"r{n}"])
    assert len(second.loads) <= told + 2, "one on its way, and one that was due before the scheduler had said so"


async def test_a_model_is_reported_by_name_and_in_bytes(world: tuple[PlayedEngine, Reporter, list[Listener]]) -> None:
    engine, reporter, listeners = world
    (model,), hello = listeners[0].hellos[0].models, listeners[0].hellos[0]
    assert (model.name, model.state, model.weight_bytes, model.engine, model.wire) == (
        "m",
        pb.MODEL_STATE_ACTIVE,
        700,
        "native",
        0,
    )
    assert (model.ttft_slo_s, model.tpot_slo_s, hello.device_bytes) == (0.5, 0.05, 1000)
    engine.counts = replace(
        engine.counts,
        running=3,
        outstanding_s={0: 1.5, 2: 0.5},
        request_s=0.25,
        pages_total=8,
        pages_free=5,
        pages_cached=4,
    )
    engine.placed = PlacedWeights(layers_lent=2, may_lend=MayLend(5, 3, 0.5, 0.25, Never.PINNED))
    load = reporter.load(1, reporter.links[0])
    told = pb.MayLend(idle=5, computing=3, transfer_s=0.5, layer_s=0.25, never="pinned")
    assert (load.models[0].layers_lent, load.models[0].may_lend) == (2, told)
    engine.placed = PlacedWeights()
    assert not reporter.load(2, reporter.links[0]).models[0].HasField("may_lend"), "worker.remap is off"
    assert load.device_bytes_free == 44
    assert [(m.use, m.name, m.bytes) for m in load.memory] == [("kv", "m", 956), ("free", "", 44)]
    (of_model,), page_bytes = load.models, engine.shape.piece_bytes
    assert (of_model.model, of_model.running, of_model.request_s) == ("m", 3, 0.25)
    assert (of_model.kv_bytes_used, of_model.kv_bytes_cached, of_model.kv_bytes_limit) == (
        3 * page_bytes,
        4 * page_bytes,
        8 * page_bytes,
    )
    assert (load.hbm_pages_total, load.hbm_pages_free, load.hbm_pages_cached) == (8, 5, 4)
    assert dict(of_model.outstanding_by_priority) == {0: 1.5, 2: 0.5}


def test_a_model_with_http_of_its_own_says_so_and_is_loading_while_its_server_is_down() -> None:
    up, draining = [False], [False]
    reported = Reported(PlayedEngine(), ContextBound(100), 0, kind="vllm", wire=ModelWire.HTTP, active=lambda: up[0])
    reporter = Reporter(
        [reported], schedulers=["a:1"], node="node-0", address="a:2", rates={}, draining=lambda: draining[0]
    )

    def states() -> list[Any]:
        return [reporter.hello(1).models[0].state, reporter.load(1, reporter.links[0]).models[0].state]

    model = reporter.hello(1).models[0]
    assert (model.engine, model.wire) == ("vllm", pb.MODEL_WIRE_HTTP)
    assert states() == [pb.MODEL_STATE_LOADING] * 2
    up[0] = True
    assert states() == [pb.MODEL_STATE_ACTIVE] * 2
    draining[0] = True
    assert states() == [pb.MODEL_STATE_DRAINING] * 2


async def test_moves_of_weights_are_told_when_there_is_a_new_one_and_to_a_scheduler_that_is_back(world) -> None:
    engine, reporter, (first, second) = world
    assert not first.moves, "its weights stay"
    came = WeightsMove(RealClock().now() - 5.0, ModelState.ACTIVE, Why.LENT, "m", 0.5, 2)
    engine.placed = PlacedWeights(moves=(came,))
    reporter.wake()
    await until(lambda: bool(first.moves and second.moves))
    (told,) = first.moves[0].moves
    assert (told.model, told.state, told.why, told.seconds) == ("m", ModelState.ACTIVE, "lent", 0.5)
    assert (told.other, told.layers_lent) == ("m", 2)
    assert 5.0 <= told.ago_s < 15.0
    loads = len(first.loads)
    await second.stop()
    reporter.wake()
    await until(lambda: len(first.loads) > loads + 1)
    assert len(first.moves) == 1, "nothing new"
    await second.start()
    await until(lambda: len(second.moves) == 2)


async def test_a_worker_hears_which_models_are_expected_move_here_and_are_used_elsewhere(world) -> None:
    _, reporter, (first, _) = world
    heard: list[tuple[object, ...]] = []
    reporter.expect = lambda *said: heard.append(("expect", *said))
    reporter.spare = lambda *said: heard.append(("spare", *said))
    first.says = [
        pb.WorkerCommand(wake=pb.WakeModel(model="m", arrival_s=1.0, expires_s=2.0)),
        pb.WorkerCommand(wake=pb.WakeModel(model="m", expires_s=3.0, moves=True)),
        pb.WorkerCommand(spare=pb.SpareModel(model="m", expires_s=4.0)),
    ]
    await first.stop()
    await first.start()
    await until(lambda: len(heard) == 3)
    assert heard == [("expect", "m", 1.0, 2.0, False), ("expect", "m", 0.0, 3.0, True), ("spare", "m", 4.0)]


async def test_a_worker_is_started_again_only_if_it_is_the_one_that_is_meant(world) -> None:
    _, reporter, (first, _) = world
    asked: list[str] = []
    reporter.restart = lambda: asked.append("restart")
    reporter.expect = lambda *said: asked.append("expect")
    first.says = [
        pb.WorkerCommand(restart=pb.RestartWorker(instance="an earlier one")),
        pb.WorkerCommand(restart=pb.RestartWorker()),
        pb.WorkerCommand(wake=pb.WakeModel(model="m")),
        pb.WorkerCommand(restart=pb.RestartWorker(instance=first.hellos[0].instance)),
    ]
    await first.stop()
    await first.start()
    await until(lambda: len(asked) == 2)
    assert asked == ["expect", "restart"]
