"""Converts a workflow's graph to plain data and back: the declaration and the observed sums."""

from __future__ import annotations

from typing import Any

from contracts.workflow import graph_to_json, parse_graph
from scheduler.core.callgraph import Agent, CallGraph, Followed, Known

FORMAT = 1


def to_stored(tenant: str, name: str, graph: CallGraph) -> dict[str, Any]:
    """The graph as data that `from_stored` reads."""
    return {
        "format": FORMAT,
        "tenant": tenant,
        "name": name,
        "declared": graph_to_json(graph.declared) if graph.declared is not None else None,
        "agents": [
            {
                "name": agent,
                "requests": record.requests,
                "seen": record.seen,
                "followed": [_followed(target, f) for target, f in record.followed.items()],
            }
            for agent, record in graph.agents.items()
        ],
    }


def from_stored(data: Any) -> tuple[str, str, CallGraph]:
    """Tenant, name and graph. Raises ValueError for data that `to_stored` did not make, RequestError for an invalid
    declared graph."""
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']} is not known")
        graph = CallGraph(parse_graph(data["declared"]) if data["declared"] is not None else None)
        for agent in data["agents"]:
            graph.agents[str(agent["name"])] = Agent(
                float(agent["requests"]), int(agent["seen"]), dict(map(_read, agent["followed"]))
            )
        graph.validate()
        return str(data["tenant"]), str(data["name"]), graph
    except (KeyError, TypeError, AssertionError) as e:
        raise ValueError(f"it is not a workflow: {e!r}") from e


def _followed(target: str, f: Followed) -> dict[str, Any]:
    named = {known.value: [f.tried[known], f.right.get(known, 0.0)] for known in f.tried}
    return {"to": target, "came": f.came, "calls": f.calls, "delay_s": f.delay_s, "gap_s": f.gap_s, "named": named}


def _read(data: Any) -> tuple[str, Followed]:
    named = {Known(known): (float(tried), float(right)) for known, (tried, right) in data["named"].items()}
    came, calls, delay_s, gap_s = (float(data[name]) for name in ("came", "calls", "delay_s", "gap_s"))
    tried, right = {k: n[0] for k, n in named.items()}, {k: n[1] for k, n in named.items()}
    return str(data["to"]), Followed(came, calls, delay_s, gap_s, tried, right)
