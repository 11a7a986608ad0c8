"""The scheduler's gRPC service: passes calls to the core and answers with its decisions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import grpc

from contracts.convert import session_from_wire
from contracts.errors import NotFound, RequestError, to_wire
from contracts.identity import Role
from contracts.turn_times import MOST_TOGETHER, checked
from contracts.v1 import scheduler_pb2, scheduler_pb2_grpc
from runtime import rpc, telemetry
from runtime.callers import as_itself, caller
from runtime.clock import Clock, RealClock
from runtime.config import Config
from runtime.registry import registered
from runtime.service import Tasks
from scheduler import metrics, tracing
from scheduler.adoptions import Adoptions
from scheduler.convert import decision_to_wire, hint_from_wire, hop_from_wire
from scheduler.core.advisories import Hint, in_order
from scheduler.core.control import Ask, Control, Settings
from scheduler.core.gathering import Gathering
from scheduler.finetunes import FinetuneJobs
from scheduler.members import Members
from scheduler.plugins import policy_named
from scheduler.reports import Reports
from scheduler.scale_metrics import ScaleMetrics
from scheduler.scaling import Scaling
from scheduler.views import Views
from scheduler.workflows import Workflows

log = telemetry.logger("scheduler")
_STATUS = {400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND, 503: grpc.StatusCode.UNAVAILABLE}
_TICK_S = 0.5
_Answer = TypeVar("_Answer")
#: Hints that are placed before waiting calls run; each takes as long as placing a turn.
_HINTS_IN_A_ROW = 4


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """One scheduler process. All state is soft and lives in the core."""

    def __init__(self, config: Config, tasks: Tasks, clock: Clock | None = None, number: int = 0) -> None:
        """number: which of the configured schedulers. Raises ConfigError if that or the configured policy does not
        exist."""
        self.config, self.tasks, self.clock = config, tasks, clock or RealClock()
        self.listen = config.scheduler_listen(number)
        self._gathering = Gathering(self.clock.now())
        section = config.scheduler
        models = registered(config)
        settings = Settings(
            policy_named(section.policy),
            tuple(models),
            tuple(config.node(n).name for n in range(config.nodes.count)),
            section.hints_per_s,
            section.hint_burst,
            pinned=frozenset(name for name, model in models.items() if model.pinned),
            min_nodes={name: model.min_nodes for name, model in models.items() if model.min_nodes},
            moves_models=number == 0 and config.sharing in ("prism", "swap"),
        )
        self.control = Control(settings)
        self.reports = Reports(self.control, self.clock)
        self.reports.joined = self.gathering
        self.members = Members(self.control, self.reports, config.data / "members" / f"{number}.json")
        self.views = Views(config, self.control, self.reports, self.clock, self.gathering)
        self.scaling = Scaling(config, self.control, self.clock, self.gathering)
        self._metrics = (metrics.SchedulerMetrics(self.control), ScaleMetrics(lambda: self.scaling.last))
        self.workflows = Workflows(self.control.callgraphs, config.data / "workflows", self.clock)
        owns = number == 0
        self.finetunes = FinetuneJobs(self.control.fleet, self.reports, config.data / "finetune", self.clock, owns=owns)
        self.adoptions = (
            Adoptions(config, self.finetunes.core, self.control.fleet, self.reports, self.clock) if owns else None
        )
        if self.adoptions is not None:
            rollout = self.adoptions.rollout
            self.finetunes.clearing = lambda: rollout.clearing
        self._hinting = asyncio.Lock()  #: messages of hints take turns
        self._server: grpc.aio.Server | None = None

    # ---- life --------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Load workflows and fine-tuning jobs, and listen."""
        await self.workflows.load()
        await self.finetunes.load()
        await self.members.load()
        self._server, health = rpc.server(self.listen, ["upbeat.v1.Scheduler"])
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        await self._server.start()
        await rpc.set_serving(health, True)
        self.tasks.start(self._tick(), "tick")
        self.tasks.start(self.scaling.run(), "recommend a size")
        for collector in self._metrics:
            telemetry.REGISTRY.register(collector)
        self.tasks.start(self.workflows.keep(), "keep workflows")
        self.tasks.start(self._run_finetunes(), "fine-tuning jobs")
        log.info("serving", address=self.listen)

    async def drain(self) -> None:
        """Nothing here outlives a call."""

    async def stop(self) -> None:
        """Store workflows and fine-tuning jobs, and stop listening."""
        await self.tasks.cancel()
        await self.workflows.write()
        await self.finetunes.write()
        await self.members.write()
        await self.views.close()
        for collector in self._metrics:
            with contextlib.suppress(KeyError):  # start() was never called
                telemetry.REGISTRY.unregister(collector)
        if self._server:
            await self._server.stop(0.2)

    async def _tick(self) -> None:
        while True:
            await self.clock.sleep(_TICK_S)
            now = self.clock.now()
            self.reports.carry_out(self.control.tick(now))
            while self.control.late(now):
                await asyncio.sleep(0)
                self.control.expire(now)
            await self.members.tick()

    async def _run_finetunes(self) -> None:
        while True:
            await self.clock.sleep(_TICK_S)
            gathering = self.gathering()
            if self.adoptions is not None and not gathering:
                await self.adoptions.tick()
            await self.finetunes.tick(gathering=gathering)

    def gathering(self) -> bool:
        """Whether the scheduler does not know its fleet yet (`core.gathering`)."""
        return self._gathering.lasts(self.clock.now(), self.control.fleet, self.views.expected_devices())

    # ---- placement and hints -----------------------------------------------------------------------------------
    async def Place(
        self, request_iterator: AsyncIterator[scheduler_pb2.PlaceRequests], context: Any
    ) -> AsyncIterator[Any]:
        """See the proto."""
        async for message in request_iterator:
            yield scheduler_pb2.PlaceAnswers(answers=[self._place(request) for request in message.requests])

    def _place(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceAnswer:
        if self.gathering():
            return scheduler_pb2.PlaceAnswer()
        avoid = frozenset(request.avoid_nodes)
        session, hop = session_from_wire(request.session), hop_from_wire(request)
        ask = Ask(
            request.request_id, session, request.model, request.priority, request.pin_node, avoid, hop, request.taken
        )
        began_s = time.monotonic()
        try:
            placed = self.control.place(ask, self.clock.now())
        except RequestError as e:
            metrics.REFUSED.inc()
            tracing.refused(request, e.message)
            return scheduler_pb2.PlaceAnswer(refused=json.dumps(to_wire(e)))
        ended_s = time.monotonic()
        metrics.DECISION.observe(ended_s - began_s)
        tracing.placed(request, placed, began_s, ended_s)
        self.reports.carry_out(placed.commands)
        found = scheduler_pb2.Placement(
            node=placed.node,
            worker_address=self.control.fleet.devices[placed.node].worker_address,
            source_nodes=placed.sources,
            kept_tokens=placed.kept,
            advised=placed.advised,
            why=placed.choice.why,
            hint_trace=placed.hint_trace,
        )
        return scheduler_pb2.PlaceAnswer(placed=found)

    async def Advise(self, request: scheduler_pb2.AdviseRequest, context: Any) -> scheduler_pb2.AdviseReply:
        """Place each hint and tell its store. A hint that no node can take gets an empty placement."""
        now, began_s = self.clock.now(), time.monotonic()
        hints = [hint_from_wire(advisory, i, now) for i, advisory in enumerate(request.advisories)]
        ordered = in_order(hints, now)
        for first in range(0, len(ordered), _HINTS_IN_A_ROW):
            async with self._hinting:
                for hint in ordered[first : first + _HINTS_IN_A_ROW]:
                    self.reports.carry_out(self.control.advise(hint, now), now)
                await asyncio.sleep(0)
        pending = [self.control.advisories.get(hint.session) for hint in hints]
        nodes = [
            p.node if p is not None and p.hint.advisory_id == h.advisory_id else ""
            for p, h in zip(pending, hints, strict=True)
        ]
        tracing.advised(hints, nodes, began_s, time.monotonic())
        return scheduler_pb2.AdviseReply(nodes=nodes, placements=[self._route_hint(hint, now) for hint in hints])

    def _route_hint(self, hint: Hint, now: float) -> scheduler_pb2.Placement:
        route = self.control.hinted_route(hint.session, hint.advisory_id, now)
        if route is None:
            return scheduler_pb2.Placement()
        node, sources, kept = route
        address = self.control.fleet.devices[node].worker_address
        return scheduler_pb2.Placement(
            node=node,
            worker_address=address,
            source_nodes=sources,
            kept_tokens=kept,
            advised=True,
            hint_trace=hint.trace,
        )

    async def Invalidate(self, request: scheduler_pb2.InvalidateRequest, context: Any) -> scheduler_pb2.InvalidateReply:
        """See the proto."""
        key = session_from_wire(request.session) if request.session.session_id else None
        commands = self.control.withdraw(key, request.session.tenant, request.advisory_id)
        self.reports.carry_out(commands or ())
        return scheduler_pb2.InvalidateReply(known=commands is not None)

    # ---- nodes -------------------------------------------------------------------------------------------------
    async def WorkerReports(
        self, request_iterator: AsyncIterator[scheduler_pb2.WorkerReport], context: Any
    ) -> AsyncIterator[Any]:
        """See the proto."""
        try:
            reports = as_itself(request_iterator, context, "Scheduler/WorkerReports")
            async for message in self.reports.of_worker(reports):
                yield message
        except RequestError as e:
            log.error("a worker was refused", error=e.message)
            await _refuse(context, e)

    async def StoreReports(
        self, request_iterator: AsyncIterator[scheduler_pb2.StoreReport], context: Any
    ) -> AsyncIterator[Any]:
        """See the proto."""
        try:
            reports = as_itself(request_iterator, context, "Scheduler/StoreReports")
            async for message in self.reports.of_store(reports):
                yield message
        except RequestError as e:
            log.error("a store was refused", error=e.message)
            await _refuse(context, e)

    async def LeaveNode(self, request: scheduler_pb2.LeaveNodeRequest, context: Any) -> scheduler_pb2.LeaveNodeReply:
        """See the proto. An unknown node is refused, and one that cannot leave now."""
        return await _answered(context, self.members.leave(request))

    # ---- views -------------------------------------------------------------------------------------------------
    async def Watch(self, request: scheduler_pb2.WatchRequest, context: Any) -> AsyncIterator[scheduler_pb2.Fleet]:
        """See the proto."""
        async for message in self.views.watch():
            yield message

    async def Metrics(self, request: scheduler_pb2.MetricsRequest, context: Any) -> scheduler_pb2.FleetMetrics:
        """See the proto."""
        return self.views.metrics()

    async def ListSessions(
        self, request: scheduler_pb2.ListSessionsRequest, context: Any
    ) -> scheduler_pb2.ListSessionsReply:
        """See the proto."""
        return self.views.sessions(request)

    async def GetSession(self, request: scheduler_pb2.GetSessionRequest, context: Any) -> scheduler_pb2.SessionInfo:
        """See the proto."""
        return await self.views.session(session_from_wire(request.session), local=request.local)

    async def EraseSession(
        self, request: scheduler_pb2.EraseSessionRequest, context: Any
    ) -> scheduler_pb2.EraseSessionReply:
        """See the proto."""
        return await self.views.erase(request)

    async def Explain(self, request: scheduler_pb2.ExplainRequest, context: Any) -> scheduler_pb2.Explanation:
        """See the proto."""
        decided, now = self.control.explained.of(session_from_wire(request.session)), self.clock.now()
        return scheduler_pb2.Explanation(decisions=[decision_to_wire(d, now) for d in decided])

    async def ExplainModel(
        self, request: scheduler_pb2.ExplainModelRequest, context: Any
    ) -> scheduler_pb2.ModelExplanation:
        """See the proto."""
        return self.views.explain_model(request.model)

    async def TurnsTimed(self, request: scheduler_pb2.TurnsTimedRequest, context: Any) -> scheduler_pb2.TurnsTimedReply:
        """See the proto. Takes at most MOST_TOGETHER turns of a message, and only valid seconds of known phases."""
        timed = self.control.explained.timed
        attached = sum(
            timed(session_from_wire(turn.session), turn.request_id, checked(turn.until_first_s), checked(turn.after_s))
            for turn in request.turns[:MOST_TOGETHER]
        )
        return scheduler_pb2.TurnsTimedReply(attached=attached)

    # ---- autoscaling -------------------------------------------------------------------------------------------
    async def SloDecided(self, request: scheduler_pb2.SloDecidedRequest, context: Any) -> scheduler_pb2.SloDecidedReply:
        """See the proto."""
        self.scaling.decided(request.decided)
        return scheduler_pb2.SloDecidedReply()

    async def Scale(self, request: scheduler_pb2.ScaleRequest, context: Any) -> Any:
        """See the proto. Unavailable while there is no recommendation: another scheduler may have one."""
        reply = self.scaling.reply()
        if reply is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no recommendation yet")
        return reply

    # ---- workflows ---------------------------------------------------------------------------------------------
    async def DeclareWorkflow(
        self, request: scheduler_pb2.DeclareWorkflowRequest, context: Any
    ) -> scheduler_pb2.Workflow:
        """See the proto."""
        try:
            return await self.workflows.declare(request)
        except RequestError as e:
            await _refuse(context, e)
            raise

    async def ListWorkflows(
        self, request: scheduler_pb2.ListWorkflowsRequest, context: Any
    ) -> scheduler_pb2.ListWorkflowsReply:
        """See the proto."""
        return await self.workflows.all(request.tenant)

    async def GetWorkflow(self, request: scheduler_pb2.WorkflowName, context: Any) -> scheduler_pb2.Workflow:
        """See the proto. An unknown workflow is answered without a name."""
        return self.workflows.get(request)

    async def DeleteWorkflow(
        self, request: scheduler_pb2.WorkflowName, context: Any
    ) -> scheduler_pb2.DeleteWorkflowReply:
        """See the proto."""
        return await self.workflows.delete(request)

    # ---- fine-tuning -------------------------------------------------------------------------------------------
    async def SubmitFinetune(self, request: scheduler_pb2.FinetuneJob, context: Any) -> scheduler_pb2.Finetune:
        """See the proto."""
        who = caller(context)
        gateway = who is not None and who.role is Role.GATEWAY
        return await _answered(context, self.finetunes.submit(request, self.config.data if gateway else None))

    async def ListFinetunes(
        self, request: scheduler_pb2.ListFinetunesRequest, context: Any
    ) -> scheduler_pb2.ListFinetunesReply:
        """See the proto."""
        return await _answered(context, self.finetunes.list(request))

    async def GetFinetune(self, request: scheduler_pb2.FinetuneName, context: Any) -> scheduler_pb2.Finetune:
        """See the proto. An unknown job is refused."""
        return await _answered(context, self.finetunes.get(request))

    async def CancelFinetune(self, request: scheduler_pb2.FinetuneName, context: Any) -> scheduler_pb2.Finetune:
        """See the proto. An unknown job is refused, and one that has ended."""
        return await _answered(context, self.finetunes.cancel(request))

    async def RemoveModel(self, request: scheduler_pb2.RemoveModelRequest, context: Any) -> Any:
        """See the proto. A model that no job made is refused."""
        await _answered(context, self._remove_model(request))
        return scheduler_pb2.RemoveModelReply()

    async def _remove_model(self, request: scheduler_pb2.RemoveModelRequest) -> None:
        if self.adoptions is None:
            raise NotFound("models of fine-tuning jobs are kept by the first scheduler of the configuration")
        await self.adoptions.remove(request.tenant, request.model)
        await self.finetunes.write(progress=False)


async def _answered(context: Any, call: Coroutine[Any, Any, _Answer]) -> _Answer:
    """The answer of a call; its RequestError ends the call."""
    try:
        return await call
    except RequestError as e:
        await _refuse(context, e)
        raise


async def _refuse(context: Any, error: RequestError) -> None:
    """End the call with the error as JSON (`contracts.errors.to_wire`) in its details."""
    await context.abort(_STATUS.get(error.status, grpc.StatusCode.FAILED_PRECONDITION), json.dumps(to_wire(error)))
