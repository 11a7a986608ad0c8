"""The object that gives routes the gateway's parts: built in `app`, reached as `request.app[PARTS]`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from gateway.attainment import Attainments
from gateway.bodies import Bodies
from gateway.core.admission import Keys
from gateway.core.browser_limits import BrowserLimits
from gateway.core.browser_tokens import BrowserTokens
from gateway.core.callers import Callers
from gateway.core.hosts import Hosts
from gateway.core.limits import RateLimits
from gateway.core.routing import missing, unserved
from gateway.core.usage import Usage
from gateway.decoding import Decoding
from gateway.finetune.jobs import FineTuning
from gateway.fleet import Fleet
from gateway.generate import Generator
from gateway.hints import Hints
from gateway.responses.keeper import Keeper
from gateway.sessions import Sessions
from gateway.siblings import Siblings
from gateway.slots import Turnstile
from gateway.turn_reports import TurnReports
from gateway.watching import Watches
from gateway.workers import Workers
from runtime.clock import Clock
from runtime.config import Config


@dataclass(slots=True)
class Parts:
    """The gateway's parts. active: number of requests for text. idle: set while there are none. draining: new ones are
    refused. handing_over: another process takes new connections, and each answer ends its own."""

    config: Config
    clock: Clock
    keys: Keys
    fleet: Fleet
    workers: Workers
    generator: Generator
    hints: Hints
    sessions: Sessions
    #: Of hints, and of queries.
    limits: RateLimits
    queries: RateLimits
    #: By tenant: the erasures that may wait for the fleet at a time. Further ones wait for these.
    erasing: dict[str, asyncio.Semaphore]
    usage: Usage
    bodies: Bodies
    decoding: Decoding
    siblings: Siblings
    callers: Callers
    hosts: Hosts
    browser_tokens: BrowserTokens
    browser_limits: BrowserLimits
    watches: Watches
    turnstile: Turnstile
    turn_reports: TurnReports
    attainments: Attainments
    fine_tuning: FineTuning
    responses: Keeper
    #: The first origins that this process refused and logged.
    refused_origins: set[str] = field(default_factory=set)
    active: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    draining: bool = False
    handing_over: bool = False

    def __post_init__(self) -> None:
        self.idle.set()

    def enter(self) -> None:
        """A request for text begins."""
        self.active += 1
        self.idle.clear()

    def leave(self) -> None:
        """A request for text has ended."""
        self.active -= 1
        if not self.active:
            self.idle.set()

    def not_ready(self) -> list[str]:
        """Reasons why this gateway should get no requests; empty when every registered model has a node that serves it
        or can wake it."""
        return unserved(self.fleet.view, self.fleet.registered, self.workers.connected, self.draining)

    def missing(self) -> list[str]:
        """Reasons why the gateway is not ready or a node does not serve; empty when all nodes serve."""
        found = [*self.not_ready(), *missing(self.fleet.view, self.fleet.live, self.workers.connected, self.draining)]
        return list(dict.fromkeys(found))


PARTS = web.AppKey("parts", Parts)
