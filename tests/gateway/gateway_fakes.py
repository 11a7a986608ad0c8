"""A real gRPC scheduler and real gRPC workers with toy insides, and a gateway in front of them.

The toy worker's text depends on prompt, seed and position only, so that a request which moves to another worker can be
compared with one that did not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
from blake3 import blake3
from toy_tokenizer import ToyTokenizer

from contracts import frames
from contracts.errors import InvalidRequest, NotFound, RequestError, Unavailable, to_wire
from contracts.request import Accepted, Failed, GenerateRequest, Output, TokenLogprob, ToolCallDelta
from contracts.v1 import scheduler_pb2 as pb
from contracts.v1 import scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from gateway.app import Gateway
from gateway.core.retry import RetryLimits
from runtime.config import Config
from runtime.config_file import load_config
from runtime.service import Tasks
from tests.ports import free_ports

MODEL = "toy"
#: The one fine-tuning job that the toy scheduler knows.
TUNED = "ftjob-0123456789abcdef"
MAX_PROMPT_CHARS = 2000


async def until(condition: Callable[[], bool | Awaitable[Any]], limit_s: float = 10.0) -> None:
    """Return once `condition()` holds; fail after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.01)


def prompt_text(request: GenerateRequest) -> str:
    """What the toy model reads."""
    if request.messages is not None:
        return "".join(f"<{m['role']}>{m['content']}" for m in request.messages)
    return request.prompt if request.prompt is not None else ",".join(map(str, request.prompt_tokens or []))


def toy_token(request: GenerateRequest, position: int) -> int:
    """The token at `position` of the answer: by prompt alone when greedy, by prompt and seed otherwise."""
    seed = 0 if request.sampling.temperature == 0 else request.sampling.seed
    return int.from_bytes(blake3(f"{prompt_text(request)}|{seed}|{position}".encode()).digest(2), "little")


def toy_call(request: GenerateRequest, position: int, last: bool) -> ToolCallDelta:
    """What a call of the function that must be called gains with this token: `{"n": [...]}`."""
    assert request.tool_use is not None
    if position == 0:
        name = request.tool_use.name or json.loads(request.tool_use.tools)[0]["function"]["name"]
        return ToolCallDelta(0, f"call_{request.group or request.request_id.split('.')[0]}", name, '{"n":[')
    return ToolCallDelta(0, arguments="0]}" if last else f"{toy_token(request, position)},")


class ToyWorker(ToyTokenizer, worker_pb2_grpc.WorkerServicer):
    """One worker. `die_after`: end the process's stream after so many tokens of a request, once."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self.node, self.port = node, free_ports(1)
        self.submitted: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.seen_cancel = asyncio.Event()
        self.seen_submit = asyncio.Event()
        self.token_s = 0.0
        self.tokens_by_default = 5
        #: However many are asked for.
        self.tokens_at_most = 1 << 20
        self.die_after: int | None = None
        self.refuse: RequestError | None = None
        self.cached_tokens = 3
        #: What it answers instead, a token each; and its prompts end within a thought.
        self.says: list[str] | None = None
        self.thinking = False
        #: Seconds by phase that it tells with the first token of an attempt, and with the last when that is another
        #: one.
        self.times: tuple[Any, Any] = None, None
        #: It reads, and never says anything.
        self.silent = False
        self._streams: set[asyncio.Queue[frames.StepFrame | None]] = set()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address) == self.port
        await self._server.start()

    async def kill(self) -> None:
        """As kill -9: every stream breaks, nothing listens."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def Stream(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.Frame]:
        out: asyncio.Queue[frames.StepFrame | None] = asyncio.Queue()
        self._streams.add(out)
        running: dict[str, asyncio.Task[None]] = {}
        commands = frames.Commands()

        async def read() -> None:
            async for frame in request_iterator:
                for command in commands.take(frame.payload):
                    assert not isinstance(command, frames.Unreadable)
                    if isinstance(command, GenerateRequest):
                        self.submitted.append(command)
                        self.seen_submit.set()
                        running[command.request_id] = asyncio.create_task(self._generate(command, out))
                    else:
                        self.cancelled.append(command)
                        self.seen_cancel.set()
                        if command in running:
                            running[command].cancel()

        reader = asyncio.create_task(read())
        try:
            while (step := await out.get()) is not None:
                yield worker_pb2.Frame(payload=frames.encode_step(step))
        finally:
            self._streams.discard(out)
            reader.cancel()
            for task in running.values():
                task.cancel()

    def tell(self, step: frames.StepFrame) -> None:
        """Say something on every stream."""
        for out in self._streams:
            out.put_nowait(step)

    async def _generate(self, request: GenerateRequest, out: asyncio.Queue[frames.StepFrame | None]) -> None:
        rid, text = request.request_id, prompt_text(request)
        if self.silent:
            return
        if self.refuse is not None:
            out.put_nowait(frames.StepFrame(failed=[Failed(rid, to_wire(self.refuse))]))
            return
        if len(text) > MAX_PROMPT_CHARS:
            error = InvalidRequest("the prompt is too long", param="messages", code="context_length_exceeded")
            out.put_nowait(frames.StepFrame(failed=[Failed(rid, to_wire(error))]))
            return
        out.put_nowait(frames.StepFrame(accepted=[Accepted(rid, len(text), self.thinking)]))
        limit = (
            len(self.says)
            if self.says is not None
            else min(request.sampling.max_tokens or self.tokens_by_default, self.tokens_at_most)
        )
        for position in range(len(request.resume_tokens), limit):
            if self.token_s:
                await asyncio.sleep(self.token_s)
            token = toy_token(request, position)
            word = f"{token} " if self.says is None else self.says[position]
            top = [(word.encode(), -0.5), (b"other", -1.0)][: request.sampling.logprobs or 0]
            logprobs = None if request.sampling.logprobs is None else [TokenLogprob(word.encode(), -0.5, top)]
            last = position == limit - 1
            output = Output(rid, word, [token], self.cached_tokens, logprobs, "length" if last else None)
            if request.tool_use is not None and request.tool_use.choice == "required":
                output = Output(
                    rid,
                    "",
                    [token],
                    self.cached_tokens,
                    logprobs,
                    "stop" if last else None,
                    [toy_call(request, position, last)],
                )
            if position == len(request.resume_tokens):
                output.times = self.times[0]
            elif last:
                output.times = self.times[1]
            out.put_nowait(frames.StepFrame(outputs=[output]))
            if self.die_after is not None and position + 1 >= self.die_after:
                self.die_after = None
                out.put_nowait(None)
                await asyncio.sleep(60)


class ToyScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Places on the first node that serves and is not avoided."""

    def __init__(self, workers: list[ToyWorker], asleep: dict[str, list[str]] | None = None) -> None:
        self.workers, self.port = workers, free_ports(1)
        self.expected = len(workers)
        self.absent: set[str] = set()
        self.stalled: set[str] = set()
        #: Requests that every node reports.
        self.running = 1
        self.placed: list[pb.PlaceRequest] = []
        self.advised: list[Any] = []
        self.invalidated: list[pb.InvalidateRequest] = []
        self.removed: list[tuple[str, str]] = []
        self.erased: list[Any] = []
        #: What lists were asked for; whether each says that there is more; whether a node can note erasures.
        self.listed: list[Any] = []
        self.more_sessions = False
        self.sessions = ["chat-1"]
        self.takes_erasures = True
        self.workflows: dict[tuple[str, str], pb.Workflow] = {}
        #: Where sessions are, by id; and what was asked of them.
        self.residencies = {"chat-1": _residency("chat-1")}
        self.looks: list[pb.GetSessionRequest] = []
        self.told = asyncio.Event()
        #: Records of turns that it was told, a message each; and whether it never answers to one.
        self.timed: list[pb.TurnsTimedRequest] = []
        #: Answers that were decided, as it was told.
        self.decided: list[pb.SloDecided] = []
        self.scale = pb.ScaleReply(desired_nodes=3, wanted_nodes=4, why="work", nodes=2, devices=2, max_nodes=8)
        self.ignores_times = False
        self.hang = False
        self.gathering = False
        self.knows_hints = False
        #: The number of the worker to which turns of hinted sessions may go at once.
        self.route_hints: int | None = None
        #: Whether its answer to hints says their trace.
        self.echoes_traces = False
        #: What the workers serve; set before they are watched.
        self.model = pb.ModelInfo(name=MODEL, max_tokens=MAX_PROMPT_CHARS, created_s=1_700_000_000)
        #: By node: models that it has besides, off its device.
        self.asleep = asleep or {}
        #: By node: who holds its device's memory, and the loads of its models.
        self.memory: dict[str, list[pb.MemoryShare]] = {}
        self.loads: dict[str, list[pb.ModelLoad]] = {}
        self._changed: set[asyncio.Event] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        await self._server.start()

    async def kill(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    def set_absent(self, *nodes: str) -> None:
        """These nodes no longer serve; watchers hear of it."""
        self.absent = set(nodes)
        for event in self._changed:
            event.set()

    def set_memory(self, node: str, memory: list[pb.MemoryShare], loads: list[pb.ModelLoad]) -> None:
        """The node's device is held like this, and its models do this; watchers hear of it."""
        self.memory[node], self.loads[node] = memory, loads
        for event in self._changed:
            event.set()

    def set_stalled(self, *nodes: str) -> None:
        """The engines of these nodes stand still; watchers hear of it."""
        self.stalled = set(nodes)
        for event in self._changed:
            event.set()

    def _fleet(self) -> pb.Fleet:
        nodes = [
            pb.FleetNode(
                node=w.node,
                worker_address=w.address,
                serving=w.node not in self.absent,
                models=[
                    self.model,
                    *(pb.ModelInfo(name=name, state=pb.MODEL_STATE_COLD) for name in self.asleep.get(w.node, ())),
                ],
                running=self.running,
                stalled="engine" if w.node in self.stalled else "",
                memory=self.memory.get(w.node, ()),
                device_bytes=sum(share.bytes for share in self.memory.get(w.node, ())),
                loads=self.loads.get(w.node, ()),
            )
            for w in self.workers
        ]
        return pb.Fleet(nodes=nodes, expected_nodes=self.expected, gathering=self.gathering)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[pb.Fleet]:
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while True:
                yield self._fleet()
                await changed.wait()
                changed.clear()
        finally:
            self._changed.discard(changed)

    async def Place(
        self, request_iterator: AsyncIterator[pb.PlaceRequests], context: Any
    ) -> AsyncIterator[pb.PlaceAnswers]:
        async for message in request_iterator:
            if self.hang:
                await asyncio.sleep(60)
            yield pb.PlaceAnswers(answers=[self._place(request) for request in message.requests])

    def _place(self, request: pb.PlaceRequest) -> pb.PlaceAnswer:
        if self.gathering:
            return pb.PlaceAnswer()
        self.placed.append(request)
        if request.model != MODEL:
            return _refused(NotFound("no such model", param="model"))
        for w in self.workers:
            if (
                w.node in self.absent
                or w.node in request.avoid_nodes
                or (request.pin_node and w.node != request.pin_node)
            ):
                continue
            placed = pb.Placement(
                node=w.node, worker_address=w.address, source_nodes=["node-9"], kept_tokens=900, why="first\nfree"
            )
            return pb.PlaceAnswer(placed=placed)
        return _refused(Unavailable("no node serves"))

    async def Advise(self, request: pb.AdviseRequest, context: Any) -> pb.AdviseReply:
        self.advised += request.advisories
        self.told.set()
        hinted = self.workers[self.route_hints] if self.route_hints is not None else None
        placed = pb.Placement()
        if hinted:
            placed = pb.Placement(
                node=hinted.node,
                worker_address=hinted.address,
                source_nodes=["node-8"],
                kept_tokens=800,
                hint_trace=request.advisories[0].trace if self.echoes_traces else "",
            )
        return pb.AdviseReply(nodes=["node-0"] * len(request.advisories), placements=[placed] * len(request.advisories))

    async def Invalidate(self, request: pb.InvalidateRequest, context: Any) -> pb.InvalidateReply:
        self.invalidated.append(request)
        self.told.set()
        return pb.InvalidateReply(known=self.knows_hints)

    async def Metrics(self, request: Any, context: Any) -> Any:
        return pb.FleetMetrics(nodes={"node-0": pb.ProcessMetrics(samples={"reads_total": 2.0})})

    async def ListSessions(self, request: Any, context: Any) -> Any:
        self.listed.append(request)
        if request.after and not request.by_id:
            return pb.ListSessionsReply(unknown_after=request.after != "chat-1")
        sessions = [_summary(request.tenant, name) for name in self.sessions]
        return pb.ListSessionsReply(sessions=sessions, more=self.more_sessions)

    async def GetSession(self, request: Any, context: Any) -> Any:
        self.looks.append(request)
        found = self.residencies.get(request.session.session_id)
        if found is None:
            return pb.SessionInfo(known=False)
        found.summary.session.tenant = request.session.tenant
        return found

    async def DeclareWorkflow(self, request: pb.DeclareWorkflowRequest, context: Any) -> pb.Workflow:
        seen = [pb.ObservedAgent(name="qa", requests=7)]
        edge = pb.CallEdge(source="qa", target="qa", probability=0.25, calls=1, delay_s=2.5, weight=1.75)
        made = pb.Workflow(
            name=request.name, declared=request.graph, observed=seen, observed_edges=[edge], edges=request.graph.edges
        )
        self.workflows[(request.name.tenant, request.name.name)] = made
        return made

    async def ListWorkflows(self, request: Any, context: Any) -> Any:
        return pb.ListWorkflowsReply(
            workflows=[w for (tenant, _), w in self.workflows.items() if tenant == request.tenant]
        )

    async def GetWorkflow(self, request: Any, context: Any) -> Any:
        return self.workflows.get((request.tenant, request.name), pb.Workflow())

    async def DeleteWorkflow(self, request: Any, context: Any) -> Any:
        return pb.DeleteWorkflowReply(known=self.workflows.pop((request.tenant, request.name), None) is not None)

    async def Explain(self, request: Any, context: Any) -> Any:
        if request.session.session_id != "chat-1":
            return pb.Explanation()
        scores = [pb.NodeScore(node=f"node-{i}", terms={"work_s": float(i), "load_s": 0.5}) for i in range(2)]
        hint = pb.Decision(what="hint", ago_s=9.0, node="node-0", worth="full", scores=scores)
        told = {"hinted": True, "prefetched_node": "node-0", "prefetched_s": 8.0, "source_nodes": ["node-1"]}
        told |= {"until_first_s": {"queue": 0.5, "load-ssd": 0.25, "unheard-of": 9.0}, "after_s": {"decode": 2.0}}
        return pb.Explanation(
            decisions=[pb.Decision(what="turn", ago_s=1.0, node="node-0", request_id="r1", scores=scores, **told), hint]
        )

    async def ExplainModel(self, request: pb.ExplainModelRequest, context: Any) -> pb.ModelExplanation:
        moves = [
            pb.WeightsMove(model=request.model, ago_s=9.0, state=pb.MODEL_STATE_LOADING, why="request"),
            pb.WeightsMove(model=request.model, ago_s=8.5, state=pb.MODEL_STATE_ACTIVE, why="loaded", seconds=0.5),
            pb.WeightsMove(
                model=request.model, ago_s=2.0, state=pb.MODEL_STATE_COLD, why="for_kv", other="big", seconds=5.0
            ),
        ]
        may_lend = pb.MayLend(idle=12, computing=3, transfer_s=0.5, layer_s=0.25)
        lends = {"layers": 24, "layers_lent": 2, "may_lend": may_lend}
        return pb.ModelExplanation(
            devices=[
                pb.ModelOnDevice(node="node-0", state=pb.MODEL_STATE_COLD, moves=moves, **lends),
                pb.ModelOnDevice(node="node-1", state=pb.MODEL_STATE_COLD),
            ]
        )

    async def TurnsTimed(self, request: pb.TurnsTimedRequest, context: Any) -> pb.TurnsTimedReply:
        self.timed.append(request)
        if self.ignores_times:
            await asyncio.sleep(60)
        return pb.TurnsTimedReply(attached=len(request.turns))

    async def SloDecided(self, request: pb.SloDecidedRequest, context: Any) -> pb.SloDecidedReply:
        self.decided += request.decided
        return pb.SloDecidedReply()

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleReply:
        return self.scale

    async def SubmitFinetune(self, request: pb.FinetuneJob, context: Any) -> pb.Finetune:
        return pb.Finetune(job=request, progress=pb.FinetuneProgress(id=request.id, state="queued"))

    async def ListFinetunes(self, request: pb.ListFinetunesRequest, context: Any) -> pb.ListFinetunesReply:
        return pb.ListFinetunesReply(finetunes=[_tuned(request.tenant)], unknown_after=bool(request.after))

    async def GetFinetune(self, request: pb.FinetuneName, context: Any) -> pb.Finetune:
        if request.id != TUNED:
            await context.abort(grpc.StatusCode.NOT_FOUND, json.dumps(to_wire(NotFound("no such job", param="id"))))
        return _tuned(request.tenant)

    CancelFinetune = GetFinetune

    async def RemoveModel(self, request: pb.RemoveModelRequest, context: Any) -> pb.RemoveModelReply:
        self.removed.append((request.tenant, request.model))
        return pb.RemoveModelReply()

    async def EraseSession(self, request: Any, context: Any) -> Any:
        self.erased.append(request.session)
        return pb.EraseSessionReply(
            known=request.session.session_id == "chat-1", nodes=["node-0"], taken=self.takes_erasures
        )


def _tuned(tenant: str) -> pb.Finetune:
    job = pb.FinetuneJob(id=TUNED, tenant=tenant, model=MODEL, suffix="s", created_s=1.0, note='{"training_file": "f"}')
    losses = {"loss": 0.5, "validation_loss": float("nan")}
    return pb.Finetune(
        job=job,
        progress=pb.FinetuneProgress(id=TUNED, state="running", step=1, steps=2, tokens=10, tokens_per_s=1.0),
        started_s=2.0,
        events=[pb.FinetuneEvent(number=1, at_s=1.0, level="info", message="created")],
        losses=[pb.FinetuneLoss(step=1, **losses)],
        checkpoints=[pb.FinetuneCheckpoint(step=1, at_s=3.0, **losses)],
    )


def _residency(session_id: str) -> pb.SessionInfo:
    tier = {"tier": "dram", "layer_chunks": [2, 2, 1, 0], "tokens": 64, "bytes": 4096}
    node = pb.NodeResidency(node="node-0", tiers=[tier])
    return pb.SessionInfo(summary=_summary("", session_id), known=True, nodes=[node])


def _summary(tenant: str, session_id: str) -> Any:
    return pb.SessionSummary(
        session={"tenant": tenant, "session_id": session_id},
        model=MODEL,
        tokens=128,
        last_use_s=1.0,
        held_by=["node-0"],
    )


@dataclass
class Stack:
    """A gateway with its toy fleet."""

    gateway: Gateway
    scheduler: ToyScheduler
    workers: list[ToyWorker]
    config: Config
    http: aiohttp.ClientSession
    tasks: Tasks
    schedulers: list[ToyScheduler]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.gateway.port}"

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any, Any]:
        """Status, decoded body and headers."""
        async with self.http.post(self.url + path, json=body, **more) as r:
            return r.status, await r.json(), r.headers

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **more) as r:
            return r.status, await r.json()

    async def chat(self, text: str = "hello", **more: Any) -> tuple[int, Any, Any]:
        headers = more.pop("headers", None)
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}
        return await self.post("/v1/chat/completions", body, headers=headers)

    async def ready(self) -> None:
        """Return once every node serves."""
        await until(self.is_ready)

    async def is_ready(self) -> bool:
        """Every node serves."""
        return (await self.get("/ready?all=1"))[0] == 200

    async def missing(self) -> list[str]:
        """Why not every node serves."""
        missing: list[str] = (await self.get("/ready?all=1"))[1]["missing"]
        return missing


QUICK = RetryLimits(total_s=5.0, pause_s=0.05, scheduler_s=0.4, scheduler_rest_s=1.0, connect_s=0.5)


@contextlib.asynccontextmanager
async def stack(
    nodes: int = 2,
    *,
    wait: bool = True,
    retry_limits: RetryLimits = QUICK,
    schedulers: int = 1,
    models: dict[str, Any] | None = None,
    asleep: dict[str, list[str]] | None = None,
    worker: Callable[[str], ToyWorker] | None = None,
    model: pb.ModelInfo | None = None,
    **gateway: Any,
) -> AsyncIterator[Stack]:
    """A serving gateway in front of `nodes` toy workers and so many schedulers; `gateway`: settings of its section.
    models: that are registered; by default the one that the toy workers serve. asleep: by node, those that it has off
    its device. worker: makes the workers, by node. model: what they serve."""
    workers = [(worker or ToyWorker)(f"node-{i}") for i in range(nodes)]
    deciders = [ToyScheduler(workers, asleep) for _ in range(schedulers)]
    for decider in deciders:
        decider.model = model or decider.model
    for server in (*workers, *deciders):
        await server.start()
    settings = {
        "gateway": {"port": free_ports(1), **gateway},
        "scheduler": {"addresses": [f"127.0.0.1:{s.port}" for s in deciders]},
        "nodes": {"count": nodes, "base_port": 50_000},
    }
    config = load_config(None, {**settings, **({"models": models} if models else {"model_name": MODEL})})
    tasks = Tasks()
    made = Gateway(config, tasks, retry_limits=retry_limits)
    await made.start()
    async with aiohttp.ClientSession() as http:
        running = Stack(made, deciders[0], workers, config, http, tasks, deciders)
        try:
            if wait:
                await running.ready()
            yield running
            assert not tasks.failed.done(), tasks.failed.exception()
        finally:
            await made.stop()
            for server in (*deciders, *workers):
                await server.kill()


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """A stream's events, decoded; `[DONE]` as text."""
    found = []
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def _refused(error: RequestError) -> pb.PlaceAnswer:
    return pb.PlaceAnswer(refused=json.dumps(to_wire(error)))
