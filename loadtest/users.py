"""Sends a planned load to one or several equal OpenAI endpoints, and measures every request.

Open loop: jobs start at their planned times; within a session a turn waits for the previous answer and its own typing
(`loadtest.typist.when_to_speak`). Closed loop: a fixed number of users, each with one job after the other, who read an
answer, type, and ask. A turn's messages are the previous turn's messages, the received answer and the new text, so each
prompt extends the one before. A failed request ends its session, and every turn that needs its answers.

Hints (`POST /v1/advisory`) are sent only if the endpoint has `hints`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp

from loadtest.balance import Balance, Balancer
from loadtest.client import Endpoint, Hint, Outcome, advise, ask
from loadtest.plans import Job, PlannedSession, PlannedTurn, Pretence, jobs
from loadtest.typist import Moment, when_to_speak
from runtime.clock import Clock

_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Loop:
    """How a plan is sent. users: of a closed loop; 0: open loop. seconds: no request is sent later. spread_s, seed:
    users of a closed loop start at random times within `spread_s`."""

    users: int = 0
    seconds: float = math.inf
    spread_s: float = 0.0
    seed: int = 1


async def run_load(
    endpoints: Endpoint | Sequence[Endpoint],
    sessions: Sequence[PlannedSession],
    clock: Clock,
    on_done: Callable[[Outcome], None] = lambda _: None,
    loop: Loop | None = None,
    balance: Balance = "round-robin",
) -> list[Outcome]:
    """Send `sessions`, as far as `loop` allows; returns the outcomes by sending time.

    on_done: called with each outcome as it ends, so that a cancelled load keeps its results.
    """
    loop = loop or Loop()
    several = (endpoints,) if isinstance(endpoints, Endpoint) else tuple(endpoints)
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_done(outcome)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=_MAX_LINE_BYTES) as http:
        load = _Load(http, several, Balancer(len(several), balance), clock, loop, done)
        try:
            async with asyncio.TaskGroup() as group:
                for queue in load.queues(jobs(sessions)):
                    group.create_task(load.run_user(*queue))
        finally:
            for hint in load.spurious:
                hint.cancel()
            await asyncio.gather(*load.spurious, return_exceptions=True)
    return sorted(outcomes, key=lambda o: o.sent_s)


class _Load:
    """A load in progress. ends: when turns that others need have ended, by (session id, turn); None: failed."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        endpoints: Sequence[Endpoint],
        balancer: Balancer,
        clock: Clock,
        loop: Loop,
        done: Callable[[Outcome], None],
    ) -> None:
        self.http, self.endpoints, self.balancer, self.loop, self.done = http, endpoints, balancer, loop, done
        self._clock, self._start_s = clock, clock.now()
        self.ends: dict[tuple[str, int], asyncio.Future[float | None]] = {}
        #: Pending spurious hints; the load does not wait for them.
        self.spurious: set[asyncio.Task[None]] = set()

    def queues(self, planned: Sequence[Job]) -> list[tuple[Sequence[Job], float]]:
        """The jobs and start time of each user. In a closed loop the n-th of N users has every N-th job, so that no
        measured time changes which user sends what. In an open loop each job has a user."""
        if not self.loop.users:
            return [((job,), 0.0) for job in planned]
        draw = random.Random(self.loop.seed).random
        return [(planned[n :: self.loop.users], draw() * self.loop.spread_s) for n in range(self.loop.users)]

    async def run_user(self, queue: Sequence[Job], starts_s: float) -> None:
        """Run one job after the other."""
        for job in queue:
            async with asyncio.TaskGroup() as group:
                talks = [group.create_task(_Talk(self, session, starts_s).run()) for session in job]
            starts_s = max(talk.result() for talk in talks)

    def end_of(self, turn: tuple[str, int]) -> asyncio.Future[float | None]:
        """A future of this turn's end; None: it failed."""
        return self.ends.setdefault(turn, asyncio.get_running_loop().create_future())

    def now(self) -> float:
        """Seconds since the load began."""
        return self._clock.now() - self._start_s

    async def until(self, at_s: float) -> None:
        """Sleep until `at_s`."""
        wait_s = at_s - self.now()
        if wait_s > 0:
            await self._clock.sleep(wait_s)


class _Talk:
    """One session in progress."""

    def __init__(self, load: _Load, session: PlannedSession, starts_s: float) -> None:
        self._load, self._session, self._starts_s = load, session, starts_s

    async def run(self) -> float:
        """Run all turns. Returns the time at which the last answer has been read."""
        load, session = self._load, self._session
        messages: list[dict[str, str]] = []
        ended_s: float | None = None
        number = 0
        try:
            for number, turn in enumerate(session.turns):
                moment = await self._moment(number, turn, ended_s)
                if moment is None or moment.request_s > load.loop.seconds:
                    break
                chosen = load.balancer.pick(session.session_id)
                try:
                    outcome, messages = await self._say(number, turn, moment, chosen, messages)
                finally:
                    load.balancer.done(chosen)
                load.done(outcome)
                if outcome.error is not None:
                    break
                ended_s = outcome.end_s
                load.end_of((session.session_id, number)).set_result(ended_s)
        finally:
            for left in range(number, len(session.turns)):
                end = load.end_of((session.session_id, left))
                if not end.done():
                    end.set_result(None)
        return load.now() + (session.turns[number].reading_s if session.turns else 0.0)

    async def _moment(self, number: int, turn: PlannedTurn, ended_s: float | None) -> Moment | None:
        """When this turn is typed and sent; None if an answer that it needs has failed."""
        load = self._load
        if turn.after:
            ends = [await load.end_of(needed) for needed in turn.after]
            if any(end is None for end in ends):
                return None
            begins = max([end for end in ends if end is not None] + ([] if ended_s is None else [ended_s]))
            return Moment(begins, begins + turn.typing_s)
        if not load.loop.users:
            return when_to_speak(turn.arrival_s, turn.typing_s, ended_s)
        begins = self._starts_s if ended_s is None else ended_s + self._session.turns[number - 1].reading_s
        return Moment(begins, begins + turn.typing_s)

    async def _say(
        self, number: int, turn: PlannedTurn, moment: Moment, chosen: int, messages: list[dict[str, str]]
    ) -> tuple[Outcome, list[dict[str, str]]]:
        """Send one turn and its hint; returns its outcome and the conversation's messages after it."""
        load, session = self._load, self._session
        endpoint = load.endpoints[chosen].of(session)
        # In a closed loop the plan follows from earlier answers.
        planned_s = moment.request_s if load.loop.users or turn.after else turn.arrival_s
        outcome = Outcome(
            session.session_id, number, planned_s, priority=session.priority, tenant=session.tenant, model=session.model
        )
        hinting: asyncio.Task[Hint] | None = None
        if endpoint.hints and turn.hint is not None:
            hint_s = moment.typing_starts_s + turn.hint.offset_s
            if hint_s <= moment.request_s:
                await load.until(hint_s)
                lead_s = max(0.0, moment.request_s - load.now()) if turn.hint.offset_s else turn.typing_s
                sent = Hint(sent_s=load.now())
                hinting = asyncio.create_task(self._send_hint(sent, endpoint, lead_s if turn.hint.expected else None))
        await load.until(moment.request_s)
        messages = [*messages, *turn.says]
        outcome.sent_s = load.now()
        if endpoint.hints:
            self._pretend(endpoint, turn)
        more = dict(turn.headers) if endpoint.workflows else {}
        extra = dict(turn.extra) | ({"priority": session.priority} if session.priority and endpoint.priorities else {})
        asked = replace(endpoint, body=endpoint.body | extra) if extra else endpoint
        try:
            await ask(
                load.http, asked, messages, turn.answer_tokens, session.session_id, outcome, load.now, headers=more
            )
        finally:
            if hinting is not None:
                outcome.hint = await hinting
        if len(load.endpoints) > 1:
            outcome.node = f"instance-{chosen}"
        return outcome, [*messages, {"role": "assistant", "content": outcome.text}]

    def _pretend(self, endpoint: Endpoint, turn: PlannedTurn) -> None:
        async def hint(pretence: Pretence) -> None:
            at_s = self._load.now() + pretence.delay_s
            if at_s <= self._load.loop.seconds:
                await self._load.until(at_s)
                await advise(self._load.http, endpoint, pretence.session_id, None)

        for pretence in turn.pretences:
            self._load.spurious.add(asyncio.create_task(hint(pretence)))

    async def _send_hint(self, hint: Hint, endpoint: Endpoint, expected_arrival_s: float | None) -> Hint:
        session = self._session
        hint.status = await advise(
            self._load.http, endpoint, session.session_id, expected_arrival_s, priority=session.priority
        )
        hint.answered_s = self._load.now()
        return hint
