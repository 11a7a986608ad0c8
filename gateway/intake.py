"""Turns an HTTP request into a caller and a decoded body."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from aiohttp import hdrs, web

from contracts.errors import BodyTooLarge, Forbidden, InvalidRequest, WrongMediaType
from gateway.allowance import Limited
from gateway.asking import Kind
from gateway.core.admission import Caller, bearer, parse_json
from gateway.core.bodies import MOST_DECODED, SMALL_VALUES, Tally, most_useful_bytes
from gateway.core.browser_tokens import Grant, is_browser_token
from gateway.core.callers import network_of
from gateway.core.relay_bodies import Relayed
from gateway.core.relay_routes import OWN_KINDS, OwnKind, is_anthropic
from gateway.core.spellings import FINAL, PRIORITY, session_of
from gateway.metrics import LIMITED
from gateway.openai.asked import Asked, TextKind, Told
from gateway.openai.inputs import MAX_PROMPTS
from gateway.openai.token_requests import TokenKind, TokensAsked
from gateway.parts import PARTS, Parts
from gateway.translating import MessageAsked, NeedsStored, ResponseAsked
from gateway.whole_answers import TENANT

#: Where Anthropic's clients put a key, and a header that they always send.
_KEY_HEADER, _VERSION_HEADER = "X-Api-Key", "Anthropic-Version"
#: In a request: the node that must run it. In a response: the node that ran it.
NODE_HEADER = "X-Upbeat-Node"
#: Size limits of bodies other than requests for text: with a credential in a header, and of hints without one, which
#: are read before their sender is known.
SMALL_BODY_BYTES, UNAUTHENTICATED_BODY_BYTES = 1 << 20, 64 << 10
#: Content types that browsers send across sites only after a preflight, unlike text/plain, forms, and bodies without a
#: type.
_JSON_TYPE = re.compile(r"application/(json|[a-z0-9!#$&^_.-]+\+json)")


class Hinter(NamedTuple):
    """The sender of a hint: a caller with a key, or a page with a browser token, which `grant` restricts."""

    caller: Caller
    grant: Grant | None = None
    token: str = ""

    def check_session(self, session_id: str, param: str) -> None:
        """Raises Forbidden, naming `param`, when the sender may not send hints for the session."""
        if self.grant is not None:
            self.grant.check_session(session_id, param)


def hinter_of(request: web.Request, token: str | None) -> Hinter:
    """The sender of a hint. token: a credential from the body, used when no header has one. Raises Unauthorized, and
    Forbidden for a token bound to another origin."""
    parts = request.app[PARTS]
    credential = bearer(request.headers.get(hdrs.AUTHORIZATION)) or token
    if credential is None or not is_browser_token(credential):
        return Hinter(parts.keys.caller(credential))
    grant = parts.browser_tokens.read(credential, parts.clock.wall())
    grant.check_origin(request.headers.get("Origin"))
    return Hinter(Caller(grant.tenant, grant.max_priority, server=False), grant, credential)


def caller_of(request: web.Request) -> Caller:
    """The caller. Raises Unauthorized, and Forbidden for a browser token, which is valid for hints only."""
    parts = request.app[PARTS]
    credential = bearer(request.headers.get(hdrs.AUTHORIZATION))
    if credential is None and (is_anthropic(request.path) or _VERSION_HEADER in request.headers):
        credential = request.headers.get(_KEY_HEADER)
    if is_browser_token(credential):
        assert credential is not None
        parts.browser_tokens.read(credential, parts.clock.wall())
        raise Forbidden("a browser token may advise and invalidate, nothing else", code="client_secret_scope")
    caller = parts.keys.caller(credential)
    request[TENANT] = caller.tenant
    return caller


def query_caller_of(request: web.Request) -> Caller:
    """The caller of a route that is neither for text nor a hint. Raises what `caller_of` raises, and Limited."""
    caller = caller_of(request)
    charge_queries(request, caller, 1)
    return caller


def charge_queries(request: web.Request, caller: Caller, count: int) -> None:
    """Take so many from the tenant's queries. Raises Limited."""
    parts = request.app[PARTS]
    if wait_s := parts.queries.take(caller.tenant, count, parts.clock.now()):
        LIMITED.labels("queries").inc()
        limit = f"{parts.queries.per_s:g} queries a second (gateway.max_queries_per_s)"
        raise Limited(f"more than {limit}; try again in {max(wait_s, 0.1):.1f} s", wait_s)


def server_caller_of(request: web.Request, *, counted: bool = True) -> Caller:
    """Like `query_caller_of`, of a route that needs a server key. counted: off, of one that is no query. Raises
    Forbidden, too."""
    caller = query_caller_of(request) if counted else caller_of(request)
    if not caller.server:
        raise Forbidden("this route needs a server key")
    return caller


async def read_hint(request: web.Request) -> tuple[Any, Hinter]:
    """The body of a hint and its sender, whose credential may be the body's `token`. A credential in a header is
    checked before the body is read; without one, only a small body is read. Raises what `read_json` and `hinter_of`
    raise."""
    parts = request.app[PARTS]
    if parts.keys.open or bearer(request.headers.get(hdrs.AUTHORIZATION)) is not None:
        hinter = hinter_of(request, None)
        data = await read_json(request, hinter.caller.tenant)
    else:
        hinter = None
        data = await read_json(request, network_of(request.remote), UNAUTHENTICATED_BODY_BYTES, unauthenticated=True)
    token = data.get("token") if isinstance(data, dict) else None
    if token is not None and not isinstance(token, str):
        raise InvalidRequest("token must be a string", param="token", code="invalid_type")
    return data, hinter if hinter is not None and token is None else hinter_of(request, token)


def check_json_type(request: web.Request) -> None:
    """Raises WrongMediaType unless the Content-Type is JSON. Not called for hints, which pages send as text/plain."""
    said = request.headers.getall(hdrs.CONTENT_TYPE, ())
    essence = said[0].partition(";")[0].strip().lower() if len(said) == 1 else ""
    if not _JSON_TYPE.fullmatch(essence):
        raise WrongMediaType(
            "send the body as JSON, with the header `Content-Type: application/json`", param=hdrs.CONTENT_TYPE
        )


async def read_json(
    request: web.Request, owner: str, limit_bytes: int = SMALL_BODY_BYTES, unauthenticated: bool = False
) -> Any:
    """The decoded body of a request other than for text: at most `limit_bytes` and few values. owner: the share that
    holds it: a tenant's, or that of an unauthenticated caller's network. Raises what `Bodies.read` raises, and
    InvalidRequest for anything but JSON."""
    bodies = request.app[PARTS].bodies
    body, tally = await bodies.read(request, owner, limit_bytes, unauthenticated=unauthenticated)
    if tally.values > SMALL_VALUES:
        raise InvalidRequest(
            f"the body holds more than {SMALL_VALUES} values; send several smaller ones", code="invalid_body"
        )
    bodies.hold(request, tally.length + tally.decoded)
    return parse_json(body)


async def read_asked(request: web.Request, kind: TextKind, caller: Caller) -> Asked | Relayed:
    """The decoded request for text. A large body is decoded in a helper process; afterwards the request holds the size
    of its packed prompts, or of the body for an engine's HTTP. Raises what `check_json_type` and `Bodies.read` raise,
    InvalidRequest for an invalid body, and BodyTooLarge when decoding takes too much memory."""
    body, tally, told = await _read(request, kind, caller, MAX_PROMPTS if kind == "completion" else 1)
    asked: Asked | Relayed = await request.app[PARTS].decoding.ask(kind, body, tally, told)
    _hold(request, asked, tally)
    return asked


async def read_tokens_asked(request: web.Request, kind: TokenKind, caller: Caller) -> TokensAsked | Relayed:
    """Like `read_asked`, for `/tokenize` and `/detokenize`."""
    body, tally, told = await _read(request, kind, caller, 1)
    asked: TokensAsked | Relayed = await request.app[PARTS].decoding.ask(kind, body, tally, told)
    _hold(request, asked, tally)
    return asked


async def read_response(request: web.Request, caller: Caller) -> tuple[ResponseAsked, str | None]:
    """Like `read_asked`, for `/v1/responses`; also the session of the response that it goes on from. Raises also what
    `Keeper.named` raises."""
    parts, session = request.app[PARTS], None
    body, tally, told = await _read(request, "response", caller, 1)
    asked = await parts.decoding.ask("response", body, tally, told)
    if isinstance(asked, NeedsStored):
        most_bytes = parts.config.gateway.max_body_bytes - tally.length
        named = await parts.responses.named(caller.tenant, asked, most_bytes)
        session = named.session
        for piece in named.pieces:
            tally.add(piece)
        _hold_undecoded(request, tally)
        asked = await parts.decoding.ask("response", body, tally, told, named.stored)
    _hold(request, asked.asked, tally, beside=len(asked.items) + len(asked.echo))
    return asked, session


async def read_message(request: web.Request, caller: Caller) -> MessageAsked:
    """Like `read_asked`, for `/v1/messages`."""
    body, tally, told = await _read(request, "message", caller, 1)
    asked: MessageAsked = await request.app[PARTS].decoding.ask("message", body, tally, told)
    _hold(request, asked.asked, tally)
    return asked


async def read_count(request: web.Request, caller: Caller) -> TokensAsked | Relayed:
    """Like `read_tokens_asked`, for `/v1/messages/count_tokens`."""
    body, tally, told = await _read(request, "count", caller, 1)
    asked: TokensAsked | Relayed = await request.app[PARTS].decoding.ask("count", body, tally, told)
    _hold(request, asked, tally)
    return asked


def _hold_undecoded(request: web.Request, tally: Tally) -> None:
    """Hold a body that is about to be decoded, with what it names of stored responses. A large one holds its length;
    the helper that decodes it has a limit of its own. Raises what `Bodies.hold` raises, and BodyTooLarge for too many
    values."""
    parts = request.app[PARTS]
    if tally.light:
        parts.bodies.hold(request, tally.length + tally.decoded)
        return
    if tally.decoded > MOST_DECODED * parts.config.gateway.max_body_bytes:
        raise BodyTooLarge("the body holds too many values; send fewer of them")
    parts.bodies.hold(request, tally.length)


def _hold(request: web.Request, asked: Asked | TokensAsked | Relayed, tally: Tally, beside: int = 0) -> None:
    """Hold what is left of a large body. beside: bytes that are kept besides."""
    bodies = request.app[PARTS].bodies
    if isinstance(asked, Relayed):
        bodies.hold(request, len(asked.body) + beside)
    elif not tally.light:
        packed = asked.packed_bytes if isinstance(asked, TokensAsked) else sum(p.packed_bytes for p in asked.prompts)
        bodies.hold(request, packed + beside)


async def read_relayed(request: web.Request, kind: OwnKind, caller: Caller) -> Relayed:
    """Like `read_asked`, for routes that only engines with HTTP of their own have. Raises InvalidRequest also for a
    model with another engine."""
    body, tally, told = await _read(request, kind, caller, 1)
    asked: Relayed = await request.app[PARTS].decoding.ask(kind, body, tally, told)
    _hold(request, asked, tally)
    return asked


async def _read(request: web.Request, kind: Kind, caller: Caller, prompts: int) -> tuple[bytes, Tally, Told]:
    """The body of a request with at most `prompts` prompts, its tally, and its context."""
    check_json_type(request)
    parts = request.app[PARTS]
    most, fleet = parts.config.gateway.max_body_bytes, parts.fleet
    relays = fleet.relays or kind in OWN_KINDS
    # Images make a body longer than any prompt.
    useful = None if relays else most_useful_bytes(fleet.bounds.values(), prompts)
    body, tally = await parts.bodies.read(request, caller.tenant, most, useful)
    _hold_undecoded(request, tally)
    said = {name: value for name in (FINAL, PRIORITY) if (value := request.headers.get(name)) is not None}
    told = Told(caller.tenant, session_of(request.headers) is not None, said, fleet.bounds, parts.config.served_model)
    told.per_user = parts.config.gateway.per_user(caller.tenant)
    if relays:
        told.wires = fleet.wires
    return body, tally, told


async def expect_continue(request: web.Request) -> None:
    """Answer `Expect: 100-continue`, unless the body is over the limit: then the client gets its 413 without sending
    it."""
    limit_bytes = request.app[PARTS].config.gateway.max_body_bytes
    if request.content_length is not None and request.content_length > limit_bytes:
        return
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def pinned_node(request: web.Request, caller: Caller, parts: Parts, model: str = "") -> str:
    """The node that the caller pins, or empty. Raises Forbidden without a server key, InvalidRequest for an unknown
    node or one that serves other models only."""
    node = request.headers.get(NODE_HEADER, "")
    if not node:
        return ""
    if not caller.server:
        raise Forbidden(f"{NODE_HEADER} needs a server key", param=NODE_HEADER)
    if not parts.fleet.knows_node(node):
        raise InvalidRequest(f"{NODE_HEADER}: no node is called {node[:60]!r}", param=NODE_HEADER, code="unknown_node")
    if model and parts.fleet.lacks(node, model):
        raise InvalidRequest(
            f"{NODE_HEADER}: {node} has no model {model!r}; pin a node that has it, or none", param=NODE_HEADER
        )
    return node
