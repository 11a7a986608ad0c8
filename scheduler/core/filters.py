"""Decides which devices may take a turn."""

from __future__ import annotations

import numpy as np

from contracts.errors import InvalidRequest, NotFound, Unavailable
from scheduler.core.models import Flags
from scheduler.core.snapshot import PlacementRequest, Rows, Snapshot


def eligible(snapshot: Snapshot, turn: PlacementRequest) -> Rows:
    """Rows of devices that serve and have the model active, ascending, never empty. With a pin, only what is pinned.

    Suspect devices and those in `turn.avoid` are included only if there is no other. Raises InvalidRequest if the pin
    is no node or device; NotFound if the model is not registered, or the pinned node does not have it active;
    Unavailable if no device serves, or none has the model active, at the moment.
    """
    if turn.pin:
        return _preferred(snapshot, turn, _pinned(snapshot, turn))
    rows = _preferred(snapshot, turn, snapshot.serving & snapshot.serves)
    if len(rows):
        return rows
    if not snapshot.serving.any():
        raise Unavailable("no node is serving at the moment; try again in a few seconds")
    if snapshot.known:
        raise Unavailable(
            f"no node has the model {turn.model[:100]!r} active at the moment; try again in a few seconds",
            param="model",
        )
    raise NotFound(f"the model {turn.model[:100]!r} does not exist here", param="model", code="model_not_found")


def _preferred(snapshot: Snapshot, turn: PlacementRequest, able: Flags) -> Rows:
    """Rows of `able`, without devices to avoid and suspect ones if others remain; empty only if `able` is."""
    fresh = able & np.array([name not in turn.avoid for name in snapshot.names]) if turn.avoid else able
    for choice in (fresh & ~snapshot.suspect, fresh):
        rows = np.flatnonzero(choice)
        if len(rows):
            return rows
    return np.flatnonzero(able)


def _pinned(snapshot: Snapshot, turn: PlacementRequest) -> Flags:
    """The able rows of the pinned device or node."""
    pin, row = turn.pin, snapshot.row(turn.pin)
    place = snapshot.places.get(pin)
    if row is None and place is None:
        shown = ", ".join(sorted(snapshot.names)[:20]) + (", ..." if len(snapshot.names) > 20 else "")
        raise InvalidRequest(
            f"no node is called {pin[:60]!r}; nodes: {shown}", param="X-Upbeat-Node", code="unknown_node"
        )
    meant: Flags = np.zeros(len(snapshot.names), np.bool_)
    meant[place.rows if place is not None else row] = True
    if not (meant & snapshot.serving).any():
        raise Unavailable(
            f"{pin} is not serving at the moment; try again, or do not pin the node", param="X-Upbeat-Node"
        )
    able: Flags = meant & snapshot.serving & snapshot.serves
    if not able.any():
        raise NotFound(f"{pin} does not serve the model {turn.model[:100]!r}", param="model", code="model_not_found")
    return able
