"""The load: sessions that return at random, each hinted some turns ahead, one per client at a time.

A closed loop: a client asks its next turn when the last one is answered, so turns per second are the throughput. Equal
seeds give the same order of sessions in every arm.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.client import Endpoint, Outcome, advise, ask
from loadtest.prompts import block_words
from loadtest.stack import Stack, StackError
from runtime.clock import RealClock
from runtime.config_file import load_config

CLOCK = RealClock()


@dataclass(frozen=True)
class Timing:
    """Concurrent turns and hints, and the tokens of a turn."""

    clients: int
    ahead: int
    new: int
    answer: int


@dataclass
class Talks:
    """All sessions and their histories. `body` is added to every request."""

    count: int
    tokens: int
    body: dict[str, Any]
    histories: list[list[dict[str, str]]] = field(default_factory=list)
    said: int = 0
    _begun: list[list[dict[str, str]]] = field(default_factory=list)

    async def begin(self, stack: Stack, answer_tokens: int) -> None:
        """Run every session's first turn, uncached."""
        endpoint = Endpoint(stack.url, stack.model_name(), body=self.body)
        self.histories = [[] for _ in range(self.count)]
        async with aiohttp.ClientSession() as http:
            for number in range(self.count):
                await self.speak(
                    http, endpoint, number, block_words(number, self.tokens - answer_tokens), answer_tokens
                )
        self._begun = [list(history) for history in self.histories]

    def rewind(self) -> None:
        """Drop all turns but the first. Later turns use other words, so that they are uncached."""
        self.histories = [list(history) for history in self._begun]

    async def speak(
        self, http: aiohttp.ClientSession, endpoint: Endpoint, number: int, words: list[str], answer_tokens: int
    ) -> Outcome:
        """Run one turn and extend the history. Raises StackError if it fails."""
        history = self.histories[number]
        messages = [*history, {"role": "user", "content": " ".join(words)}]
        outcome = Outcome(name(number), len(history) // 2, 0.0, sent_s=CLOCK.now())
        await ask(http, endpoint, messages, answer_tokens, name(number), outcome, CLOCK.now)
        if outcome.error is not None:
            raise StackError(f"{name(number)}: {outcome.error}")
        self.histories[number] = [*messages, {"role": "assistant", "content": outcome.text}]
        return outcome


def name(number: int) -> str:
    """The session's id."""
    return f"pressed-{number}"


class Order:
    """Chooses the next session at random from those neither running nor hinted."""

    def __init__(self, sessions: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._idle = list(range(sessions))

    def draw(self) -> int:
        """Draw the next session."""
        return self._idle.pop(self._random.randrange(len(self._idle)))

    def back(self, number: int) -> None:
        """Make a session available again after its turn."""
        self._idle.append(number)


async def hold(
    stack: Stack, talks: Talks, timing: Timing, turns: int, limit_s: float, seed: int
) -> tuple[list[Outcome], float]:
    """Run turns, each hinted `ahead` turns before it is asked; none starts after limit_s. Returns them and their
    seconds.

    Raises StackError if a turn fails.
    """
    if timing.clients + timing.ahead >= talks.count:
        raise ValueError(
            f"{talks.count} sessions are too few for {timing.clients} clients and {timing.ahead} hinted turns"
        )
    endpoint = Endpoint(stack.url, stack.model_name(), hints=True, body=talks.body)
    order, outcomes, coming = Order(talks.count, seed), list[Outcome](), deque[int]()
    async with aiohttp.ClientSession() as http:

        async def hint() -> None:
            number = order.draw()
            status = await advise(http, endpoint, name(number), 1.0)
            if status != 202:
                raise StackError(f"an advisory was answered {status}")
            coming.append(number)

        for _ in range(timing.ahead):
            await hint()
        await CLOCK.sleep(1.0)
        left, began = turns, CLOCK.now()

        async def client() -> None:
            nonlocal left
            while left > 0 and CLOCK.now() - began < limit_s:
                left -= 1
                number = coming.popleft()
                await hint()
                talks.said += 1
                words = block_words(100_000 + talks.said, timing.new - timing.answer)
                outcomes.append(await talks.speak(http, endpoint, number, words, timing.answer))
                order.back(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(timing.clients):
                group.create_task(client())
        span_s = CLOCK.now() - began
        # Sessions hinted but not asked must not rank above others later.
        for number in coming:
            await withdraw(http, endpoint, name(number))
    return outcomes, span_s


async def withdraw(http: aiohttp.ClientSession, endpoint: Endpoint, session_id: str) -> None:
    """Withdraw the session's hint."""
    async with http.post(f"{endpoint.base_url}/v1/invalidate", json={"session_id": session_id}) as response:
        await response.read()


def samples(stack: Stack) -> dict[str, float]:
    """The worker's metrics by name and labels."""
    places = load_config(stack.config_file, {"nodes": {"count": 1}}).node(0)
    lines = stack.metrics(places.devices[0].metrics_port).splitlines()
    found = (re.fullmatch(r"(upbeat_worker_\S+) (\S+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}
