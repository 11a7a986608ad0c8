"""`GET /v1/models`, `GET /v1/models/{model}`."""

from __future__ import annotations

from aiohttp import web

from gateway.generate import unknown_model
from gateway.intake import caller_of
from gateway.parts import PARTS


async def index(request: web.Request) -> web.Response:
    """Every registered model, and every other that some node has had, with its state."""
    caller_of(request)
    return web.json_response({"object": "list", "data": request.app[PARTS].fleet.described()})


async def show(request: web.Request) -> web.Response:
    """One model."""
    caller_of(request)
    name = request.match_info["model"]
    known = {model["id"]: model for model in request.app[PARTS].fleet.described()}
    if name not in known:
        raise unknown_model(name)
    return web.json_response(known[name])
