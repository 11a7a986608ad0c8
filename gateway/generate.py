"""The life of one choice: place → submit → accepted → outputs, and again elsewhere when its worker is lost.

A request that moves carries its tokens and its seed, so the next worker continues exactly where the last one stopped:
the caller sees a pause and no repetition. `core.retry` decides whether there is a next attempt, `core.quarantine` which
request an engine died of.
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
from gateway.attempts import Shared, Tries
from gateway.core.quarantine import Verdict
from gateway.core.routing import Route
from gateway.core.turn_times import TurnTimes
from gateway.fleet import Fleet
from gateway.flights import Event, Flight, Late, WorkerLost
from gateway.tracing import TurnTrace
from runtime import telemetry

log = telemetry.logger("gateway.generate")
_NOWHERE = Route("", "")


@dataclass(frozen=True, slots=True)
class Job:
    """What the choices of one prompt share. One of messages, prompt and prompt_tokens is set, or in `packed`;
    `sampling.seed` is set.

    arrived_s: the request's arrival on the gateway's clock. prompt_estimate: the prompt's tokens, estimated. pin: the
    node that must run it, or empty. packed, json_schema, regex, form_field, tool_use, template_kwargs, expected_tokens,
    weight, cache_salt and adapter: see `GenerateRequest`. hop: its place in an agent workflow; only a request's first
    choice has one. trace: None while traces are off.
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
    cache_salt: str = ""
    adapter: str = ""
    trace: TurnTrace | None = None


@dataclass(frozen=True, slots=True)
class ChoiceCall:
    """What differs between choices. group, choice: see `GenerateRequest`. hop: the job's, for the first choice only."""

    request_id: str
    seed: int
    group: str = ""
    choice: int = 0
    hop: Hop | None = None


@dataclass(slots=True)
class Progress:
    """The progress of a choice. cached_tokens: of the first attempt, the value of the caller's cache. thinking: the
    prompt ends within a thought. attempt_id, decided_by: of the last attempt and its `Route`."""

    times: TurnTimes
    attempt_id: str = ""
    decided_by: str = ""
    node: str = ""
    why: str = ""
    prompt_tokens: int = 0
    thinking: bool = False
    cached_tokens: int | None = None
    tokens: list[int] = field(default_factory=list)


class Generator(Shared):
    """Starts generations."""

    async def begin(self, job: Job, turn: ChoiceCall, prefer: str = "") -> Generation:
        """A generation that a worker has accepted. prefer: the node for the first attempt, or empty. Raises
        RequestError when no worker accepts it; nothing is left running then."""
        generation = Generation(self, job, turn, prefer)
        try:
            await generation.attempt()
        except BaseException:
            generation.cancel()
            raise
        return generation


class Generation:
    """An accepted choice. Consume `outputs` once; call `cancel` if it is not consumed to its end."""

    def __init__(self, shared: Generator, job: Job, turn: ChoiceCall, prefer: str = "") -> None:
        self._shared, self._job, self._turn, self._prefer = shared, job, turn, prefer
        self.progress = Progress(TurnTimes(job.arrived_s))
        self._tries = Tries(
            shared,
            turn.request_id,
            job.session,
            job.model,
            job.priority,
            self.progress.times,
            pin=job.pin,
            hop=turn.hop,
            trace=job.trace,
        )
        self._attempts = self._tries.failures
        self._flight: Flight | None = None
        #: Suspected of having killed an engine; no token since.
        self._alone = False

    def cancel(self) -> None:
        """Cancel it in the worker: the caller reads no more."""
        if self._flight is not None:
            self._flight.cancel()

    @property
    def waiting(self) -> bool:
        """Whether events of the worker are queued."""
        return self._flight is not None and self._flight.waiting

    async def attempt(self) -> None:
        """Place and submit until a worker accepts. Raises RequestError when none does."""
        while True:
            self._check_quarantine()
            route = await self._tries.place(self._prefer)
            flight = await self._submit(route)
            if isinstance(flight, WorkerLost):
                await self._tries.unreachable(flight.node)
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
        """Batches of queued outputs, up to and including the Output with a finish reason. Raises RequestError when the
        request cannot continue."""
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
        if output.tokens and self._attempts.disturbed:
            self._alone = False
            self._attempts.progressed()
        if done.cached_tokens is None:
            done.cached_tokens = min(output.cached_tokens, done.prompt_tokens)
        if ended and self._turn.hop is not None:
            # Note it before the caller can read the end and send the next request.
            self._shared.ended.note(self._job.session.tenant, self._turn.hop, self._turn.request_id)
        return output

    # ---- one attempt -------------------------------------------------------------------------------------------
    async def _submit(self, route: Route) -> Flight | WorkerLost:
        job, shared, request = self._job, self._shared, self._request(route)
        self.progress.times.enter(Phase.PREPARE, self._now())
        flight = await shared.workers.stream(route.node, route.worker_address).submit(
            request, shared.retry_limits.connect_s, pinned=bool(job.pin)
        )
        if isinstance(flight, Flight):
            self._tries.took(route)
        return flight

    def _request(self, route: Route) -> GenerateRequest:
        """The worker request of the next attempt."""
        job, turn = self._job, self._turn
        return GenerateRequest(
            request_id=self._tries.attempt_id,
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
            cache_salt=job.cache_salt,
            adapter=job.adapter,
            trace=job.trace.wire if job.trace is not None else "",
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

    # ---- failure -----------------------------------------------------------------------------------------------
    async def _failed(self, event: Event) -> None:
        """Returns when the request is to be retried, after any pause; else raises RequestError."""
        node = self._flight.node if self._flight else ""
        cause, reason, decide = "worker lost", f"{node} was lost", self._attempts.innocent
        if isinstance(event, Failed):
            error = _error(event)
            if error.status < 500:
                raise error
            # A worker may answer "not now" (draining, full) any number of times within `retry_limits`; other failures
            # count as attempts.
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
        log.warning(
            cause,
            request=self._turn.request_id,
            node=node,
            tokens=len(self.progress.tokens),
            reason=reason,
            alone=self._alone,
        )
        self.cancel()
        self._flight = None
        await self._tries.again(decide(node, self._now(), reason), cause)

    def _condemned(self, node: str) -> NoReturn:
        log.error("poisonous request", request=self._turn.request_id, tenant=self._job.session.tenant, node=node)
        metrics.POISONOUS.labels("found").inc()
        raise self._shared.quarantine.condemn(self._request(_NOWHERE), self._now())

    def _now(self) -> float:
        return self._shared.clock.now()


def _error(failed: Failed) -> RequestError:
    try:
        status, message, param, code = failed.error
        return from_wire(int(status), str(message), param, code)
    except (ValueError, TypeError):
        return Unavailable("the worker failed without saying why")


def check_model(fleet: Fleet, name: str) -> None:
    """Raises NotFound for an unknown model, Unavailable while no fleet is known."""
    if not fleet.knows_model(name):
        if fleet.view is None:
            raise Unavailable("no scheduler has answered yet; try again in a moment")
        raise unknown_model(name)


def unknown_model(name: str) -> NotFound:
    """OpenAI's answer for a model that does not exist."""
    shown = name if len(name) <= 100 else name[:99] + "…"
    return NotFound(
        f"the model {shown!r} does not exist or you do not have access to it", param="model", code="model_not_found"
    )
