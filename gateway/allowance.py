"""A tenant's limits at the door (`core.usage`): a request for text is admitted or refused with 429, settled when it ends, and every answer
says what is left, in the headers that OpenAI's clients know."""

from __future__ import annotations

from dataclasses import fields

from aiohttp import web

from contracts.errors import RateLimited
from gateway import metrics
from gateway.core.usage import Allowance, Refused, Ticket, Usage, duration
from gateway.parts import PARTS
from runtime.gateway_config import GatewaySection, TenantLimits

#: Set on a request whose answer says what is left: its tenant.
LIMITED = web.RequestKey("limited tenant", str)
_PER = {"requests": "requests a minute", "tokens": "tokens a minute", "concurrent": "requests at a time", "day": "tokens a day"}


class Limited(RateLimited):
    """429 that says when to come back. lasting: that is not soon, so clients should not try again by themselves."""

    def __init__(self, message: str, retry_after_s: float, *, code: str | None = None, lasting: bool = False) -> None:
        super().__init__(message, code=code)
        self.retry_after_s, self.lasting = retry_after_s, lasting


def usage_of(section: GatewaySection) -> Usage:
    """The limits as configured; each process has its share."""
    named = {tenant: _allowance(limits, section) for tenant, limits in section.tenant_limits.items()}
    return Usage(_allowance(TenantLimits(), section), named)


def _allowance(limits: TenantLimits, section: GatewaySection) -> Allowance:
    named = {field.name for field in fields(Allowance)}
    said = section.limits.model_dump(include=named, exclude_none=True) | limits.model_dump(include=named, exclude_none=True)
    return Allowance(**said).share(section.processes)


def admit(request: web.Request, tenant: str, prompt_tokens: int) -> Ticket:
    """Let a request with about so many tokens of prompts in, to be settled later. Raises Limited."""
    parts = request.app[PARTS]
    request[LIMITED] = tenant
    ticket = parts.usage.begin(tenant, prompt_tokens, parts.clock.now(), parts.clock.wall())
    if isinstance(ticket, Ticket):
        return ticket
    metrics.LIMITED.labels(ticket.what).inc()
    raise _refusal(ticket)


def settle(request: web.Request, ticket: Ticket, used_tokens: int) -> None:
    """The request has ended and took so many tokens."""
    parts = request.app[PARTS]
    parts.usage.finish(ticket, used_tokens, parts.clock.now(), parts.clock.wall())


def withdraw(request: web.Request, ticket: Ticket) -> None:
    """The request never began, for no fault of its own: it counts for nothing."""
    parts = request.app[PARTS]
    parts.usage.withdraw(ticket, parts.clock.now(), parts.clock.wall())


def rate_headers(request: web.Request) -> dict[str, str]:
    """What is left of the tenant's limits a minute; empty where there are none."""
    tenant = request.get(LIMITED)
    if tenant is None:
        return {}
    parts = request.app[PARTS]
    headers = {}
    for what, standing in parts.usage.standing(tenant, parts.clock.now()).items():
        headers[f"x-ratelimit-limit-{what}"] = str(standing.limit)
        headers[f"x-ratelimit-remaining-{what}"] = str(standing.remaining)
        headers[f"x-ratelimit-reset-{what}"] = duration(standing.full_s)
    return headers


def _refusal(refused: Refused) -> Limited:
    what = _PER.get(refused.what, "tokens a month")
    when = f"try again in {duration(refused.after_s)}"
    if refused.what in ("day", "month"):
        message = f"the quota of {refused.limit:g} {what} is used up; {when}"
        return Limited(message, refused.after_s, code="insufficient_quota", lasting=True)
    return Limited(f"more than {refused.limit:g} {what}; {when}", refused.after_s)
