"""The scheduler over real gRPC: nodes join, report and die; hints reach the chosen node's store."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.identity import SCHEDULER
from contracts.ids import SessionKey
from contracts.turn_times import MOST_TOGETHER
from contracts.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from contracts.workflow import Graph, Hop
from gateway.placing import Placing
from runtime import rpc
from runtime.clock import RealClock
from runtime.config_file import load_config
from runtime.service import Tasks
from scheduler.core.callgraph import CallGraph
from scheduler.core.callgraph_stored import to_stored
from scheduler.core.callgraph_table import Callgraphs
from scheduler.server import SchedulerService
from scheduler.workflows import Workflows, path_of

#: Sessions here hold less than a chunk of it, so that to leave a cache costs nothing.
SHAPE = common_pb2.KvShape(fingerprint=b"f" * 32, layers=2, kv_heads=1, head_dim=8, chunk_tokens=1024, dtype="float32")


class FakeNode:
    """A worker's and a store's streams to the scheduler."""

    def __init__(self, stub: Any, name: str, store_address: str = "", device: int = 0, devices: int = 0) -> None:
        self.name, self.commands = name, asyncio.Queue[scheduler_pb2.StoreCommand]()
        self.worker: asyncio.Queue[Any] = asyncio.Queue()
        self.store: asyncio.Queue[Any] = asyncio.Queue()
        model = scheduler_pb2.ModelInfo(name="m", shape=SHAPE)
        hello = scheduler_pb2.WorkerHello(
            node=name, address=f"{name}:1", models=[model], instance="1", device=device, devices=devices
        )
        self.worker.put_nowait(scheduler_pb2.WorkerReport(hello=hello))
        store = scheduler_pb2.StoreHello(node=name, address=store_address or f"{name}:2", instance="1", devices=devices)
        self.store.put_nowait(scheduler_pb2.StoreReport(hello=store))
        self._worker_call = stub.WorkerReports(_drain(self.worker))
        self._store_call = stub.StoreReports(_drain(self.store))
        self._reader = asyncio.ensure_future(self._read())
        self._watcher = asyncio.ensure_future(self._hold())

    async def _read(self) -> None:
        async for command in self._store_call:
            self.commands.put_nowait(command)

    async def _hold(self) -> None:
        async for _ in self._worker_call:
            pass

    async def command(self, kind: str) -> Any:
        """The next command of this kind."""
        while True:
            command = await asyncio.wait_for(self.commands.get(), 10)
            if command.WhichOneof("kind") == kind:
                return getattr(command, kind)

    def hold(self, session: str, tokens: int) -> None:
        held = scheduler_pb2.Held(
            session=key(session),
            model="m",
            tokens_total=tokens,
            tokens_here=tokens,
            bytes_here=tokens * 100,
            last_use_s=1,
        )
        self.store.put_nowait(scheduler_pb2.StoreReport(held=scheduler_pb2.HeldSessions(sessions=[held])))

    def erased(self, session: str, **left: int) -> None:
        word = scheduler_pb2.Erased(taken=True, session=key(session), verified=not left, known=True)
        word.left.extend(scheduler_pb2.TierLeft(tier=tier, chunks=chunks) for tier, chunks in left.items())
        self.store.put_nowait(scheduler_pb2.StoreReport(erased=word))

    def finished(self, request: str) -> None:
        load = scheduler_pb2.WorkerLoad(finished=[request], number=1)
        self.worker.put_nowait(scheduler_pb2.WorkerReport(load=load))

    def end_worker(self) -> None:
        self._worker_call.cancel()

    def die(self) -> None:
        self._worker_call.cancel()
        self._store_call.cancel()


async def _drain(q: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await q.get()


def key(session: str) -> common_pb2.Session:
    return common_pb2.Session(tenant="t", session_id=session)


class World:
    """A scheduler, two nodes, and a gateway's stub."""

    async def start(self, data: Path | None = None, serving: int = 2) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        base = port + 1 if port < 60000 else 20000
        config = load_config(
            None,
            {
                "model_name": "m",
                "scheduler": {"port": port},
                "nodes": {"base_port": base},
                "data": data or Path(self._scratch.name),
            },
        )
        self.service = SchedulerService(config, Tasks())
        await self.service.start()
        self.channel = rpc.channel(config.scheduler_addresses[0], SCHEDULER)
        self.stub: Any = scheduler_pb2_grpc.SchedulerStub(self.channel)
        self.placing = Placing(self.stub)
        self.nodes = [FakeNode(self.stub, f"node-{i}") for i in range(2)]
        await self.until(lambda: sum(n.serving for n in self.service.control.fleet.devices.values()) == serving)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def place(self, session: str, request: str = "r", **more: Any) -> scheduler_pb2.Placement:
        answer = await self.ask(session, request, **more)
        assert answer.HasField("placed"), answer.refused
        return answer.placed

    async def burden(self, node: str) -> None:
        """So much work that it is worth leaving a cache there."""
        for number in range(12):
            await self.place(f"other-{number}", f"other-{number}", pin_node=node)

    async def ask(self, session: str, request: str = "r", **more: Any) -> scheduler_pb2.PlaceAnswer:
        wanted = scheduler_pb2.PlaceRequest(
            request_id=request, session=key(session), model=more.pop("model", "m"), **more
        )
        return await self.placing.ask(wanted, 10)

    async def close(self) -> None:
        for node in self.nodes:
            node.die()
        await self.placing.close()
        await self.channel.close(None)
        await self.service.stop()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.close()


async def test_a_worker_whose_model_others_serve_by_frames_is_refused_with_the_reason(world: World) -> None:
    model = scheduler_pb2.ModelInfo(name="m", shape=SHAPE, wire=scheduler_pb2.MODEL_WIRE_HTTP)

    async def hello() -> AsyncIterator[scheduler_pb2.WorkerReport]:
        yield scheduler_pb2.WorkerReport(hello=scheduler_pb2.WorkerHello(node="node-7", models=[model], instance="1"))

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(world.stub.WorkerReports(hello())))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "another name" in (
        refused.value.details() or ""
    )
    assert "node-7" not in world.service.control.fleet.nodes


async def test_a_hint_goes_to_the_idle_node_and_the_turn_follows_it(world: World) -> None:
    world.nodes[0].hold("s", 640)
    await world.until(lambda: len(world.service.control.directory) == 1)
    await world.burden("node-0")
    advisory = common_pb2.Advisory(session=key("s"), ttl_s=60, advisory_id="a1", priority=-2)
    reply = await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=[advisory]))
    assert list(reply.nodes) == ["node-1"]
    prefetch = await world.nodes[1].command("prefetch")
    assert (
        prefetch.advisory.session.session_id == "s"
        and list(prefetch.source_nodes) == ["node-0"]
        and prefetch.advisory.priority == -2
    )
    placement = await world.place("s", "r2")
    assert placement.advised and placement.node == "node-1" and placement.worker_address == "node-1:1"
    assert list(placement.source_nodes) == ["node-0"] and placement.kept_tokens == 640
    assert (await world.place("new", "r4")).kept_tokens == 0
    assert not (await world.place("s", "r3")).advised, "a hint is good for one turn"


async def test_a_node_says_how_many_devices_it_has_and_is_told_for_which_one_a_hint_is(world: World) -> None:
    control = world.service.control
    first = FakeNode(world.stub, "node-5", device=1, devices=2)
    await world.until(
        lambda: {"node-5/0", "node-5/1"} <= control.fleet.devices.keys() and control.fleet.devices["node-5/1"].serving
    )
    assert [d.state(0.0) for d in control.fleet.nodes["node-5"].devices] == ["starting", "serving"]
    advisory = common_pb2.Advisory(session=key("s"), ttl_s=60, advisory_id="a1", pin_node="node-5")
    assert list((await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=[advisory]))).nodes) == ["node-5/1"]
    assert (await first.command("prefetch")).device == 1
    placement = await world.place("s", "r1", pin_node="node-5")
    assert (placement.node, placement.worker_address, placement.advised) == ("node-5/1", "node-5:1", True)
    first.hold("s", 640)
    await world.until(lambda: control.directory.count("node-5") == 1)
    seen = {n.node: n for n in (await anext(aiter(world.stub.Watch(scheduler_pb2.WatchRequest())))).nodes}
    assert [(seen[name].state, seen[name].sessions) for name in ("node-5/0", "node-5/1")] == [
        ("starting", 1),
        ("serving", 1),
    ]


@pytest.mark.parametrize(("device", "devices"), [(2, 2), (0, 17), (1, 0)])
async def test_a_device_that_no_node_can_have_is_refused(world: World, device: int, devices: int) -> None:
    async def hello() -> AsyncIterator[scheduler_pb2.WorkerReport]:
        yield scheduler_pb2.WorkerReport(
            hello=scheduler_pb2.WorkerHello(node="node-7", address="w", device=device, devices=devices)
        )

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(world.stub.WorkerReports(hello())))
    assert (
        refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "node-7" not in world.service.control.fleet.nodes
    )


async def test_a_turn_that_took_its_hints_route_counts_there_and_is_explained(world: World) -> None:
    world.nodes[0].hold("s", 640)
    await world.until(lambda: len(world.service.control.directory) == 1)
    await world.burden("node-0")
    advisory = common_pb2.Advisory(session=key("s"), ttl_s=60, advisory_id="a1")
    (route,) = (await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=[advisory]))).placements
    assert (route.node, route.worker_address, list(route.source_nodes)) == ("node-1", "node-1:1", ["node-0"])
    assert route.kept_tokens == 640
    placed = await world.place("s", "r2", pin_node="node-1", taken=True)
    assert placed.advised and "r2" in world.service.control.fleet.devices["node-1"].outstanding
    assert world.service.control.advisories.get(SessionKey("t", "s")) is None
    last = (await world.stub.Explain(scheduler_pb2.ExplainRequest(session=key("s")))).decisions[0]
    assert (last.what, last.hinted, last.taken, last.pin_node, last.request_id) == ("turn", True, True, "", "r2")


async def test_where_a_turns_time_went_is_explained_as_far_as_it_can_be_true(world: World) -> None:
    await world.place("s", "r1")
    odd = {"decode": math.nan, "compute": -1.0, "queue": math.inf, "unheard-of": 1.0, "load-ssd": 1e300}
    turns = [
        scheduler_pb2.TurnTimed(
            session=key("s"), request_id="r1", until_first_s={**odd, "admit": 0.5, "memory": 2.0}, after_s=odd
        ),
        scheduler_pb2.TurnTimed(session=key("s"), request_id="r2", until_first_s={"admit": 0.5}),
        scheduler_pb2.TurnTimed(
            session=common_pb2.Session(tenant="other", session_id="s"), request_id="r1", until_first_s={"admit": 9.0}
        ),
        *[scheduler_pb2.TurnTimed()] * MOST_TOGETHER,
        scheduler_pb2.TurnTimed(session=key("s"), request_id="r1", until_first_s={"admit": 7.0}),
    ]
    assert (await world.stub.TurnsTimed(scheduler_pb2.TurnsTimedRequest(turns=turns))).attached == 1
    (turn,) = (await world.stub.Explain(scheduler_pb2.ExplainRequest(session=key("s")))).decisions
    assert (dict(turn.until_first_s), dict(turn.after_s)) == ({"admit": 0.5, "memory": 2.0}, {})


async def test_a_hint_that_no_node_can_use_has_no_route(world: World) -> None:
    advisory = common_pb2.Advisory(session=key("s"), model_id="unknown", ttl_s=60, advisory_id="a1")
    (route,) = (await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=[advisory]))).placements
    assert not route.node


async def test_a_withdrawn_hint_reaches_the_store_that_was_told(world: World) -> None:
    advisory = common_pb2.Advisory(session=key("s"), ttl_s=60, advisory_id="a1")
    node = (await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=[advisory]))).nodes[0]
    reply = await world.stub.Invalidate(
        scheduler_pb2.InvalidateRequest(session=common_pb2.Session(tenant="t"), advisory_id="a1")
    )
    assert reply.known
    told = await world.nodes[int(node[-1])].command("invalidate")
    assert told.session_id == "s"
    assert not (await world.stub.Invalidate(scheduler_pb2.InvalidateRequest(session=key("s")))).known


async def test_an_ordered_batch_keeps_its_order(world: World) -> None:
    batch = [common_pb2.Advisory(session=key(f"s{i}"), ttl_s=60, ordered=True, pin_node="node-0") for i in range(3)]
    await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=batch))
    arrivals = [(await world.nodes[0].command("prefetch")).advisory.expected_arrival_s for _ in range(3)]
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == 3


@pytest.mark.parametrize("messages", [1, 4])
async def test_others_have_their_turn_while_full_messages_of_hints_are_placed(world: World, messages: int) -> None:
    """A message of hints costs as much as the placement of so many turns: they would all wait for it."""
    batch = [common_pb2.Advisory(session=key(f"s{i}"), ttl_s=60) for i in range(64)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.ensure_future(others())
    asked = scheduler_pb2.AdviseRequest(advisories=batch)
    replies = await asyncio.gather(*(world.service.Advise(asked, None) for _ in range(messages)))
    beside.cancel()
    assert all(all(reply.nodes) for reply in replies) and turns >= 15 * messages


async def test_a_hint_nobody_can_use_is_dropped_without_a_word(world: World) -> None:
    advisory = common_pb2.Advisory(session=key("s"), model_id="unknown", ttl_s=60)
    assert list((await world.stub.Advise(scheduler_pb2.AdviseRequest(advisories=[advisory]))).nodes) == [""]


async def test_a_dead_node_gets_nothing_and_its_holdings_are_forgotten(world: World) -> None:
    world.nodes[0].hold("s", 640)
    await world.until(lambda: len(world.service.control.directory) == 1)
    world.nodes[0].die()
    await world.until(lambda: not world.service.control.fleet.devices["node-0"].serving)
    placement = await world.place("s")
    assert placement.node == "node-1" and not placement.source_nodes


async def test_refusals_carry_the_error_as_the_caller_will_read_it(world: World) -> None:
    answer = await world.ask("s", model="nope")
    status, message, param, code = json.loads(answer.refused)
    assert (
        not answer.HasField("placed")
        and (status, param, code) == (404, "model", "model_not_found")
        and "nope" in message
    )


async def test_a_watcher_sees_the_fleet_change(world: World) -> None:
    call = world.stub.Watch(scheduler_pb2.WatchRequest())
    first = await asyncio.wait_for(call.read(), 10)
    assert [n.serving for n in first.nodes] == [True, True] and first.expected_nodes == 2
    world.nodes[1].die()
    async with asyncio.timeout(10):
        while (await call.read()).nodes[1].serving:
            pass
    call.cancel()


async def test_the_samples_of_both_processes_of_a_node_are_kept_until_the_next_ones(world: World) -> None:
    node = world.nodes[0]
    node.worker.put_nowait(
        scheduler_pb2.WorkerReport(metrics=scheduler_pb2.ProcessMetrics(samples={"tokens_total": 3}))
    )
    for reads in (1.0, 2.0):
        node.store.put_nowait(
            scheduler_pb2.StoreReport(
                metrics=scheduler_pb2.ProcessMetrics(samples={'reads_total{source="ssd"}': reads})
            )
        )
    known = world.service.control.fleet.device("node-0")
    await world.until(lambda: known.worker_metrics and known.node.store_metrics == {'reads_total{source="ssd"}': 2.0})
    reply = await world.stub.Metrics(scheduler_pb2.MetricsRequest())
    assert dict(reply.nodes["node-0"].samples) == {"tokens_total": 3.0, 'reads_total{source="ssd"}': 2.0}
    assert not reply.nodes["node-1"].samples


async def test_an_erased_session_is_unknown_and_every_store_is_told_and_confirms(world: World) -> None:
    world.nodes[0].hold("s", 64)
    await world.until(lambda: len(world.service.control.directory) == 1)
    call = world.stub.EraseSession(scheduler_pb2.EraseSessionRequest(session=key("s")))
    for node in world.nodes:
        assert (await node.command("erase")).session_id == "s"
        node.erased("s")
    reply = await call
    assert reply.known and reply.verified and list(reply.nodes) == ["node-0", "node-1"]
    assert [(n.node, n.answered, n.verified) for n in reply.erasures] == [
        ("node-0", True, True),
        ("node-1", True, True),
    ]
    assert not (await world.stub.ListSessions(scheduler_pb2.ListSessionsRequest(tenant="t"))).sessions


async def test_an_erasure_that_a_node_cannot_confirm_is_not_verified_and_is_repeated_when_the_node_is_back(
    world: World,
) -> None:
    world.nodes[1].die()
    await world.until(lambda: "node-1" not in world.service.reports.stores)
    call = world.stub.EraseSession(scheduler_pb2.EraseSessionRequest(session=key("s")))
    await world.nodes[0].command("erase")
    world.nodes[0].erased("s", dram=3)
    reply = await call
    assert reply.known and not reply.verified
    first, second = reply.erasures
    assert first.answered and not first.verified and [(t.tier, t.chunks) for t in first.left] == [("dram", 3)]
    assert (second.node, second.answered, second.verified) == ("node-1", False, False)
    world.nodes[1] = FakeNode(world.stub, "node-1")
    assert (await world.nodes[1].command("erase")).session_id == "s"
    world.nodes[1].erased("s")
    world.nodes[0].erased("s")
    await world.until(
        lambda: not world.service.control.erasures.owed_by("node-0") + world.service.control.erasures.owed_by("node-1")
    )


# ---- workflows ------------------------------------------------------------------------------------------------
async def test_a_hop_hints_the_next_one_and_a_restarted_scheduler_still_knows_the_graph(tmp_path: Path) -> None:
    w = World()
    await w.start(tmp_path)
    try:
        name = scheduler_pb2.WorkflowName(tenant="t", name="team")
        edge = scheduler_pb2.CallEdge(source="a", target="b", probability=1.0, calls=1.0, delay_s=4.0)
        graph = scheduler_pb2.CallGraph(agents=["a", "b"], edges=[edge], learn=True)
        made = await w.stub.DeclareWorkflow(scheduler_pb2.DeclareWorkflowRequest(name=name, graph=graph))
        assert made.name == name and made.declared == graph and (tmp_path / "workflows" / "t" / "team.json").exists()
        await w.place("run:b", "q1", hop=scheduler_pb2.Hop(workflow="team", agent="b", run="run"))
        w.nodes[0].hold("run:b", 640)
        w.nodes[0].finished("q1")
        await w.until(lambda: w.service.control.directory.get(SessionKey("t", "run:b")) is not None)
        await w.place("run:a", "q2", hop=scheduler_pb2.Hop(workflow="team", agent="a", run="run", ended=["q1"]))
        pending = w.service.control.advisories.get(SessionKey("t", "run:b"))
        assert pending is not None
        prefetch = await w.nodes[int(pending.node[-1])].command("prefetch")
        assert prefetch.advisory.session == key("run:b") and 3.0 < prefetch.advisory.expected_arrival_s <= 4.0
        before = await w.stub.GetWorkflow(name)
        assert [(e.source, e.target) for e in before.observed_edges] == [("b", "a")]
    finally:
        await w.close()
    again = World()
    await again.start(tmp_path)
    try:
        after = await again.stub.GetWorkflow(name)
        assert after.declared == graph and after.observed_edges == before.observed_edges
        assert [
            x.name for x in (await again.stub.ListWorkflows(scheduler_pb2.ListWorkflowsRequest(tenant="t"))).workflows
        ] == [name]
        assert (await again.stub.DeleteWorkflow(name)).known and not (await again.stub.DeleteWorkflow(name)).known
        assert not (tmp_path / "workflows" / "t" / "team.json").exists()
        assert not (await again.stub.GetWorkflow(name)).name.name
    finally:
        await again.close()


async def test_a_file_that_is_no_workflow_is_left_and_the_others_are_read(tmp_path: Path) -> None:
    directory = tmp_path / "workflows" / "%2E." / "x.json"
    directory.parent.mkdir(parents=True)
    directory.write_text(json.dumps(to_stored("..", "x", CallGraph(Graph(("a",))))))
    for text, name in (("{", "torn"), ("[]", "list"), ('{"format": 9}', "newer")):
        directory.with_name(f"{name}.json").write_text(text)
    callgraphs = Callgraphs()
    workflows = Workflows(callgraphs, tmp_path / "workflows", RealClock())
    await workflows.load()
    assert list(callgraphs.of_tenant("..")) == ["x"] and directory == path_of(tmp_path / "workflows", ("..", "x"))
    assert len(list(directory.parent.iterdir())) == 4


async def test_a_scheduler_that_stands_in_does_not_write_over_what_another_has_learned(tmp_path: Path) -> None:
    own, other = Callgraphs(), Callgraphs()
    last: tuple[str, ...] = ()
    for i, agent in enumerate(["a", "b", "a"]):
        own.request(f"q{i}", SessionKey("t", agent), Hop("w", agent, "r", last), float(i))
        last = (f"q{i}",)
    await Workflows(own, tmp_path, RealClock()).write()
    other.declare("t", "w", Graph(("a", "b", "c")))
    await Workflows(other, tmp_path, RealClock()).write()
    again = Callgraphs()
    await Workflows(again, tmp_path, RealClock()).load()
    graph, before = again.get("t", "w"), own.get("t", "w")
    assert graph is not None and before is not None and graph.declared == Graph(("a", "b", "c"))
    assert graph.agents == before.agents and graph.agents["a"].seen == 1
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["w.json"]
