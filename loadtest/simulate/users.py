"""Simulated users: they read an answer, type, and ask; hints are sent when typing begins, or by `Habits`.

`open`: conversations start at a trace's times. `closed`: a fixed number of users, each with one conversation after the
other, as in SYMPHONY, section 4, "Trace generation".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from contracts.ids import SessionKey
from loadtest.habits import SPURIOUS_WITHIN_S, Habits, draw
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import Fleet
from loadtest.simulate.request import Request
from loadtest.traces import TOKENS_PER_WORD
from loadtest.typist import READ_WORDS_PER_S, when_to_speak
from scheduler.core.advisories import Hint

#: Lifetime of a hint after its expected arrival (or now), as in the gateway.
HINT_TTL_S = 60.0
#: Habits of browser users.
_USUAL = Habits(expected=False)


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """new_tokens: of the user, in addition to the history. arrival_s: from the trace's start. reading_s: of its answer,
    in a closed loop; None: by the answer's length."""

    new_tokens: int
    answer_tokens: int
    typing_s: float
    arrival_s: float = 0.0
    reading_s: float | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """A planned conversation."""

    session: SessionKey
    turns: tuple[ScriptedTurn, ...]
    priority: int = 0


@dataclass(slots=True)
class _Talk:
    """A conversation in progress."""

    script: Script
    next: int = 0
    history_tokens: int = 0


@dataclass(slots=True)
class Users:
    """See the module. requests: all that were sent. seed: of start times and habits."""

    events: Events
    fleet: Fleet
    seed: int
    habits: Mapping[str, Habits] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    ended: int = 0
    #: Once true, no more turns are planned.
    closing: bool = False
    _past: dict[str, list[SessionKey]] = field(default_factory=dict)
    _hints: int = 0

    def open(self, scripts: Sequence[Script]) -> None:
        """Plan each conversation at its time; later turns by `typist.when_to_speak`."""
        for script in scripts:
            first = script.turns[0]
            moment = when_to_speak(self.events.now + first.arrival_s, first.typing_s, None)
            self._plan(
                _Talk(script), moment.typing_starts_s, moment.request_s, lambda talk, end_s: self._on_time(talk, end_s)
            )

    def closed(self, scripts: Sequence[Script], users: int, spread_s: float = 60.0) -> None:
        """Plan a closed loop: the n-th user has every `users`-th conversation, whatever the policy. All start within
        `spread_s`."""
        for number in range(users):
            queue = list(reversed(scripts[number::users]))
            self._next_talk(queue, random.Random(f"{self.seed} {number}").random() * spread_s)

    # ---- when --------------------------------------------------------------------------------------------------
    def _on_time(self, talk: _Talk, end_s: float) -> None:
        if talk.next < len(talk.script.turns):
            turn = talk.script.turns[talk.next]
            moment = when_to_speak(turn.arrival_s, turn.typing_s, end_s)
            self._plan(talk, moment.typing_starts_s, moment.request_s, self._on_time)

    def _next_talk(self, queue: list[Script], pause_s: float) -> None:
        if queue:
            talk = _Talk(queue.pop())
            starts_s = self.events.now + pause_s
            self._plan(talk, starts_s, starts_s + talk.script.turns[0].typing_s, partial(self._after_reading, queue))

    def _after_reading(self, queue: list[Script], talk: _Talk, end_s: float) -> None:
        turn = talk.script.turns[talk.next - 1]
        reading_s = (
            turn.answer_tokens / TOKENS_PER_WORD / READ_WORDS_PER_S if turn.reading_s is None else turn.reading_s
        )
        if talk.next == len(talk.script.turns):
            self._next_talk(queue, reading_s)
            return
        starts_s = end_s + reading_s
        self._plan(
            talk, starts_s, starts_s + talk.script.turns[talk.next].typing_s, partial(self._after_reading, queue)
        )

    def _plan(
        self, talk: _Talk, typing_starts_s: float, request_s: float, then: Callable[[_Talk, float], None]
    ) -> None:
        """Schedule a turn's hints and request. then: called with the conversation and the time at the turn's end."""
        if self.closing:
            return
        tenant = talk.script.session.tenant
        habits = self.habits.get(tenant, _USUAL)
        chance = random.Random(f"{self.seed} {talk.script.session} {talk.next}").random
        drawn = draw(habits, chance)
        hint_s = typing_starts_s + drawn.offset_s
        if self.fleet.variant.hints and not drawn.missed and hint_s < request_s:
            self.events.at(hint_s, lambda: self._hint(talk.script, request_s if habits.expected else None))
        self.events.at(request_s, lambda: self._ask(talk, then))
        for _ in range(drawn.spurious if self.fleet.variant.hints else 0):
            self.events.at(request_s + chance() * SPURIOUS_WITHIN_S, partial(self._pretend, tenant, chance()))

    # ---- what --------------------------------------------------------------------------------------------------
    def _ask(self, talk: _Talk, then: Callable[[_Talk, float], None]) -> None:
        turn = talk.script.turns[talk.next]
        prompt = talk.history_tokens + turn.new_tokens

        def done(request: Request) -> None:
            self.ended += 1
            talk.history_tokens = request.prompt_tokens + request.answer_tokens
            talk.next += 1
            if talk.next == len(talk.script.turns):
                self._past.setdefault(talk.script.session.tenant, []).append(talk.script.session)
            then(talk, request.end_s)

        name = f"r{len(self.requests)}"
        request = Request(
            name,
            talk.script.session,
            talk.next,
            prompt,
            talk.history_tokens,
            turn.answer_tokens,
            self.events.now,
            done,
            priority=talk.script.priority,
        )
        self.requests.append(request)
        self.fleet.ask(request)

    def _hint(self, script: Script, arrival_s: float | None) -> None:
        self._send(script.session, script.priority, arrival_s, f"{script.session.session_id}")

    def _pretend(self, tenant: str, drawn: float) -> None:
        """A spurious hint: a user types in a finished conversation and gives up."""
        past = self._past.get(tenant)
        if past and not self.closing:
            session = past[int(drawn * len(past))]
            self._send(session, 0, None, session.session_id)

    def _send(self, session: SessionKey, priority: int, arrival_s: float | None, address: str) -> None:
        self._hints += 1
        now = self.events.now
        expires_s = (now if arrival_s is None else arrival_s) + HINT_TTL_S
        self.fleet.advise(
            Hint(
                session, f"h{self._hints}", arrival_s=arrival_s, expires_s=expires_s, priority=priority, address=address
            )
        )
