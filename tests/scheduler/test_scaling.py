"""The scheduler's recommendation over real gRPC, and as metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from contracts.v1 import scheduler_pb2
from scheduler.core.scale_policy import Policy, Recommender
from scheduler.core.scale_signals import TTFT
from scheduler.scale_metrics import ScaleMetrics
from scheduler.scaling import SETTLE_S
from tests.scheduler.test_scale_signals import Seen
from tests.scheduler.test_server import FakeNode, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    running = World()
    await running.start()
    yield running
    await running.close()


def report(node: FakeNode, number: int, outstanding_s: float, requests: int) -> None:
    load = scheduler_pb2.WorkerLoad(
        number=number,
        running=requests,
        outstanding_s=outstanding_s,
        request_s=2.0,
        prefill_token_s=1e-3,
        in_flight=[f"{node.name}-{n}" for n in range(requests)],
        hbm_pages_total=100,
        hbm_pages_free=50,
    )
    node.worker.put_nowait(scheduler_pb2.WorkerReport(load=load))


async def test_an_autoscaler_is_told_what_the_fleet_has_to_do(world: World) -> None:
    for node in world.nodes:
        report(node, 1, 45.0, 10)
    fleet = world.service.control.fleet
    await world.until(lambda: all(device.load.outstanding_s == 45.0 for device in fleet.devices.values()))
    decided = [
        scheduler_pb2.SloDecided(model="m", target="ttft", turns=40, kept=30),
        scheduler_pb2.SloDecided(model="m", target="nonsense", turns=1, kept=1),
        scheduler_pb2.SloDecided(model="m", target="ttft", turns=1, kept=2),
    ]
    await world.stub.SloDecided(scheduler_pb2.SloDecidedRequest(decided=decided))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.stub.Scale(scheduler_pb2.ScaleRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "its nodes may still be coming back"
    world.service.scaling.began_s -= SETTLE_S
    world.service.scaling.look()
    said = await world.stub.Scale(scheduler_pb2.ScaleRequest())
    assert (said.nodes, said.devices, said.max_nodes) == (2, 2, 2), "the configuration has two"
    assert said.work_s == pytest.approx(90.0) and said.hbm_needed == pytest.approx(0.5)
    assert said.demand_devices == pytest.approx(said.arriving + 3.0), "90 s of work are to be done in 30 s"
    assert (said.attainment, said.turns) == (0.75, 40)
    assert said.models["m"].turns == {"ttft": 40} and said.models["m"].arriving > 0
    assert dict(said.work_by_device) == {"node-0": pytest.approx(45.0), "node-1": pytest.approx(45.0)}
    assert (said.desired_nodes, said.why, said.incomplete) == (2, "limit", "")


def shown(seen: Seen) -> dict[str, float]:
    registry = CollectorRegistry()
    signals = seen.look()
    registry.register(ScaleMetrics(lambda: (signals, Recommender(Policy(max_nodes=9)).look(signals, 0.0))))
    lines = [
        line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")
    ]
    return {name.removeprefix("upbeat_scheduler_"): float(value) for name, value in lines}


def test_metrics_are_those_of_the_last_look() -> None:
    h = Seen()
    h.report("node-0")
    h.attained.add("m", TTFT, 4, 3, 0.0)
    found = shown(h)
    assert found["desired_nodes"] == 2
    assert found['work_seconds{model="m",node="node-0"}'] == 3.0
    assert found['model_work_seconds{model="m"}'] == 1.5
    assert found['slo_attainment{model="m",target="ttft"}'] == 0.75
    assert found['kv_needed{tier="hbm"}'] == pytest.approx(0.125) and found['kv_needed{tier="dram"}'] == 0
    assert found["utilisation"] == pytest.approx(0.125)


def test_before_the_first_look_there_is_no_recommendation() -> None:
    registry = CollectorRegistry()
    registry.register(ScaleMetrics(lambda: None))
    assert [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")] == []


def test_an_empty_fleet_has_no_recommendation() -> None:
    assert not {"desired_nodes", "utilisation"} & shown(Seen(0)).keys()
