"""Applies tenants' limits (`core.usage`) to HTTP requests: admits a request for text or refuses it with 429, settles it
when it ends, and writes the remaining limits into OpenAI's headers."""

from __future__ import annotations

from dataclasses import fields

from aiohttp import web

from contracts.errors import RateLimited
from gateway import metrics
from gateway.core.usage import Allowance, Refused, Ticket, Usage, duration
from gateway.parts import PARTS
from runtime.gateway_config import GatewaySection, TenantLimits

#: The tenant of a request whose answer has rate limit headers.
LIMITED = web.RequestKey("limited tenant", str)
_PER = {
    "requests": "requests a minute",
    "tokens": "tokens a minute",
    "concurrent": "requests at a time",
    "day": "tokens a day",
}


class Limited(RateLimited):
    """429 with `Retry-After`. lasting: the limit lasts so long that clients should not retry by themselves."""

    def __init__(self, message: str, retry_after_s: float, *, code: str | None = None, lasting: bool = False) -> None:
        super().__init__(message, code=code)
        self.retry_after_s, self.lasting = retry_after_s, lasting


def usage_of(section: GatewaySection) -> Usage:
    """This process's share of the configured limits."""
    named = {tenant: _allowance(limits, section) for tenant, limits in section.tenant_limits.items()}
    return Usage(_allowance(TenantLimits(), section), named)


def _allowance(limits: TenantLimits, section: GatewaySection) -> Allowance:
    named = {field.name for field in fields(Allowance)}
    said = section.limits.model_dump(include=named, exclude_none=True) | limits.model_dump(
        include=named, exclude_none=True
    )
    return Allowance(**said).share(section.processes)


def admit(request: web.Request, tenant: str, prompt_tokens: int) -> Ticket:
    """Admit a request whose prompts have about `prompt_tokens`; `settle` or `withdraw` ends it. Raises Limited."""
    parts = request.app[PARTS]
    request[LIMITED] = tenant
    ticket = parts.usage.begin(tenant, prompt_tokens, parts.clock.now(), parts.clock.wall())
    if isinstance(ticket, Ticket):
        return ticket
    metrics.LIMITED.labels(ticket.what).inc()
    raise _refusal(ticket)


def settle(request: web.Request, ticket: Ticket, used_tokens: int) -> None:
    """The request has ended and used `used_tokens`, prompt and answers."""
    parts = request.app[PARTS]
    parts.usage.finish(ticket, used_tokens, parts.clock.now(), parts.clock.wall())


def withdraw(request: web.Request, ticket: Ticket) -> None:
    """The request never began: undo what it was counted for."""
    parts = request.app[PARTS]
    parts.usage.withdraw(ticket, parts.clock.now(), parts.clock.wall())


def rate_headers(request: web.Request) -> dict[str, str]:
    """The tenant's remaining limits per minute as headers; empty without limits."""
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
