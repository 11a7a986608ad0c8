"""Which nodes may take a turn at all."""

from __future__ import annotations

import numpy as np

from contracts.errors import InvalidRequest, NotFound, Unavailable
from scheduler.core.snapshot import Rows, Snapshot, Turn


def eligible(snapshot: Snapshot, turn: Turn) -> Rows:
    """Rows of nodes that serve and have the model active, never empty.

    Suspect nodes and those to avoid count only when there is no other. Raises InvalidRequest for a pin to an unknown
    node, NotFound for a model that is not registered, or that the pinned node does not have active, Unavailable when no node serves, or
    none has the model active, right now.
    """
    if turn.pin:
        return _pinned(snapshot, turn)
    able = snapshot.serving & snapshot.serves
    fresh = able & np.array([name not in turn.avoid for name in snapshot.names]) if turn.avoid else able
    for choice in (fresh & ~snapshot.suspect, fresh, able):
        rows = np.flatnonzero(choice)
        if len(rows):
            return rows
    if not snapshot.serving.any():
        raise Unavailable("no node is serving at the moment; try again in a few seconds")
    if snapshot.known:
        raise Unavailable(f"no node has the model {turn.model[:100]!r} active at the moment; try again in a few seconds", param="model")
    raise NotFound(f"the model {turn.model[:100]!r} does not exist here", param="model", code="model_not_found")


def _pinned(snapshot: Snapshot, turn: Turn) -> Rows:
    pin, row = turn.pin, snapshot.row(turn.pin)
    if row is None:
        shown = ", ".join(sorted(snapshot.names)[:20]) + (", ..." if len(snapshot.names) > 20 else "")
        raise InvalidRequest(f"no node is called {pin[:60]!r}; nodes: {shown}", param="X-Upbeat-Node", code="unknown_node")
    if not snapshot.serving[row]:
        raise Unavailable(f"{pin} is not serving at the moment; try again, or do not pin the node", param="X-Upbeat-Node")
    if not snapshot.serves[row]:
        raise NotFound(f"{pin} does not serve the model {turn.model[:100]!r}", param="model", code="model_not_found")
    return np.array([row], np.intp)
