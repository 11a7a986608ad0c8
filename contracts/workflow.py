"""Call graphs of agent workflows (SYMPHONY, sections 3.1 and 3.5): types, JSON form and limits.

A graph's edges say which agents follow a request of an agent. A conditional has several edges with probabilities; a
loop has an edge to the same or an earlier agent; a fan-out has several certain edges, or one with several `calls`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidRequest
from contracts.ids import check_name

MAX_AGENTS = 64
MAX_EDGES = 512
MAX_CALLS = 64.0
MAX_DELAY_S = 86_400.0
_FIELDS = ("agents", "edges", "learn")
_EDGE_FIELDS = ("from", "to", "probability", "calls", "delay_s")


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` follows a request of `source` with `probability`, then with `calls` calls on average (at least 1),
    `delay_s` seconds after that request arrived."""

    source: str
    target: str
    probability: float = 1.0
    calls: float = 1.0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Graph:
    """A declared call graph. learn: observations update probabilities and delays, and add edges."""

    agents: tuple[str, ...]
    edges: tuple[Edge, ...] = ()
    learn: bool = True


@dataclass(frozen=True, slots=True)
class Hop:
    """A request's place in a workflow: the workflow, the calling agent, and the run (one execution).

    ended: ids of the run's requests that have ended since the previous hop that reported any, oldest first.
    """

    workflow: str
    agent: str
    run: str
    ended: tuple[str, ...] = ()


def default_run(session_id: str) -> str:
    """The run of a request that names none: its session id up to the last colon; all of it if there is no such
    prefix."""
    return session_id.rpartition(":")[0] or session_id


def parse_graph(data: Any) -> Graph:
    """A Graph from decoded JSON. Raises InvalidRequest naming the field."""
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be an object with agents and edges")
    _only(data, _FIELDS, "")
    agents = data.get("agents")
    if not isinstance(agents, list) or not 1 <= len(agents) <= MAX_AGENTS:
        code = "invalid_value" if "agents" in data else "missing_required_parameter"
        raise InvalidRequest(f"agents must be a list of 1 to {MAX_AGENTS} names", param="agents", code=code)
    names = tuple(check_name(name, f"agents[{i}]") for i, name in enumerate(agents))
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest(f"agents[{i}]: {name} is there twice", param=f"agents[{i}]")
    edges = data.get("edges", [])
    if not isinstance(edges, list) or len(edges) > MAX_EDGES:
        raise InvalidRequest(f"edges must be a list of at most {MAX_EDGES} objects", param="edges")
    made = tuple(_edge(edge, names, f"edges[{i}]") for i, edge in enumerate(edges))
    seen: set[tuple[str, str]] = set()
    for i, e in enumerate(made):
        if (e.source, e.target) in seen:
            raise InvalidRequest(f"edges[{i}]: {e.source} to {e.target} is there twice", param=f"edges[{i}]")
        seen.add((e.source, e.target))
    learn = data.get("learn", True)
    if not isinstance(learn, bool):
        raise InvalidRequest("learn must be true or false", param="learn")
    return Graph(names, made, learn)


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The inverse of `parse_graph`."""
    return {"agents": list(graph.agents), "edges": [edge_to_json(e) for e in graph.edges], "learn": graph.learn}


def edge_to_json(edge: Edge) -> dict[str, Any]:
    """One edge of a graph as JSON."""
    figures = {"probability": edge.probability, "calls": edge.calls, "delay_s": edge.delay_s}
    return {"from": edge.source, "to": edge.target} | {name: round(value, 6) for name, value in figures.items()}


def _edge(data: Any, agents: tuple[str, ...], where: str) -> Edge:
    if not isinstance(data, dict):
        raise InvalidRequest(f"{where} must be an object with from and to", param=where)
    _only(data, _EDGE_FIELDS, f"{where}.")
    ends = []
    for name in ("from", "to"):
        if name not in data:
            raise InvalidRequest(
                f"{where}.{name} is required", param=f"{where}.{name}", code="missing_required_parameter"
            )
        if data[name] not in agents:
            raise InvalidRequest(
                f"{where}.{name}: no agent is called {str(data[name])[:60]!r}", param=f"{where}.{name}"
            )
        ends.append(str(data[name]))
    probability = _number(data, "probability", where, 1.0, 0.0, 1.0)
    calls = _number(data, "calls", where, 1.0, 1.0, MAX_CALLS)
    return Edge(ends[0], ends[1], probability, calls, _number(data, "delay_s", where, 0.0, 0.0, MAX_DELAY_S))


def _number(data: dict[str, Any], name: str, where: str, usual: float, low: float, high: float) -> float:
    value = data.get(name, usual)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"{where}.{name} must be a number from {low:g} to {high:g}", param=f"{where}.{name}")
    return float(value)


def _only(data: dict[str, Any], known: tuple[str, ...], dot: str) -> None:
    for name in data:
        if name not in known:
            shown = f"{dot}{str(name)[:80]}"
            raise InvalidRequest(
                f"unknown field {shown}; known: {', '.join(known)}", param=shown, code="unknown_parameter"
            )
