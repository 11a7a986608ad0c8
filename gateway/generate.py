"""One choice's life: place → submit → accepted → outputs, and again elsewhere when its worker is lost.

A request that moves carries the tokens it has so far, and its seed was fixed before the first attempt, so the next worker
goes on exactly where the last one stopped: the caller sees a pause and no repetition. Whether there is a next attempt is
decided in `core.retry`; which request an engine died of, in `core.quarantine`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from contracts.errors import NotFound, RequestError, Unavailable, from_wire
from contracts.ids import SessionKey
from contracts.request import Accepted, Failed, GenerateRequest, Output, Sampling, ToolUse
from contracts.turn_times import Phase
from contracts.workflow import Hop
from gateway import metrics
from gateway.core.hops import Ended
from gateway.core.quarantine import Quarantine, Verdict
from gateway.core.refusals import is_final
from gateway.core.retry import Again, Attempts, GiveUp, Patience
from gateway.core.routing import Route
from gateway.core.turn_times import TurnTimes
from gateway.fleet import Fleet
from gateway.flights import Event, Flight, Late, WorkerLost
from gateway.workers import Workers
from runtime import telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.generate")
_NOWHERE = Route("", "")


@dataclass(frozen=True, slots=True)
class Job:
    """What the choices of one prompt share. One of messages, prompt and prompt_tokens is set, or in `packed`; `sampling.seed` is set.

    arrived_s: when the request came, by the gateway's clock. prompt_estimate: about how many tokens the prompt has. pin: the node that must
    run it, or empty. packed, json_schema, regex, form_field, tool_use, template_kwargs, expected_tokens and weight: see `GenerateRequest`.
    hop: what it is in an agent workflow; of a request's choices only the first has one.
    """

    request_id: str
    session: SessionKey
    model: str
    sampling: Sampling
    arrived_s: float
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    packed: dict[str, bytes] = field(default_factory=dict)
    prompt_estimate: int = 1
    priority: int = 0
    pin: str = ""
    json_schema: str | None = None
    regex: str | None = None
    form_field: str = ""
    tool_use: ToolUse | None = None
    template_kwargs: str | None = None
    hop: Hop | None = None
    expected_tokens: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What is one choice's own. group, choice: see `GenerateRequest`. hop: the job's, of the first choice only."""

    request_id: str
    seed: int
    group: str = ""
    choice: int = 0
    hop: Hop | None = None


@dataclass(slots=True)
class Progress:
    """How far a choice is. `cached_tokens` is the first attempt's, as that is what the caller's cache was worth. thinking: its prompt
    ended within a thought. times: where its time went. attempt_id, decided_by: of the last attempt, and of its `Route`."""

    times: TurnTimes
    attempt_id: str = ""
    decided_by: str = ""
    node: str = ""
    why: str = ""
    prompt_tokens: int = 0
    thinking: bool = False
    cached_tokens: int | None = None
    tokens: list[int] = field(default_factory=list)


class Generator:
    """Starts generations. What all of them share."""

    def __init__(self, fleet: Fleet, workers: Workers, clock: Clock, patience: Patience) -> None:
        self.fleet, self.workers, self.clock, self.patience = fleet, workers, clock, patience
        self.ended = Ended()
        self.quarantine = Quarantine()
        #: Choices that are being generated.
        self.running = 0
        metrics.ACTIVE.set_function(lambda: self.running)
        #: What is lost now is not tried again: the process ends.
        self.stopping = False

    async def begin(self, job: Job, turn: Turn, prefer: str = "") -> Generation:
        """A generation that a worker has accepted. prefer: the node for the first attempt, or empty. Raises RequestError when none will;
        leaves nothing behind then."""
        generation = Generation(self, job, turn, prefer)
        try:
            await generation.attempt()
        except BaseException:
            generation.cancel()
            raise
        return generation


class Generation:
    """An accepted choice. `outputs` is consumed once; `cancel` must be called when it is not consumed to its end."""

    def __init__(self, shared: Generator, job: Job, turn: Turn, prefer: str = "") -> None:
        self._shared, self._job, self._turn, self._prefer = shared, job, turn, prefer
        self._attempts = Attempts(shared.patience, job.pin)
        self._flight: Flight | None = None
        self._begun = 0
        #: It may have killed an engine, and has had no token since.
        self._alone = False
        #: Something failed since it last had a token.
        self._disturbed = False
        #: What the next placement says of the workflow: nothing, once one has.
        self._hop = turn.hop
        self.progress = Progress(TurnTimes(job.arrived_s))

    def cancel(self) -> None:
        """Tell the worker that nobody reads any more."""
        if self._flight is not None:
            self._flight.cancel()

    @property
    def waiting(self) -> bool:
        """Something of what the worker has sent is not taken yet."""
        return self._flight is not None and self._flight.waiting

    async def attempt(self) -> None:
        """Get accepted by some worker. Raises RequestError when that is not to be."""
        while True:
            self._check_quarantine()
            route = await self._place()
            flight = await self._submit(route)
            if isinstance(flight, WorkerLost):
                await self._again(
                    self._attempts.lost(flight.node, self._now(), f"{flight.node} cannot be reached", ran=False), "unreachable"
                )
                continue
            self._flight = flight
            event = await flight.next()
            if isinstance(event, Accepted):
                self._shared.fleet.served(self._job.session, route.node)
                done = self.progress
                done.times.accepted(self._now())
                done.attempt_id, done.decided_by = flight.request_id, route.decided_by
                done.node, done.why, done.thinking = route.node, route.why, event.thinking
                done.prompt_tokens = done.prompt_tokens or event.prompt_tokens
                return
            await self._failed(event)

    async def outputs(self) -> AsyncGenerator[list[Output]]:
        """What is new, all that waits together, until and including the Output with a finish reason. Raises RequestError when it cannot
        go on."""
        self._shared.running += 1
        try:
            while True:
                assert self._flight is not None
                outputs: list[Output] = []
                broken: Event | None = None
                for event in await self._flight.take():
                    if not isinstance(event, Output) or event.finish_reason == "cancelled":
                        broken = event
                        break
                    outputs.append(self._note(event))
                if outputs:
                    yield outputs
                    if outputs[-1].finish_reason is not None:
                        return
                if broken is not None:
                    await self._failed(broken)
                    await self.attempt()
        finally:
            self._shared.running -= 1
            self.cancel()

    def _note(self, output: Output) -> Output:
        done = self.progress
        done.tokens.extend(output.tokens)
        ended = output.finish_reason is not None
        if done.times.waiting and (output.tokens or ended):
            done.times.spoke(output.times, self._now())
        elif ended:
            done.times.ended(output.times, self._now())
        if self._disturbed and output.tokens:
            self._disturbed = self._alone = False
            self._attempts.progressed()
        if done.cached_tokens is None:
            done.cached_tokens = min(output.cached_tokens, done.prompt_tokens)
        if ended and self._turn.hop is not None:
            # Before the caller can have read it and asked again.
            self._shared.ended.note(self._job.session.tenant, self._turn.hop, self._turn.request_id)
        return output

    # ---- one attempt -------------------------------------------------------------------------------------------
    async def _place(self) -> Route:
        job, fleet = self._job, self._shared.fleet
        prefer = self._prefer if not self._begun and not self._attempts.avoid else ""
        self.progress.times.enter(Phase.PLACE, self._now())
        while True:
            try:
                hop = self._hop and replace(self._hop, ended=self._shared.ended.take(job.session.tenant, self._hop))
                route = await fleet.place(
                    self._attempt_id(),
                    job.session,
                    job.model,
                    priority=job.priority,
                    pin=job.pin or prefer,
                    avoid=self._attempts.avoid,
                    hop=hop,
                )
                self._hop = None
                return route
            except RequestError as e:
                if is_final(e, model_known=fleet.knows_model(job.model), pin_known=fleet.knows_node(job.pin or prefer)):
                    raise
                prefer = ""
                await self._again(self._attempts.no_node(self._now(), e.message), "no node")

    async def _submit(self, route: Route) -> Flight | WorkerLost:
        job, shared, request = self._job, self._shared, self._request(route)
        self.progress.times.enter(Phase.PREPARE, self._now())
        flight = await shared.workers.stream(route.node, route.worker_address).submit(
            request, shared.patience.connect_s, pinned=bool(job.pin)
        )
        if route.promised and isinstance(flight, Flight):
            shared.fleet.taken(request.request_id, job.session, job.model, job.priority, route.node)
        self._begun += isinstance(flight, Flight)
        return flight

    def _request(self, route: Route) -> GenerateRequest:
        """What the next attempt asks of a worker."""
        job, turn = self._job, self._turn
        return GenerateRequest(
            request_id=self._attempt_id(),
            tenant=job.session.tenant,
            session_id=job.session.session_id,
            model=job.model,
            sampling=job.sampling if job.sampling.seed == turn.seed else replace(job.sampling, seed=turn.seed),
            messages=job.messages,
            prompt=job.prompt,
            prompt_tokens=job.prompt_tokens,
            packed=job.packed,
            priority=job.priority,
            resume_tokens=self.progress.tokens,
            source_nodes=list(route.source_nodes),
            kept_tokens=route.kept_tokens,
            json_schema=job.json_schema,
            regex=job.regex,
            form_field=job.form_field,
            tool_use=job.tool_use,
            template_kwargs=job.template_kwargs,
            group=turn.group,
            choice=turn.choice,
            expected_tokens=job.expected_tokens,
            alone=self._alone,
            weight=job.weight,
        )

    def _check_quarantine(self) -> None:
        """Raises InvalidRequest for a request that is refused as poisonous."""
        quarantine = self._shared.quarantine
        if quarantine.remembers(self._job.session.tenant):
            try:
                quarantine.check(self._request(_NOWHERE), self._now())
            except RequestError:
                metrics.POISONOUS.labels("refused").inc()
                raise

    def _attempt_id(self) -> str:
        """Each attempt has its own id: a worker that is still ending the last one must not take them for the same."""
        return f"{self._turn.request_id}.r{self._begun}" if self._begun else self._turn.request_id

    # ---- failure -----------------------------------------------------------------------------------------------
    async def _failed(self, event: Event) -> None:
        """Returns when the request is to be tried again; raises RequestError when not."""
        node = self._flight.node if self._flight else ""
        cause, reason, decide = "worker lost", f"{node} was lost", self._attempts.innocent
        if isinstance(event, Failed):
            error = _error(event)
            if error.status < 500:
                raise error
            # "Not now" (it drains, it is full) may be said as often as patience lasts; any other failure counts.
            cause, reason = "worker failed", error.message
            decide = partial(self._attempts.lost, ran=not (event.error and event.error[0] == Unavailable.status))
        elif isinstance(event, Late):
            cause, reason, decide = "late", event.reason, partial(self._attempts.lost, ran=True)
        elif isinstance(event, WorkerLost) and event.verdict is not Verdict.INNOCENT:
            if event.verdict is Verdict.GUILTY:
                self._condemned(node)
            self._alone = True
            decide = partial(self._attempts.lost, ran=True)
            if self._attempts.last and not event.hung:
                self._condemned(node)
        log.warning(cause, request=self._turn.request_id, node=node, tokens=len(self.progress.tokens), reason=reason, alone=self._alone)
        self.cancel()
        self._flight = None
        await self._again(decide(node, self._now(), reason), cause)

    def _condemned(self, node: str) -> NoReturn:
        log.error("poisonous request", request=self._turn.request_id, tenant=self._job.session.tenant, node=node)
        metrics.POISONOUS.labels("found").inc()
        raise self._shared.quarantine.condemn(self._request(_NOWHERE), self._now())

    async def _again(self, decision: Again | GiveUp, cause: str) -> None:
        if self._shared.stopping:
            raise Unavailable("this gateway is stopping; try again")
        self._disturbed = True
        if isinstance(decision, GiveUp):
            raise Unavailable(f"the request could not be completed: {decision.reason}; try again")
        metrics.RETRIES.labels(cause).inc()
        if decision.pause_s:
            await self._shared.clock.sleep(decision.pause_s)

    def _now(self) -> float:
        return self._shared.clock.now()


def _error(failed: Failed) -> RequestError:
    try:
        status, message, param, code = failed.error
        return from_wire(int(status), str(message), param, code)
    except (ValueError, TypeError):
        return Unavailable("the worker failed without saying why")


def unknown_model(name: str) -> NotFound:
    """OpenAI's answer for a model that does not exist."""
    shown = name if len(name) <= 100 else name[:99] + "…"
    return NotFound(f"the model {shown!r} does not exist or you do not have access to it", param="model", code="model_not_found")
