"""The way of a request into the gateway, within its tenant's limits and into a slot, and out with what it used."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from contracts.errors import Unavailable
from gateway.allowance import admit, settle, withdraw
from gateway.parts import PARTS


@dataclass(slots=True)
class Used:
    """Tokens that a request has used, prompt and answers. Set before it leaves."""

    tokens: int = 0


@contextlib.asynccontextmanager
async def entered(request: web.Request, tenant: str, priority: int, prompt_tokens: int) -> AsyncIterator[Used]:
    """Within it, the request holds a slot and counts as running. prompt_tokens: an estimate. Raises Unavailable when
    the gateway stops or has no slot, Limited over a limit of the tenant."""
    parts = request.app[PARTS]
    if parts.draining:
        raise Unavailable("this gateway is stopping; try again")
    ticket = admit(request, tenant, prompt_tokens)
    try:
        place = await parts.turnstile.enter(tenant, priority)
    except BaseException:
        withdraw(request, ticket)
        raise
    used = Used()
    parts.enter()
    try:
        yield used
    finally:
        settle(request, ticket, used.tokens)
        parts.leave()
        parts.turnstile.leave(place)
