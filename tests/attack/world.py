"""A stack that is attacked, the honest users beside, and whether it is whole afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.client import Endpoint, Outcome, ask
from loadtest.stack import Stack
from tests.e2e.chat import script
from tests.soak.leaks import services

MODEL = Path(__file__).parents[2] / "models" / "demo"
NAME = "upbeat-demo"
KEYS = {tenant: f"key-of-the-{tenant}-tenant-long-enough" for tenant in ("honest", "hostile")}
#: Hints are limited by tenant; here their parser is attacked, not their limit.
SETTINGS: dict[str, Any] = {
    "gateway": {
        "api_keys": [{"key": key, "tenant": tenant} for tenant, key in KEYS.items()],
        "max_advisories_per_s": 1e6,
        "max_queries_per_s": 1e6,
        "hosts": ["127.0.0.1"],
    },
}
TURNS, ANSWER_TOKENS = 3, 24


@contextlib.contextmanager
def going_first() -> Iterator[None]:
    """What this thread does within goes before all else on the machine, where that is allowed; what it starts does not.
    Users who ask have processors of their own: what a busy server's machine makes their client wait (seconds,
    measured) is not the server's delay."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def started(stack: Stack) -> dict[str, tuple[int, float]]:
    """Every process of the stack by service: its pid, and when it began. Equal later: nothing ended and nothing was
    started again."""
    return {name: (process.pid, process.create_time()) for name, process in services(stack).items()}


@dataclass
class Honest:
    """Users who hold the same conversations again and again. What they are answered must never change: `wrong` says
    where it did.

    pause_s: how long they think before a turn on the average, in seconds. ttft_s: of every turn that was answered, in
    seconds.
    """

    url: str
    users: int
    pause_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    _alone: dict[int, list[str]] = field(default_factory=dict)
    _round: int = 0

    async def alone(self) -> None:
        """Hold each conversation once, one after the other, and remember the answers."""
        async with self._http() as http:
            for person in range(self.users):
                self._alone[person] = [o.text for o in await self._converse(http, person, "alone")]
        self.ttft_s.clear()

    async def until(self, ended: Callable[[], bool]) -> int:
        """All of them at a time, again and again; returns how many conversations were held. At least one each."""
        async with self._http() as http:
            return sum(await asyncio.gather(*(self._again(http, person, ended) for person in range(self.users))))

    async def _again(self, http: aiohttp.ClientSession, person: int, ended: Callable[[], bool]) -> int:
        held = 0
        while not held or not ended():
            self._round += 1
            said = [o.text for o in await self._converse(http, person, f"{self._round}")]
            if said != self._alone[person]:
                self.wrong.append(f"person {person}, round {self._round}: {said} instead of {self._alone[person]}")
            held += 1
        return held

    async def _converse(self, http: aiohttp.ClientSession, person: int, name: str) -> list[Outcome]:
        endpoint = Endpoint(self.url, NAME, api_key=KEYS["honest"], timeout_s=120.0)
        messages: list[dict[str, str]] = []
        outcomes = []
        for turn, text in enumerate(script(7000 + person, TURNS)):
            messages.append({"role": "user", "content": text})
            session = f"honest-{person}-{name}"
            await asyncio.sleep(self.pause_s * random.uniform(0.5, 1.5))
            outcome = Outcome(session, turn, 0.0, sent_s=time.monotonic())
            await ask(http, endpoint, messages, ANSWER_TOKENS, session, outcome, time.monotonic)
            if outcome.error is not None:
                self.wrong.append(f"{session}, turn {turn}: {outcome.error}")
            else:
                self.ttft_s.append(outcome.ttft_s)
            messages.append({"role": "assistant", "content": outcome.text})
            outcomes.append(outcome)
        return outcomes

    @staticmethod
    def _http() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
