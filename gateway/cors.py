"""Decides which web pages may call which routes. Any page may send hints, because their answers reveal nothing. Other
API routes are open to the origins in `gateway.cors_origins`, by default to none.

Pages send their credential in a header or the body's `token`, never in a cookie, so no answer allows credentials.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aiohttp import hdrs, web

from contracts.errors import Forbidden
from gateway.parts import PARTS
from runtime import telemetry
from runtime.gateway_config import ORIGIN

log = telemetry.logger("gateway.cors")
#: These answer the same whether or not a session exists, so any page may call them.
OPEN_ROUTES = frozenset({"/v1/advisory", "/v1/invalidate"})
#: vLLM's API routes outside `/v1/`.
_BESIDE_V1 = frozenset({"/tokenize", "/detokenize"})
_METHODS = "GET, POST, PUT, DELETE, OPTIONS"
_ACCEPTED = (
    "Authorization, Content-Type, Idempotency-Key, OpenAI-Organization, OpenAI-Project, X-Session-Id, "
    "X-Upbeat-Session, X-Upbeat-Node, "
    "X-Upbeat-Timing, X-Upbeat-Workflow, X-Upbeat-Agent, X-Upbeat-Run, X-Stainless-Arch, X-Stainless-Lang, "
    "X-Stainless-OS, "
    "X-Stainless-Package-Version, X-Stainless-Retry-Count, X-Stainless-Runtime, X-Stainless-Runtime-Version, "
    "X-Stainless-Timeout, X-Stainless-Helper-Method, X-Api-Key, Anthropic-Version, Anthropic-Beta, "
    "Anthropic-Dangerous-Direct-Browser-Access, OpenAI-Beta, X-Request-Id, Traceparent, Tracestate"
)
_EXPOSED = (
    "Retry-After, Server-Timing, X-Request-Id, X-Session-Id, X-Upbeat-Node, X-Upbeat-Why, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_PREFLIGHT_S = "86400"
#: Number of refused origins that are logged, and characters shown of each.
_LOGGED, _SHOWN = 64, 100
#: Origins that see `Server-Timing` in the browser's measurements: those that may read the answer.
_TIMING = "Timing-Allow-Origin"
_ANY_PAGE = {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}


def is_api(path: str) -> bool:
    """Whether the path is an API route, which only pages of configured origins may call unless it is an open route."""
    return path.startswith("/v1/") or path in _BESIDE_V1


def cors_headers(path: str, origin: str | None, origins: Collection[str]) -> Mapping[str, str]:
    """CORS headers of an answer; empty: the page may not read it. origin: the request's. origins: as configured."""
    if path in OPEN_ROUTES:
        return _ANY_PAGE
    if is_api(path) and "*" in origins:
        return _ANY_PAGE | {_TIMING: "*"}
    if not origins or not is_api(path):
        return {}
    if origin is None or origin not in origins:
        return {"Vary": "Origin"}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": _EXPOSED,
        "Vary": "Origin",
        _TIMING: origin,
    }


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """The answer to a preflight; None: the request is none. Raises Forbidden if the page may not call."""
    origin = request.headers.get(hdrs.ORIGIN)
    if request.method != hdrs.METH_OPTIONS or not is_api(request.path):
        return None
    if "Access-Control-Allow-Origin" not in cors_headers(request.path, origin, origins):
        if origin is None:
            return None
        raise refusal(request, "may not read this server's answers", f"start it with {listing(origin)}")
    asked = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": _ACCEPTED,
        "Access-Control-Max-Age": _PREFLIGHT_S,
    }
    # `envelope.dress` adds the other headers to every answer.
    return web.Response(status=204, headers=asked)


def refusal(request: web.Request, why: str, remedy: str) -> Forbidden:
    """The error for a page of another site. Its browser may hide the error, so the first one of each origin is also
    logged."""
    origin, logged = request.headers.get(hdrs.ORIGIN), request.app[PARTS].refused_origins
    said = f"pages of {origin[:_SHOWN]!r}" if origin else "pages of other sites"
    message = f"{said} {why}; {remedy}"
    if len(logged) < _LOGGED and (origin or "") not in logged:
        logged.add(origin or "")
        log.warning("a page was refused", error=message)
    return Forbidden(message, param=hdrs.ORIGIN, code="origin_not_allowed")


def listing(origin: str | None) -> str:
    """How an operator permits an origin, for error messages."""
    named = origin if origin and len(origin) <= _SHOWN and ORIGIN.fullmatch(origin) and origin != "*" else "ORIGIN"
    return f"`upbeat up --cors-origin {named}`, or list them in gateway.cors_origins"
