"""From an HTTP request to a caller and a decoded body, reading no more than the limit."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from aiohttp import hdrs, web

from contracts.errors import Forbidden, InvalidRequest, RequestError, Unavailable
from gateway import metrics
from gateway.core.admission import Caller, bearer, check_length, parse_json
from gateway.core.browser_tokens import Grant, is_browser_token
from gateway.core.limits import ByteBudget
from gateway.parts import PARTS, Parts

#: Request header: run on this node. Response header: it ran there.
NODE_HEADER = "X-Upbeat-Node"
#: From the headers to the body's end.
BODY_TIMEOUT_S = 60.0
#: A hint's body, with a credential in a header, and without: that one is read before its sender is known.
HINT_BODY_BYTES, STRANGERS_BODY_BYTES = 1 << 20, 64 << 10
#: Of the bytes of bodies that are held at a time, the part that senders may take who are not known yet.
STRANGERS_SHARE = 8
#: What holds a request's body until it has ended, and how much of it.
_HELD = web.RequestKey("held body bytes", tuple[ByteBudget, int])


class Hinter(NamedTuple):
    """Who sends a hint: a caller with a key, or a page with a browser token, whose `grant` narrows what it may say."""

    caller: Caller
    grant: Grant | None = None
    token: str = ""

    def check_session(self, session_id: str, param: str) -> None:
        """Raises Forbidden, naming `param`, when this one may not speak for the session."""
        if self.grant is not None:
            self.grant.check_session(session_id, param)


def hinter_of(request: web.Request, token: str | None) -> Hinter:
    """Who sends a hint; `token`: a credential from the body, used when no header has one. Raises Unauthorized, and Forbidden for a token
    that is bound to other pages."""
    parts = request.app[PARTS]
    credential = bearer(request.headers.get(hdrs.AUTHORIZATION)) or token
    if credential is None or not is_browser_token(credential):
        return Hinter(parts.keys.caller(credential))
    grant = parts.browser_tokens.read(credential, parts.clock.wall())
    grant.check_origin(request.headers.get("Origin"))
    return Hinter(Caller(grant.tenant, grant.max_priority, server=False), grant, credential)


def caller_of(request: web.Request) -> Caller:
    """Who calls. Raises Unauthorized, and Forbidden for a browser token, which is good for hints only."""
    parts = request.app[PARTS]
    credential = bearer(request.headers.get(hdrs.AUTHORIZATION))
    if is_browser_token(credential):
        assert credential is not None
        parts.browser_tokens.read(credential, parts.clock.wall())
        raise Forbidden("a browser token may advise and invalidate, nothing else", code="client_secret_scope")
    return parts.keys.caller(credential)


def server_caller_of(request: web.Request) -> Caller:
    """Who calls a route that needs a server key. Raises Unauthorized or Forbidden."""
    caller = caller_of(request)
    if not caller.server:
        raise Forbidden("this route needs a server key")
    return caller


async def read_hint(request: web.Request) -> tuple[Any, Hinter]:
    """As `read_json`, for the routes whose credential may be in the body's `token`, and who sends it. A credential in a header is looked at
    first; without one, little is read. Raises what `hinter_of` raises too."""
    parts = request.app[PARTS]
    if parts.keys.open or bearer(request.headers.get(hdrs.AUTHORIZATION)) is not None:
        hinter = hinter_of(request, None)
        data = await read_json(request, HINT_BODY_BYTES)
    else:
        hinter = None
        data = await read_json(request, STRANGERS_BODY_BYTES, parts.strangers)
    token = data.get("token") if isinstance(data, dict) else None
    if token is not None and not isinstance(token, str):
        raise InvalidRequest("token must be a string", param="token", code="invalid_type")
    return data, hinter if hinter is not None and token is None else hinter_of(request, token)


async def read_json(request: web.Request, limit_bytes: int | None = None, budget: ByteBudget | None = None) -> Any:
    """The decoded body, of at most `limit_bytes` and the configured limit; held in `budget`, else in all callers', until `release_body`.

    Raises BodyTooLarge at once by Content-Length, or when a chunked body crosses the limit; Unavailable when the bodies of all requests
    together are too much; InvalidRequest for a compressed body and for anything but JSON."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING)
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest("compressed bodies are not supported; send the body as it is", param="Content-Encoding")
    parts = request.app[PARTS]
    limit, length = min(parts.config.gateway.max_body_bytes, limit_bytes or 1 << 62), request.content_length
    check_length(length, limit)
    budget = budget or parts.bodies
    if (length or 0) > budget.limit - budget.held:
        raise _no_room()
    try:
        if request.content.is_eof():  # it came with its headers, and there is nothing to wait for
            return parse_json(_held(request, budget, request.content.read_nowait(), 0, limit))
        body = bytearray()
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.content.iter_any():
                body += _held(request, budget, piece, len(body), limit)
    except RequestError:
        raise
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="invalid_body") from None
    except (web.RequestPayloadError, ValueError) as e:
        raise InvalidRequest(f"the body could not be read: {e}", code="invalid_body") from None
    return parse_json(bytes(body))


def _held(request: web.Request, budget: ByteBudget, piece: bytes, before: int, limit: int) -> bytes:
    """`piece`, which is counted; `before`: bytes of the body that came earlier. Raises BodyTooLarge or Unavailable."""
    check_length(before + len(piece), limit)
    if not budget.take(len(piece)):
        raise _no_room()
    request[_HELD] = (budget, before + len(piece))
    return piece


def release_body(request: web.Request) -> None:
    """The request has ended, and what was made of its body."""
    held = request.get(_HELD)
    if held is not None:
        del request[_HELD]
        budget, amount = held
        budget.give(amount)


def _no_room() -> Unavailable:
    metrics.SHED.labels("bodies").inc()
    return Unavailable("this gateway holds as much of other requests as it can; try again", code="overloaded")


async def expect_continue(request: web.Request) -> None:
    """Ask for a body only when it is welcome: `Expect: 100-continue` with a body over the limit gets its 413 unsent."""
    limit_bytes = request.app[PARTS].config.gateway.max_body_bytes
    if request.content_length is not None and request.content_length > limit_bytes:
        return
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def pinned_node(request: web.Request, caller: Caller, parts: Parts) -> str:
    """The node that the caller pins, or empty. Raises Forbidden without a server key, InvalidRequest for an unknown node."""
    node = request.headers.get(NODE_HEADER, "")
    if not node:
        return ""
    if not caller.server:
        raise Forbidden(f"{NODE_HEADER} needs a server key", param=NODE_HEADER)
    if not parts.fleet.knows_node(node):
        raise InvalidRequest(f"{NODE_HEADER}: no node is called {node[:60]!r}", param=NODE_HEADER, code="unknown_node")
    return node
