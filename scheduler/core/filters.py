"""Which nodes may take a turn at all."""

from __future__ import annotations

from contracts.errors import InvalidRequest, NotFound, Unavailable
from scheduler.core.snapshot import NodeView, Snapshot, Turn


def eligible(snapshot: Snapshot, turn: Turn) -> list[NodeView]:
    """Nodes that serve the model, never empty.

    Suspect nodes and those to avoid count only when there is no other. Raises InvalidRequest for a pin to an unknown
    node, NotFound for a model nobody serves, Unavailable when no node serves right now.
    """
    if turn.pin:
        pinned = [n for n in snapshot.nodes if n.name == turn.pin]
        if not pinned:
            names = ", ".join(n.name for n in snapshot.nodes)
            raise InvalidRequest(f"no node is called {turn.pin[:60]!r}; nodes: {names}", param="X-Upbeat-Node", code="unknown_node")
        if not pinned[0].serving:
            raise Unavailable(f"{turn.pin} is not serving at the moment; try again, or do not pin the node", param="X-Upbeat-Node")
        return pinned
    serving = [n for n in snapshot.nodes if n.serving]
    if not serving:
        raise Unavailable("no node is serving at the moment; try again in a few seconds")
    able = [n for n in serving if turn.model in n.models]
    if not able:
        raise NotFound(f"the model {turn.model[:100]!r} does not exist here", param="model", code="model_not_found")
    fresh = [n for n in able if n.name not in turn.avoid]
    healthy = [n for n in fresh if not n.suspect]
    return healthy or fresh or able
