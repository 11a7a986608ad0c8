"""Which web pages may call what. Hints may come from any page: they reveal nothing. The rest of the API is for the origins that the
configuration names (`gateway.cors_origins`), and for no page by default.

A page sends its credential itself (a header or the body's `token`), never a cookie, so no answer allows credentials.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aiohttp import hdrs, web

#: Answer the same whether a session exists or not, so any page may ask.
OPEN_ROUTES = frozenset({"/v1/advisory", "/v1/invalidate"})
_METHODS = "GET, POST, PUT, DELETE, OPTIONS"
_ACCEPTED = (
    "Authorization, Content-Type, Idempotency-Key, OpenAI-Organization, OpenAI-Project, X-Session-Id, X-Upbeat-Session, X-Upbeat-Node, "
    "X-Upbeat-Workflow, X-Upbeat-Agent, X-Upbeat-Run, X-Stainless-Arch, X-Stainless-Lang, X-Stainless-OS, X-Stainless-Package-Version, "
    "X-Stainless-Retry-Count, X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout, X-Stainless-Helper-Method"
)
_EXPOSED = (
    "Retry-After, X-Request-Id, X-Session-Id, X-Upbeat-Node, X-Upbeat-Why, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
_PREFLIGHT_S = "86400"
_ANY_PAGE = {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}


def cors_headers(path: str, origin: str | None, origins: Collection[str]) -> Mapping[str, str]:
    """What an answer says to the browser; empty: this page may not read it. origin: the request's header. origins: as configured."""
    if path in OPEN_ROUTES or (path.startswith("/v1/") and "*" in origins):
        return _ANY_PAGE
    if not origins or not path.startswith("/v1/"):
        return {}
    if origin is None or origin not in origins:
        return {"Vary": "Origin"}
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED, "Vary": "Origin"}


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """The answer to a browser that asks whether a page may call; None: this is not such a question, or not for a page."""
    if request.method != hdrs.METH_OPTIONS:
        return None
    allowed = cors_headers(request.path, request.headers.get(hdrs.ORIGIN), origins)
    if "Access-Control-Allow-Origin" not in allowed:
        return None
    asked = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": _ACCEPTED,
        "Access-Control-Max-Age": _PREFLIGHT_S,
    }
    # The other headers come with every answer (`envelope.dress`).
    return web.Response(status=204, headers=asked)
