"""Which web pages may call what. Hints may come from any page: they reveal nothing. The rest of the API is for the origins that the
configuration names (`gateway.cors_origins`), and for no page by default.

A page sends its credential itself (a header or the body's `token`), never a cookie, so no answer allows credentials.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aiohttp import hdrs, web

from contracts.errors import Forbidden
from gateway.parts import PARTS
from runtime import telemetry
from runtime.gateway_config import ORIGIN

log = telemetry.logger("gateway.cors")
#: Answer the same whether a session exists or not, so any page may ask.
OPEN_ROUTES = frozenset({"/v1/advisory", "/v1/invalidate"})
#: Of the API's routes, those that vLLM has beside `/v1/`.
_BESIDE_V1 = frozenset({"/tokenize", "/detokenize"})
_METHODS = "GET, POST, PUT, DELETE, OPTIONS"
_ACCEPTED = (
    "Authorization, Content-Type, Idempotency-Key, OpenAI-Organization, OpenAI-Project, X-Session-Id, X-Upbeat-Session, X-Upbeat-Node, "
    "X-Upbeat-Timing, X-Upbeat-Workflow, X-Upbeat-Agent, X-Upbeat-Run, X-Stainless-Arch, X-Stainless-Lang, X-Stainless-OS, "
    "X-Stainless-Package-Version, X-Stainless-Retry-Count, X-Stainless-Runtime, X-Stainless-Runtime-Version, "
    "X-Stainless-Timeout, X-Stainless-Helper-Method"
)
_EXPOSED = (
    "Retry-After, Server-Timing, X-Request-Id, X-Session-Id, X-Upbeat-Node, X-Upbeat-Why, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_PREFLIGHT_S = "86400"
#: So many refused origins are logged, and so much of each is repeated.
_LOGGED, _SHOWN = 64, 100
#: Whose pages see `Server-Timing` among the browser's own measurements: those that may read the answer.
_TIMING = "Timing-Allow-Origin"
_ANY_PAGE = {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}


def is_api(path: str) -> bool:
    """A page that calls it needs to be one of the configured ones, except for the open routes."""
    return path.startswith("/v1/") or path in _BESIDE_V1


def cors_headers(path: str, origin: str | None, origins: Collection[str]) -> Mapping[str, str]:
    """What an answer says to the browser; empty: this page may not read it. origin: the request's header. origins: as configured."""
    if path in OPEN_ROUTES:
        return _ANY_PAGE
    if is_api(path) and "*" in origins:
        return _ANY_PAGE | {_TIMING: "*"}
    if not origins or not is_api(path):
        return {}
    if origin is None or origin not in origins:
        return {"Vary": "Origin"}
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED, "Vary": "Origin", _TIMING: origin}


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """The answer to a browser that asks whether a page may call; None: this is not such a question. Raises Forbidden where it may not."""
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
    # The other headers come with every answer (`envelope.dress`).
    return web.Response(status=204, headers=asked)


def refusal(request: web.Request, why: str, remedy: str) -> Forbidden:
    """The error for a page of another site, which its browser may not show: so the first of each origin is logged as well."""
    origin, logged = request.headers.get(hdrs.ORIGIN), request.app[PARTS].refused_origins
    said = f"pages of {origin[:_SHOWN]!r}" if origin else "pages of other sites"
    message = f"{said} {why}; {remedy}"
    if len(logged) < _LOGGED and (origin or "") not in logged:
        logged.add(origin or "")
        log.warning("a page was refused", error=message)
    return Forbidden(message, param=hdrs.ORIGIN, code="origin_not_allowed")


def listing(origin: str | None) -> str:
    """How an operator lets the pages of an origin call."""
    named = origin if origin and len(origin) <= _SHOWN and ORIGIN.fullmatch(origin) and origin != "*" else "ORIGIN"
    return f"`upbeat up --cors-origin {named}`, or list them in gateway.cors_origins"
