"""The outermost middleware: every error becomes an answer in OpenAI's envelope, and every answer is counted.

It also adds the headers of every answer: rate limits (`allowance`), CORS (`cors`) and the request's id.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from contracts.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, NotFound, RateLimited, RequestError, Unavailable
from gateway import metrics
from gateway.allowance import Limited, rate_headers
from gateway.connection import Connection
from gateway.core.relay_routes import error_body
from gateway.cors import cors_headers, preflight
from gateway.pages import check_sender
from gateway.parts import PARTS
from gateway.request_ids import HEADER, id_of, shown
from gateway.timing import ARRIVED_S
from gateway.whole_answers import TENANT, is_large, sent
from runtime import telemetry

log = telemetry.logger("gateway.http")
#: The request's work goes on after it was answered; whoever does it releases its body.
OUTLIVES = web.RequestKey("outlives", bool)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(error: RequestError, path: str = "") -> web.Response:
    """The response for an error of this route."""
    body = json.dumps(error_body(error, path))
    response = web.Response(status=error.status, text=body, content_type="application/json")
    if isinstance(error, Limited):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        if error.lasting:
            response.headers["x-should-retry"] = "false"
    elif isinstance(error, Unavailable | RateLimited):
        response.headers["Retry-After"] = "1"
    if isinstance(error, BodyTooLarge | BodyTooSlow) or error.code == "overloaded":
        response.force_close()
    return response


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into the envelope."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    connection.deadlines.began()
    request[ARRIVED_S] = request.app[PARTS].clock.now()
    try:
        check_sender(request)
        response = preflight(request, request.app[PARTS].config.gateway.cors_origins) or await handler(request)
        if is_large(request, response):
            response = await _held_and_sent(request, response)
    except RequestError as e:
        response = error_response(e, request.path)
        if log.is_enabled_for(logging.DEBUG):
            log.debug("refused", request=id_of(request), route=route_name(request), status=e.status, error=e.message)
    except web.HTTPException as e:
        response = _http_error(request, e)
    except RecursionError:
        error = InvalidRequest("the body is nested too deeply", code="invalid_json")
        response = error_response(error, request.path)
    except ConnectionError as e:
        log.info("the caller went away", request=id_of(request), route=route_name(request), error=str(e))
        raise
    except Exception:
        incident = secrets.token_hex(6)
        log.exception("unexpected error", request=id_of(request), route=route_name(request), incident=incident)
        broken = Unavailable(f"internal error {incident}", code="internal_error")
        broken.status = 500
        response = web.json_response(error_body(broken, request.path), status=500)
    finally:
        connection.deadlines.ended()
        if not request.get(OUTLIVES):
            request.app[PARTS].bodies.release(request)
    if request.app[PARTS].draining and not response.prepared:
        response.force_close()
    metrics.child(metrics.REQUESTS, route_name(request), str(response.status)).inc()
    return response


async def _held_and_sent(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Send a large answer; its tenant holds it meanwhile, instead of the body. Raises Unavailable when there is no room
    for it."""
    parts = request.app[PARTS]
    assert isinstance(response, web.Response) and isinstance(response.body, bytes)
    if not request.get(OUTLIVES):
        parts.bodies.release(request)
    closes = parts.draining or response.keep_alive is False
    with parts.bodies.sending(request[TENANT], len(response.body)):
        return await sent(request, response.body, response.headers, response.status, closes=closes)


async def dress(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every answer, before they are sent."""
    section, headers = request.app[PARTS].config.gateway, response.headers
    headers["Server"] = "upbeat"  # instead of the versions of aiohttp and Python
    if request.app[PARTS].handing_over:
        response.force_close()
        headers[hdrs.CONNECTION] = "close"
    if HEADER not in headers:
        headers[HEADER] = shown(id_of(request))
    for more in (
        rate_headers(request),
        cors_headers(request.path, request.headers.get(hdrs.ORIGIN), section.cors_origins),
    ):
        if more:
            headers.update(more)


def route_name(request: web.Request) -> str:
    """The route's pattern, so that metrics have few labels whatever callers send."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status < 400:
        return web.Response(status=error.status, headers=error.headers)
    if error.status == 404:
        unknown = NotFound(f"no such route: {request.method} {request.path[:200]}", code="unknown_url")
        return error_response(unknown, request.path)
    refused = InvalidRequest(error.reason, code="http_error")
    refused.status = error.status
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        refused = InvalidRequest(f"{request.method} is not allowed here; allowed: {allowed}", code="method_not_allowed")
        refused.status = 405
        response = error_response(refused, request.path)
        response.headers["Allow"] = allowed
        return response
    return error_response(refused, request.path)
