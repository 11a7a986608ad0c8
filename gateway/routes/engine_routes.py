"""`POST /v1/embeddings`: a route that only engines with HTTP of their own have. A request for another model is refused
by name."""

from __future__ import annotations

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway.intake import caller_of, read_relayed
from gateway.parts import PARTS
from gateway.routes.relayed import relay


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Embeddings. Where no model can have them, the body is not read."""
    caller = caller_of(request)
    if not request.app[PARTS].fleet.relays:
        raise InvalidRequest(
            "embeddings are not supported: this server's models generate text; ask a server of embedding models",
            param="model",
            code="unsupported_operation",
        )
    return await relay(request, caller, await read_relayed(request, "embeddings", caller))
