"""The calls that declare and show workflows, and the files that keep them across restarts.

Files: DATA/workflows/TENANT/NAME.json, each replaced atomically. A declaration is written before its call is answered,
observations every few seconds and at the end. So a crash loses a few seconds of observations.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from contracts.v1 import scheduler_pb2
from contracts.workflow import Edge, Graph
from runtime import telemetry
from runtime.clock import Clock
from scheduler.core.callgraph import CallGraph
from scheduler.core.callgraph_stored import from_stored, to_stored
from scheduler.core.callgraph_table import Callgraphs, WorkflowKey

log = telemetry.logger("scheduler.workflows")
_WRITE_EVERY_S = 5.0


class Workflows:
    """See the module. Schedulers may share a directory: one of them gets a workflow's requests and learns."""

    def __init__(self, callgraphs: Callgraphs, directory: Path, clock: Clock) -> None:
        self._callgraphs, self._directory, self._clock = callgraphs, directory, clock
        self._writing = asyncio.Lock()

    # ---- files -------------------------------------------------------------------------------------------------
    async def load(self) -> None:
        """Read every file. One that cannot be read is logged and kept."""
        for path, text in await asyncio.to_thread(_read_all, self._directory):
            try:
                tenant, name, graph = from_stored(json.loads(text))
            except (ValueError, RequestError) as e:
                log.warning("a workflow's file is not understood", path=str(path), error=str(e))
                continue
            self._callgraphs.restore(tenant, name, graph)

    async def keep(self) -> None:
        """Write what has changed every `_WRITE_EVERY_S`, forever."""
        while True:
            await self._clock.sleep(_WRITE_EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Write what has changed. Failures are logged and retried by the next call."""
        async with self._writing:
            changed, self._callgraphs.changed = self._callgraphs.changed, set()
            for key in sorted(changed):
                graph = self._callgraphs.get(*key)
                data = to_stored(*key, graph) if graph is not None else None
                try:
                    await asyncio.to_thread(_replace, path_of(self._directory, key), data)
                except OSError as e:
                    self._callgraphs.changed.add(key)
                    log.warning("a workflow cannot be kept", tenant=key[0], workflow=key[1], error=str(e))

    # ---- calls -------------------------------------------------------------------------------------------------
    async def declare(self, request: scheduler_pb2.DeclareWorkflowRequest) -> scheduler_pb2.Workflow:
        """Declare a workflow, and store it. Raises RequestError for an invalid graph or too many workflows."""
        self._callgraphs.declare(request.name.tenant, request.name.name, graph_from_wire(request.graph))
        await self.write()
        return self.get(request.name)

    def get(self, name: scheduler_pb2.WorkflowName) -> scheduler_pb2.Workflow:
        """One workflow; an empty message if there is none."""
        graph = self._callgraphs.get(name.tenant, name.name)
        return workflow_to_wire(name.tenant, name.name, graph) if graph is not None else scheduler_pb2.Workflow()

    async def all(self, tenant: str) -> scheduler_pb2.ListWorkflowsReply:
        """A tenant's workflows. Others have their turn after each."""
        reply = scheduler_pb2.ListWorkflowsReply()
        for name, graph in self._callgraphs.of_tenant(tenant).items():
            reply.workflows.append(workflow_to_wire(tenant, name, graph))
            await asyncio.sleep(0)
        return reply

    async def delete(self, name: scheduler_pb2.WorkflowName) -> scheduler_pb2.DeleteWorkflowReply:
        """Forget a workflow and remove its file."""
        known = self._callgraphs.forget(name.tenant, name.name)
        await self.write()
        return scheduler_pb2.DeleteWorkflowReply(known=known)


def path_of(directory: Path, key: WorkflowKey) -> Path:
    """The file of a workflow. A leading dot of a tenant's name is escaped; other names are valid file names."""
    tenant, name = key
    return directory / (f"%2E{tenant[1:]}" if tenant.startswith(".") else tenant) / f"{name}.json"


def _read_all(directory: Path) -> list[tuple[Path, str]]:
    found = []
    for path in sorted(directory.glob("*/*.json")) + sorted(directory.glob("*/.*.json")):
        try:
            found.append((path, path.read_text()))
        except (OSError, UnicodeDecodeError) as e:
            log.warning("a workflow's file cannot be read", path=str(path), error=str(e))
    return found


def _replace(path: Path, data: dict[str, Any] | None) -> None:
    """Replace the file atomically, or remove it for None.

    If the file's observations are of more requests, as another scheduler's may be, they are kept.
    """
    if data is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(path.read_text())["agents"]
        if _seen(before) > _seen(data["agents"]):
            data = data | {"agents": before}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _seen(agents: list[dict[str, Any]]) -> int:
    return sum(int(agent["seen"]) for agent in agents)


# ---- wire ------------------------------------------------------------------------------------------------------
def graph_from_wire(m: scheduler_pb2.CallGraph) -> Graph:
    """A declared graph."""
    return Graph(
        tuple(m.agents), tuple(Edge(e.source, e.target, e.probability, e.calls, e.delay_s) for e in m.edges), m.learn
    )


def workflow_to_wire(tenant: str, name: str, graph: CallGraph) -> scheduler_pb2.Workflow:
    """A workflow's declaration, observations and resulting edges."""
    agents = list(dict.fromkeys([*(graph.declared.agents if graph.declared else ()), *graph.agents]))
    message = scheduler_pb2.Workflow(
        name=scheduler_pb2.WorkflowName(tenant=tenant, name=name),
        observed=[
            scheduler_pb2.ObservedAgent(name=agent, requests=record.seen) for agent, record in graph.agents.items()
        ],
        observed_edges=[_edge_to_wire(edge, followed.came) for edge, followed in graph.observed()],
        edges=[_edge_to_wire(edge) for agent in agents for edge in graph.next(agent)],
    )
    if graph.declared is not None:
        said = graph.declared
        message.declared.CopyFrom(
            scheduler_pb2.CallGraph(agents=said.agents, edges=[_edge_to_wire(e) for e in said.edges], learn=said.learn)
        )
    return message


def _edge_to_wire(e: Edge, weight: float = 0.0) -> Any:
    return scheduler_pb2.CallEdge(
        source=e.source, target=e.target, probability=e.probability, calls=e.calls, delay_s=e.delay_s, weight=weight
    )
