"""`GET /v1/models`, `GET /v1/models/{model}`; and what no model here does."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from contracts.errors import InvalidRequest
from gateway.core.routing import Model
from gateway.generate import unknown_model
from gateway.intake import caller_of
from gateway.parts import PARTS


async def index(request: web.Request) -> web.Response:
    """Every model that some node has served."""
    caller_of(request)
    models = request.app[PARTS].fleet.models
    return web.json_response({"object": "list", "data": [_body(models[name]) for name in sorted(models)]})


async def show(request: web.Request) -> web.Response:
    """One of them."""
    caller_of(request)
    name = request.match_info["model"]
    model = request.app[PARTS].fleet.models.get(name)
    if model is None:
        raise unknown_model(name)
    return web.json_response(_body(model))


async def embeddings(request: web.Request) -> web.Response:
    """Refused by name."""
    caller_of(request)
    raise InvalidRequest(
        "embeddings are not supported: this server's models generate text; ask a server of embedding models",
        param="model",
        code="unsupported_operation",
    )


def _body(model: Model) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "upbeat", "max_model_len": model.max_tokens}
