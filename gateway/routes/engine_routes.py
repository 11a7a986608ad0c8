"""`POST /v1/responses`, `/v1/messages`, `/v1/messages/count_tokens`, `/v1/embeddings`: routes that only engines with
HTTP of their own have. A request for another model is refused by name."""

from __future__ import annotations

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway.core.relay_routes import OwnKind
from gateway.intake import caller_of, read_relayed
from gateway.parts import PARTS
from gateway.routes.relayed import relay


async def responses(request: web.Request) -> web.StreamResponse:
    """A turn in the format of OpenAI's Responses API."""
    return await _relayed(request, "responses")


async def messages(request: web.Request) -> web.StreamResponse:
    """A turn in Anthropic's format."""
    return await _relayed(request, "messages")


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """The number of tokens of a prompt in Anthropic's format."""
    return await _relayed(request, "count_tokens")


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Embeddings. Where no model can have them, the body is not read."""
    caller_of(request)
    if not request.app[PARTS].fleet.relays:
        raise InvalidRequest(
            "embeddings are not supported: this server's models generate text; ask a server of embedding models",
            param="model",
            code="unsupported_operation",
        )
    return await _relayed(request, "embeddings")


async def _relayed(request: web.Request, kind: OwnKind) -> web.StreamResponse:
    caller = caller_of(request)
    return await relay(request, caller, await read_relayed(request, kind, caller))
