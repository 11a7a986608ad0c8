"""The outermost layer: whatever happens inside, the caller gets an answer in OpenAI's shape, and it is counted.

Also where browsers are let in: the two hint routes may be called from any page (they reveal nothing), the others from none.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from contracts.errors import BodyTooLarge, InvalidRequest, NotFound, RateLimited, RequestError, Unavailable
from gateway import metrics
from runtime import telemetry

log = telemetry.logger("gateway.http")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CORS_ROUTES = frozenset({"/v1/advisory", "/v1/invalidate"})
CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "POST, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Session-Id, X-Upbeat-Node",
    "Access-Control-Max-Age": "86400",
}


class Limited(RateLimited):
    """429 that says when to come back."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def error_response(error: RequestError) -> web.Response:
    """The caller's error."""
    response = web.Response(status=error.status, text=json.dumps(error.envelope()), content_type="application/json")
    if isinstance(error, Limited):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Unavailable):
        response.headers["Retry-After"] = "1"
    if isinstance(error, BodyTooLarge):
        response.force_close()
    return response


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into the envelope."""
    try:
        response = await handler(request)
    except RequestError as e:
        response = error_response(e)
    except web.HTTPException as e:
        response = _http_error(request, e)
    except RecursionError:
        response = error_response(InvalidRequest("the body is nested too deeply", code="invalid_json"))
    except ConnectionError as e:
        log.info("the caller went away", path=request.path, error=str(e))
        raise
    except Exception:
        incident = secrets.token_hex(6)
        log.exception("unexpected error", path=request.path, incident=incident)
        body = {"error": {"message": f"internal error {incident}", "type": "server_error", "param": None, "code": "internal_error"}}
        response = web.json_response(body, status=500)
    if request.path in CORS_ROUTES and not response.prepared:
        response.headers.update(CORS)
    metrics.REQUESTS.labels(route_name(request), str(response.status)).inc()
    return response


def route_name(request: web.Request) -> str:
    """The route's pattern: few, whatever callers ask for."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status < 400:
        return web.Response(status=error.status, headers=error.headers)
    if error.status == 404:
        return error_response(NotFound(f"no such route: {request.method} {request.path[:200]}", code="unknown_url"))
    refused = InvalidRequest(error.reason, code="http_error")
    refused.status = error.status
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        refused = InvalidRequest(f"{request.method} is not allowed here; allowed: {allowed}", code="method_not_allowed")
        refused.status = 405
        response = error_response(refused)
        response.headers["Allow"] = allowed
        return response
    return error_response(refused)
