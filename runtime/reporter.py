"""A device's streams of reports, one to each scheduler, reopened forever when they break: for whatever runs its models,
a worker of ours or the sidecar of a vLLM server.

A report is sent when the set of requests changes, but no sooner after the last one than the scheduler allows; otherwise
a few times a second while requests run, and every second as a heartbeat.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from contracts.context import ContextBound
from contracts.convert import may_lend_to_wire, move_to_wire, shape_to_wire
from contracts.counts import Counts
from contracts.finetune import Trains
from contracts.identity import SCHEDULER
from contracts.kv import KvShape
from contracts.models import ModelState, ModelWire
from contracts.residency import MayLend, MemoryShare, WeightsMove
from contracts.v1 import scheduler_pb2, scheduler_pb2_grpc
from runtime import rpc, telemetry
from runtime.clock import RealClock
from runtime.same_secret import Membership
from runtime.training import Training

log = telemetry.logger("runtime.reporter")
#: Seconds between reports: minimum, until the scheduler sets another; maximum while requests run; maximum when idle.
LEAST_S, BUSY_S, IDLE_S = 0.1, 0.25, 1.0
RETRY_S, REFUSED_S = 0.1, 2.0
METRICS_EVERY_S = 1.0


class ReportedEngine(Protocol):
    """What a reporter needs of one model on one device. Attributes may be read on any thread."""

    #: Name in the API.
    model_name: str
    #: Ended requests not yet reported to the scheduler; the reporter removes them.
    finished: collections.deque[str]
    #: Called on any thread when the set of requests has changed.
    on_requests: Callable[[], None]

    @property
    def counts(self) -> Counts:
        """Its load, at most about a tenth of a second old."""
        ...

    @property
    def shape(self) -> KvShape:
        """Shape of its KV."""
        ...

    @property
    def stalled_s(self) -> float:
        """Seconds without progress beyond the time when some was due."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """Whether a model's weights are on the device. activation_s: expected time until they are. idle_s: since its last
    request. moves: when they came and went, by `RealClock`; empty: they stay. layers_lent: to KV; may_lend: None: none,
    ever."""

    state: ModelState = ModelState.ACTIVE
    activation_s: float = 0.0
    idle_s: float = 0.0
    moves: tuple[WeightsMove, ...] = ()
    layers_lent: int = 0
    may_lend: MayLend | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """A model as reported. weight_bytes: on the device. ttft_s, tpot_s: its service targets; 0: none. wire: how
    requests reach it. active: whether it takes requests; else it counts as loading. placed: where its weights are."""

    engine: ReportedEngine
    bound: ContextBound
    created_s: int
    weight_bytes: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    kind: str = "native"
    wire: ModelWire = ModelWire.FRAMES
    active: Callable[[], bool] = lambda: True
    placed: Callable[[], PlacedWeights] = PlacedWeights


class Reporter:
    """Reports to the schedulers which models a device serves, its load, and which requests have ended."""

    def __init__(
        self,
        models: Sequence[Reported],
        *,
        schedulers: Sequence[str],
        node: str,
        address: str,
        rates: dict[str, float],
        draining: Callable[[], bool],
        device_bytes: int = 0,
        free_bytes: Callable[[], int] = lambda: 0,
        memory: Callable[[], Sequence[MemoryShare]] = tuple,
        device: int = 0,
        devices: int = 1,
        expect: Callable[[str, float, float, bool], object] = lambda model, arrival_s, expires_s, moves: None,
        spare: Callable[[str, float], object] = lambda model, expires_s: None,
        trains: Trains | None = None,
        left_out: Mapping[str, str] | None = None,
        restart: Callable[[], object] = lambda: None,
        leave: Callable[[], object] = lambda: None,
    ) -> None:
        """rates: bytes per second from `peer`, `ssd` and `blob`, where measured. device_bytes: the device's memory for
        weights and KV; free_bytes: its unused part; memory: who holds it. device: number on the node, of `devices`.
        expect: called when a request for a cold model is expected, with its name and, from now, when it comes and when
        it is given up, and whether the model moves here. spare: called when requests for a model go elsewhere, with its
        name and, from now, until when. trains: what the device does about fine-tuning jobs; None: nothing, and
        schedulers hear of none. left_out: adopted models that the device does not serve, and why. restart: called when
        a scheduler asks for the worker to be started again. leave: called, perhaps often, when the node is to leave the
        fleet."""
        self._models = tuple(models)
        self.node, self.address, self.draining = node, address, draining
        self._device, self._devices = device, devices
        self._rates, self._device_bytes, self._free_bytes = rates, device_bytes, free_bytes
        self.expect, self.spare = expect, spare
        self._memory = memory
        self.trains = None if trains is None else Training(trains)
        self._left_out, self.restart, self.leave = dict(left_out or {}), restart, leave
        self.instance = uuid.uuid4().hex
        self.membership = Membership()
        self.links = [Link(self, scheduler) for scheduler in schedulers]

    async def run(self) -> None:
        """Reports until cancelled. Raises SecretDiffers at the start if the schedulers have another cluster secret."""
        loop = asyncio.get_running_loop()

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
                loop.call_soon_threadsafe(self.wake)

        for model in self._models:
            model.engine.on_requests = changed
        await asyncio.gather(*(link.run() for link in self.links))

    def wake(self) -> None:
        """Sends reports as soon as allowed."""
        for link in self.links:
            link.changed.set()

    def hello(self, connection: int) -> scheduler_pb2.WorkerHello:
        """The first message of a stream: identity and models."""
        return scheduler_pb2.WorkerHello(
            node=self.node,
            address=self.address,
            models=[self._info(model) for model in self._models],
            instance=self.instance,
            connection=connection,
            device_bytes=self._device_bytes,
            device=self._device,
            devices=self._devices,
            left_out=self._left_out,
            **{f"{source}_bytes_per_s": rate for source, rate in self._rates.items()},
        )

    def _info(self, model: Reported) -> scheduler_pb2.ModelInfo:
        return scheduler_pb2.ModelInfo(
            name=model.engine.model_name,
            shape=shape_to_wire(model.engine.shape),
            max_tokens=model.bound.max_tokens,
            created_s=model.created_s,
            longest_token_bytes=model.bound.longest_token_bytes,
            message_token_bytes=model.bound.message_token_bytes,
            state=self._state(model),
            weight_bytes=model.weight_bytes,
            ttft_slo_s=model.ttft_s,
            tpot_slo_s=model.tpot_s,
            engine=model.kind,
            wire=model.wire.value,  # type: ignore[arg-type]
        )

    def _state(self, model: Reported) -> Any:
        if self.draining():
            return ModelState.DRAINING.value
        return (model.placed().state if model.active() else ModelState.LOADING).value

    def _model_load(self, model: Reported, counts: Counts) -> scheduler_pb2.ModelLoad:
        page_bytes, placed = model.engine.shape.piece_bytes, model.placed()
        return scheduler_pb2.ModelLoad(
            model=model.engine.model_name,
            state=self._state(model),
            running=counts.running,
            waiting=counts.waiting,
            outstanding_tokens=counts.outstanding_tokens,
            outstanding_by_priority=counts.outstanding_s,
            request_s=counts.request_s,
            prefill_token_s=counts.prefill_token_s,
            token_rate=counts.token_rate,
            kv_bytes_used=(counts.pages_total - counts.pages_free) * page_bytes,
            kv_bytes_cached=counts.pages_cached * page_bytes,
            kv_bytes_limit=counts.pages_total * page_bytes,
            idle_s=placed.idle_s,
            activation_s=placed.activation_s,
            layers_lent=placed.layers_lent,
            may_lend=may_lend_to_wire(placed.may_lend),
        )

    def load(self, number: int, link: Link) -> scheduler_pb2.WorkerLoad:
        """The current load, and the requests that have ended since this link's last report."""
        engines = [model.engine for model in self._models]
        for engine in engines:
            while engine.finished:
                ended = engine.finished.popleft()
                for each in self.links:
                    each.finished.append(ended)
        each_counts, finished = [engine.counts for engine in engines], list(link.finished)
        link.finished.clear()
        by_priority: collections.Counter[int] = collections.Counter()
        for counts in each_counts:
            by_priority.update(counts.outstanding_s)
        return scheduler_pb2.WorkerLoad(
            running=sum(counts.running for counts in each_counts),
            waiting=sum(counts.waiting for counts in each_counts),
            outstanding_tokens=sum(counts.outstanding_tokens for counts in each_counts),
            outstanding_s=sum(by_priority.values()),
            request_s=max(counts.request_s for counts in each_counts),
            hbm_pages_total=sum(counts.pages_total for counts in each_counts),
            hbm_pages_free=sum(counts.pages_free for counts in each_counts),
            hbm_pages_cached=sum(counts.pages_cached for counts in each_counts),
            in_flight=[request for counts in each_counts for request in counts.in_flight],
            finished=finished,
            prefill_token_s=max(counts.prefill_token_s for counts in each_counts),
            outstanding_by_priority=by_priority,
            number=number,
            draining=self.draining(),
            stalled_s=max(engine.stalled_s for engine in engines),
            models=[self._model_load(model, counts) for model, counts in zip(self._models, each_counts, strict=True)],
            device_bytes_free=self._free_bytes(),
            memory=[
                scheduler_pb2.MemoryShare(use=share.use, name=share.name, bytes=share.bytes_)
                for share in self._memory()
            ],
        )

    def moves(self) -> list[tuple[str, WeightsMove]]:
        """When weights came and went lately, with the model's name."""
        return [(model.engine.model_name, move) for model in self._models for move in model.placed().moves]


class Link:
    """The stream to one scheduler. finished: ended requests not reported to it yet. least_s: minimum between
    reports."""

    def __init__(self, reporter: Reporter, scheduler: str) -> None:
        self._reporter, self._scheduler = reporter, scheduler
        self.changed = asyncio.Event()
        self.finished: collections.deque[str] = collections.deque(maxlen=100_000)
        self.least_s = LEAST_S
        self._connections = 0

    async def run(self) -> None:
        """Report until cancelled."""
        channel = rpc.channel(self._scheduler, SCHEDULER, rpc.SCHEDULER_RECONNECT_S)
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        try:
            while True:
                try:
                    async for command in stub.WorkerReports(self._reports(), wait_for_ready=True):
                        self._reporter.membership.let_in()
                        match command.WhichOneof("kind"):
                            case "report_every_s":
                                self.least_s = max(command.report_every_s, LEAST_S)
                            case "wake":
                                wake = command.wake
                                self._reporter.expect(wake.model, wake.arrival_s, wake.expires_s, wake.moves)
                            case "spare":
                                self._reporter.spare(command.spare.model, command.spare.expires_s)
                            case "finetune":
                                if self._reporter.trains is not None:
                                    await self._reporter.trains.obey(command.finetune)
                                    self._reporter.wake()
                            case "leave":
                                self._reporter.leave()
                            case "restart":
                                if command.restart.instance == self._reporter.instance:
                                    self._reporter.restart()
                except grpc.aio.AioRpcError as e:
                    log.debug("scheduler not reached", scheduler=self._scheduler, reason=e.details())
                    self._reporter.membership.failed(e, RealClock().now())
                    if e.code() is grpc.StatusCode.INVALID_ARGUMENT:
                        log.error("the scheduler refuses this device", scheduler=self._scheduler, reason=e.details())
                        await asyncio.sleep(REFUSED_S)
                await asyncio.sleep(RETRY_S)
        finally:
            await channel.close(None)

    async def _reports(self) -> AsyncIterator[scheduler_pb2.WorkerReport]:
        self._connections += 1
        yield scheduler_pb2.WorkerReport(hello=self._reporter.hello(self._connections))
        number, metrics_s, now = 0, float("-inf"), RealClock().now
        told: list[tuple[str, WeightsMove]] = []
        while True:
            self.changed.clear()
            number += 1
            load = self._reporter.load(number, self)
            yield scheduler_pb2.WorkerReport(load=load)
            if self._reporter.trains is not None:
                yield scheduler_pb2.WorkerReport(finetunes=self._reporter.trains.report())
            if (moves := self._reporter.moves()) != told:
                told, at_s = moves, now()
                sent = scheduler_pb2.WeightsMoves(moves=[move_to_wire(model, move, at_s) for model, move in moves])
                yield scheduler_pb2.WorkerReport(moves=sent)
            if now() - metrics_s >= METRICS_EVERY_S:
                metrics_s = now()
                yield scheduler_pb2.WorkerReport(metrics=scheduler_pb2.ProcessMetrics(samples=telemetry.samples()))
            await asyncio.sleep(self.least_s)
            rest_s = (BUSY_S if load.in_flight else IDLE_S) - self.least_s
            if rest_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rest_s):
                        await self.changed.wait()
