"""`GET /v1/scale`: how many nodes the fleet should have, and why; for KEDA, HPA's adapters and `upbeat autoscale`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from contracts.v1 import scheduler_pb2 as pb
from gateway.intake import server_caller_of
from gateway.parts import PARTS

#: Digits of figures.
_DIGITS = 6


async def show(request: web.Request) -> web.Response:
    """The first scheduler's that answers. Raises Unavailable while none does, so that autoscalers change nothing."""
    server_caller_of(request)
    said = await request.app[PARTS].fleet.call("Scale", pb.ScaleRequest())
    return web.json_response(scale_page(said))


def scale_page(said: pb.ScaleReply) -> dict[str, Any]:
    """The page of a scheduler's answer. Work in seconds of a device; `demand` in devices; shares from 0."""
    return {
        "object": "scale",
        "desired_nodes": said.desired_nodes,
        "wanted_nodes": said.wanted_nodes,
        "why": said.why,
        "nodes": said.nodes,
        "starting_nodes": said.starting_nodes,
        "devices": said.devices,
        "demand": round(said.demand_devices, _DIGITS),
        "utilisation": round(said.utilisation, _DIGITS) if said.HasField("utilisation") else None,
        "arriving_work": round(said.arriving, _DIGITS),
        "work_s": round(said.work_s, _DIGITS),
        "kv_needed": {"hbm": round(said.hbm_needed, _DIGITS), "dram": round(said.dram_needed, _DIGITS)},
        "slo": {
            "attainment": round(said.attainment, _DIGITS) if said.HasField("attainment") else None,
            "turns": said.turns,
        },
        "models": [
            {
                "model": name,
                "work_s": round(of.work_s, _DIGITS),
                "work_s_a_node": round(of.work_s / max(of.nodes, 1), _DIGITS),
                "arriving_work": round(of.arriving, _DIGITS),
                "nodes": of.nodes,
                "attainment": {target: round(of.attainment[target], _DIGITS) for target in sorted(of.attainment)},
                "turns": {target: of.turns[target] for target in sorted(of.turns)},
            }
            for name, of in sorted(said.models.items())
        ],
        "devices_work_s": {name: round(said.work_by_device[name], _DIGITS) for name in sorted(said.work_by_device)},
        "unmeasured_devices": said.unmeasured_devices,
        "incomplete": said.incomplete,
        "policy": {
            "min_nodes": said.min_nodes,
            "max_nodes": said.max_nodes,
            "target_utilisation": said.target_utilisation,
        },
    }
