"""`GET /v1/models`, `GET /v1/models/{model}`, `GET /v1/models/{model}/placement`, `DELETE /v1/models/{model}`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from contracts.models import state_of
from contracts.v1 import scheduler_pb2 as pb
from gateway.generate import unknown_model
from gateway.intake import query_caller_of, server_caller_of
from gateway.parts import PARTS


async def index(request: web.Request) -> web.Response:
    """Every registered model, and every other that some node has had, with its state."""
    query_caller_of(request)
    return web.json_response({"object": "list", "data": list(_known(request).values())})


async def show(request: web.Request) -> web.Response:
    """One model."""
    query_caller_of(request)
    return _shown(request, request.match_info["model"])


async def delete(request: web.Request) -> web.Response:
    """Stop serving a model that a fine-tuning job of the caller's tenant made."""
    tenant, name = server_caller_of(request).tenant, request.match_info["model"]
    await request.app[PARTS].fleet.finetune("RemoveModel", pb.RemoveModelRequest(tenant=tenant, model=name))
    return web.json_response({"id": name, "object": "model", "deleted": True})


def _known(request: web.Request) -> dict[str, dict[str, Any]]:
    parts = request.app[PARTS]
    return {m["id"]: m | {"slo_turns": parts.attainments.shown(m["id"])} for m in parts.fleet.described()}


def _shown(request: web.Request, name: str) -> web.Response:
    known = _known(request)
    if name not in known:
        raise unknown_model(name)
    return web.json_response(known[name])


async def placement(request: web.Request) -> web.Response:
    """When the model's weights came to each device and left it lately, latest first, and why; and what it lends."""
    name, fleet = request.match_info["model"], request.app[PARTS].fleet
    if fleet.knows_model(f"{name}/placement"):  # a model of that name
        query_caller_of(request)
        return _shown(request, f"{name}/placement")
    server_caller_of(request)
    if not fleet.knows_model(name):
        raise unknown_model(name)
    reply = await fleet.call("ExplainModel", pb.ExplainModelRequest(model=fleet.base_of(name)))
    return web.json_response({"id": name, "object": "model.placement", "nodes": [_on(one) for one in reply.devices]})


def _on(device: Any) -> dict[str, Any]:
    moves = [
        {
            "ago_s": move.ago_s,
            "state": state_of(move.state).word,
            "why": move.why,
            "other": move.other or None,
            "seconds": move.seconds,
            "layers_lent": move.layers_lent,
        }
        for move in sorted(device.moves, key=lambda move: move.ago_s)
    ]
    told, may = device.may_lend, ("idle", "computing", "transfer_s", "layer_s")
    return {
        "node": device.node,
        "state": state_of(device.state).word,
        "layers": device.layers,
        "layers_lent": device.layers_lent,
        "may_lend": {name: getattr(told, name) for name in may} | {"never": told.never or None}
        if device.HasField("may_lend")
        else None,
        "moves": moves,
    }
