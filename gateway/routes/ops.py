"""Health, readiness, metrics, the fleet, and the API's description."""

from __future__ import annotations

from collections import Counter
from typing import Any

from aiohttp import web

from contracts.devices import node_of, number_of
from contracts.errors import InvalidRequest
from contracts.v1 import scheduler_pb2 as pb
from gateway.intake import server_caller_of
from gateway.openai.description import openapi
from gateway.parts import PARTS
from runtime import version as release
from runtime.metrics_page import CONTENT_TYPE

#: Values of a boolean query parameter.
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


async def health(_request: web.Request) -> web.Response:
    """200 while the process runs."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 when every registered model has a node that serves it or can wake it; with `?all=1`, when every expected node
    serves."""
    parts = request.app[PARTS]
    reasons = parts.missing() if _wants_all(request) else parts.not_ready()
    view = parts.fleet.view
    body = {
        "status": "not ready" if reasons else "ready",
        "missing": reasons,
        "nodes_serving": sum(n.serving for n in view.nodes) if view else 0,
        "nodes_expected": view.expected if view else parts.config.devices,
    }
    return web.json_response(body, status=503 if reasons else 200)


async def version(_request: web.Request) -> web.Response:
    """The release, in vLLM's format."""
    return web.json_response({"version": release.version()})


def _wants_all(request: web.Request) -> bool:
    wanted = request.query.getall("all", ["0"])
    if len(wanted) > 1 or wanted[0] not in _SWITCH:
        raise InvalidRequest("all must be 1, to ask whether every node serves, or 0", param="all")
    return _SWITCH[wanted[0]]


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format, of all processes of this gateway."""
    return web.Response(
        body=await request.app[PARTS].siblings.metrics(),
        headers={"Content-Type": CONTENT_TYPE},
    )


async def fleet(request: web.Request) -> web.Response:
    """The last known fleet, for `upbeat status`; with `?metrics=true` also each node's samples, for `upbeat top`."""
    server_caller_of(request)
    parts = request.app[PARTS]
    wanted = request.query.get("metrics", "false")
    if wanted not in ("true", "false"):
        raise InvalidRequest("metrics must be true or false", param="metrics")
    samples: dict[str, Any] = {}
    if wanted == "true":
        reply = await parts.fleet.call("Metrics", pb.MetricsRequest())
        samples = {name: {"metrics": dict(node.samples)} for name, node in reply.nodes.items()}
    view, seen = parts.fleet.view, await parts.fleet.schedulers.survey()
    hints: Counter[str] = Counter()
    for _, one in seen:
        hints.update({n.node: n.advised for n in one.nodes} if one is not None else {})
    return web.json_response(
        {
            "object": "fleet",
            "ready": not parts.not_ready(),
            "missing": parts.missing(),
            "scheduler_live": parts.fleet.live,
            "schedulers": [_scheduler(address, one) for address, one in seen],
            "expected_nodes": view.expected if view else parts.config.devices,
            "active_requests": parts.active,
            "nodes": [
                {
                    "node": n.name,
                    "on_node": node_of(n.name),
                    "device": number_of(n.name),
                    "worker_address": n.worker_address,
                    "serving": n.serving,
                    "state": n.state,
                    "connected": n.name in parts.workers.connected,
                    "running": n.running,
                    "waiting": n.waiting,
                    **n.details,
                    "advised": hints[n.name],
                    **samples.get(n.name, {}),
                }
                for n in (view.nodes if view else ())
            ],
        }
    )


def _scheduler(address: str, seen: pb.Fleet | None) -> dict[str, Any]:
    if seen is None:
        return {"address": address, "state": "silent", "nodes": 0, "advised": 0}
    state = "gathering" if seen.gathering else "serving"
    return {"address": address, "state": state, "nodes": len(seen.nodes), "advised": sum(n.advised for n in seen.nodes)}


async def description(request: web.Request) -> web.Response:
    """OpenAPI 3.1."""
    return web.json_response(openapi(request.app[PARTS].config.served_model))
