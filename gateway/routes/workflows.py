"""`PUT/GET/DELETE /v1/workflows/{name}`, `GET /v1/workflows`: the call graphs of the caller's tenant's agent workflows,
for server keys."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from contracts.errors import NotFound
from contracts.ids import check_name
from contracts.v1 import scheduler_pb2 as pb
from contracts.workflow import Edge, Graph, edge_to_json, parse_graph
from gateway.intake import check_json_type, read_json, server_caller_of
from gateway.parts import PARTS
from gateway.schedulers import workflow_key


async def declare(request: web.Request) -> web.Response:
    """Declare a workflow's call graph; what was learned stays."""
    name = _name(request)
    check_json_type(request)
    graph = parse_graph(await read_json(request, name.tenant))
    wanted = pb.DeclareWorkflowRequest(name=name, graph=_graph_to_wire(graph))
    # Tell every scheduler, because each may stand in for the workflow's.
    replies = await request.app[PARTS].fleet.call_all("DeclareWorkflow", wanted, workflow_key(name.tenant, name.name))
    return web.json_response(_workflow(replies[0]))


async def index(request: web.Request) -> web.Response:
    """All workflows, declared or learned."""
    caller = server_caller_of(request)
    replies = await request.app[PARTS].fleet.call_all("ListWorkflows", pb.ListWorkflowsRequest(tenant=caller.tenant))
    found: dict[str, Any] = {}
    for workflow in (w for reply in replies for w in reply.workflows):
        known = found.get(workflow.name.name)
        if known is None or _seen(workflow) > _seen(known):
            found[workflow.name.name] = workflow
    data = []
    for name in sorted(found):
        data.append(_workflow(found[name]))
        await asyncio.sleep(0)  # there may be thousands of edges: others have their turn
    return web.json_response({"object": "list", "data": data})


async def show(request: web.Request) -> web.Response:
    """The declared graph, the learned graph, and the one that hints use."""
    name = _name(request)
    reply = await request.app[PARTS].fleet.call("GetWorkflow", name, session=workflow_key(name.tenant, name.name))
    if not reply.name.name:
        raise _unknown(name.name)
    return web.json_response(_workflow(reply))


async def delete(request: web.Request) -> web.Response:
    """Delete a workflow and what was learned of it."""
    name = _name(request)
    replies = await request.app[PARTS].fleet.call_all("DeleteWorkflow", name, workflow_key(name.tenant, name.name))
    if not any(reply.known for reply in replies):
        raise _unknown(name.name)
    return web.json_response({"id": name.name, "object": "workflow.deleted", "deleted": True})


def _seen(workflow: Any) -> int:
    """Number of observed requests, highest on the workflow's scheduler."""
    return sum(a.requests for a in workflow.observed)


def _name(request: web.Request) -> Any:
    tenant = server_caller_of(request).tenant
    return pb.WorkflowName(tenant=tenant, name=check_name(request.match_info["name"], "name"))


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"there is no workflow {name!r}; declare it, or let a request name it", param="name", code="workflow_not_found"
    )


def _graph_to_wire(graph: Graph) -> Any:
    edges = [
        pb.CallEdge(source=e.source, target=e.target, probability=e.probability, calls=e.calls, delay_s=e.delay_s)
        for e in graph.edges
    ]
    return pb.CallGraph(agents=graph.agents, edges=edges, learn=graph.learn)


def _workflow(w: Any) -> dict[str, Any]:
    declared = {
        "agents": list(w.declared.agents),
        "edges": [_edge(e) for e in w.declared.edges],
        "learn": w.declared.learn,
    }
    return {
        "id": w.name.name,
        "object": "workflow",
        "declared": declared if w.HasField("declared") else None,
        "learned": {
            "agents": [{"name": a.name, "requests": a.requests} for a in w.observed],
            "edges": [_edge(e) | {"weight": round(e.weight, 3)} for e in w.observed_edges],
        },
        "edges": [_edge(e) for e in w.edges],
    }


def _edge(e: Any) -> dict[str, Any]:
    return edge_to_json(Edge(e.source, e.target, e.probability, e.calls, e.delay_s))
