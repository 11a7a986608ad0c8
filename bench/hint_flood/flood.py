"""The load: users who chat, with a hint while they type, and another tenant whose hints never come true.

Chatters are a closed loop: a client asks its next turn when the last one is answered. The flood is open: hints at a
fixed rate, in lists, half for cached sessions of the flooder, half for unknown sessions.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.client import Endpoint, Outcome, advise, ask
from loadtest.prompts import block_words
from loadtest.stack import Stack, StackError
from runtime.clock import RealClock

CLOCK = RealClock()
MODEL = "flooded"
KEYS = {"chat": "key-of-the-chatters", "flood": "key-of-the-flooder"}
#: Seconds of typing before a turn; seconds until the flood's hints expire.
TYPING_S, TTL_S = 0.5, 2.0
#: Hints per list of the flood, concurrent lists, and sessions of the flooder.
BATCH, LISTS, OWN = 20, 8, 8
#: Turns after which a conversation restarts.
TURNS = 12
#: Offset of the metrics port from the scheduler's port.
_METRICS_PORT = 10


def settings(dram_gib: float) -> dict[str, Any]:
    """The stack's settings: two tenants, and little DRAM."""
    keys = [{"key": key, "tenant": tenant} for tenant, key in KEYS.items()]
    return {"model_name": MODEL, "gateway": {"api_keys": keys}, "kv": {"dram_gib": dram_gib}}


@dataclass
class Window:
    """Results of a window.

    statuses: the flood's hints by HTTP status. done: all hints by what the scheduler did.
    """

    turns: list[Outcome] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def hints_per_s(self) -> float:
        """The chatters' hints per second."""
        return len(self.turns) / self.seconds


@dataclass
class World:
    """A stack with the conversations of chatters and flooder."""

    stack: Stack
    sessions: int
    tokens: int
    answer: int = 8
    _histories: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    _begun: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def endpoint(self, tenant: str) -> Endpoint:
        """The gateway's endpoint with this tenant's key."""
        return Endpoint(
            self.stack.url, MODEL, api_key=KEYS[tenant], hints=True, body={"ignore_eos": True}, timeout_s=120.0
        )

    async def begin(self) -> None:
        """Run the first turn of every conversation."""
        for tenant, count in (("chat", self.sessions), ("flood", OWN)):
            endpoint = self.endpoint(tenant)
            async with aiohttp.ClientSession(headers=endpoint.headers) as http:
                for number in range(count):
                    await self._say(
                        http, endpoint, f"{tenant}-{number}", block_words(hash_of(tenant, number), self.tokens)
                    )
        self._begun = {name: list(history) for name, history in self._histories.items()}

    async def _say(self, http: aiohttp.ClientSession, endpoint: Endpoint, name: str, words: list[str]) -> Outcome:
        history = self._histories.setdefault(name, [])
        messages = [*history, {"role": "user", "content": " ".join(words)}]
        outcome = Outcome(name, len(history) // 2, 0.0, sent_s=CLOCK.now())
        await ask(http, endpoint, messages, self.answer, name, outcome, CLOCK.now)
        if outcome.error is None:
            self._histories[name] = [*messages, {"role": "assistant", "content": outcome.text}]
        return outcome

    # ---- the load ----------------------------------------------------------------------------------------------
    async def hold(self, seconds: float, clients: int, flood_per_s: float, seed: int) -> Window:
        """Chat for `seconds`, with a flood if flood_per_s. The window includes failed turns with their errors."""
        window, before, begun_s = Window(), self.hints(), CLOCK.now()
        end_s = begun_s + seconds
        idle, drawn = list(range(self.sessions)), random.Random(seed)
        endpoint = self.endpoint("chat")
        async with aiohttp.ClientSession(headers=endpoint.headers) as http:

            async def client(number: int) -> None:
                await CLOCK.sleep(number * TYPING_S / clients)
                while CLOCK.now() < end_s:
                    who = idle.pop(drawn.randrange(len(idle)))
                    name = f"chat-{who}"
                    if len(self._histories[name]) >= 2 * TURNS:
                        self._histories[name] = list(self._begun[name])
                    if await advise(http, endpoint, name, TYPING_S) != 202:
                        raise StackError("a chatter's hint was refused")
                    await CLOCK.sleep(TYPING_S)
                    window.turns.append(
                        await self._say(http, endpoint, name, block_words(drawn.randrange(1 << 30), 24))
                    )
                    idle.append(who)

            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(client(number))
                if flood_per_s:
                    group.create_task(self._flood(flood_per_s, end_s, drawn, window))
        window.seconds = CLOCK.now() - begun_s
        after = self.hints()
        window.done = {done: count - before.get(done, 0.0) for done, count in after.items()}
        return window

    async def _flood(self, per_s: float, end_s: float, drawn: random.Random, window: Window) -> None:
        endpoint, due_s, room = self.endpoint("flood"), CLOCK.now(), asyncio.Semaphore(LISTS)
        async with aiohttp.ClientSession(headers=endpoint.headers) as http, asyncio.TaskGroup() as group:

            async def send(names: list[str]) -> None:
                async with room:
                    body = {"advisories": [{"session_id": name, "ttl_s": TTL_S} for name in names]}
                    try:
                        async with http.post(f"{endpoint.base_url}/v1/advisory", json=body) as response:
                            await response.read()
                            status = response.status
                    except (aiohttp.ClientError, TimeoutError):
                        status = 0
                window.statuses[status] = window.statuses.get(status, 0) + len(names)

            while (now := CLOCK.now()) < end_s:
                if now < due_s:
                    await CLOCK.sleep(due_s - now)
                    continue
                due_s += BATCH / per_s
                own = [f"flood-{drawn.randrange(OWN)}" for _ in range(BATCH // 2)]
                group.create_task(send(own + [f"ghost-{drawn.randrange(1 << 40)}" for _ in range(BATCH - len(own))]))

    def hints(self) -> dict[str, float]:
        """The scheduler's hint counts since its start, by what it did."""
        lines = self.stack.metrics(self.stack.port + 1 + _METRICS_PORT).splitlines()
        prefix = 'upbeat_scheduler_hints_total{done="'
        return {
            line.removeprefix(prefix).partition('"')[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(prefix)
        }


def hash_of(tenant: str, number: int) -> int:
    """The number of a block of words that starts only this conversation."""
    return random.Random(f"{tenant}-{number}").randrange(1 << 30)
