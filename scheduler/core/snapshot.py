"""The immutable picture that one placement decision looks at."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.advisories import Advisories
from scheduler.core.directory import Directory
from scheduler.core.fleet import SUSPECT_AFTER_S, Fleet


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as a decision sees it.

    work_s: its outstanding work. advised: hints placed there whose request has not come.
    missing_bytes: of the session in question, what this node would have to fetch. link_bytes_per_s: how fast.
    """

    name: str
    serving: bool
    suspect: bool
    models: frozenset[str]
    work_s: float
    advised: int
    held_tokens: int
    missing_bytes: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes in name order, and the work of a typical request in seconds."""

    nodes: tuple[NodeView, ...]
    request_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be placed.

    advised: there is time to move the cache before the request comes. prefetched: the node to which a hint has moved it.
    """

    model: str
    advised: bool = False
    prefetched: str = ""
    pin: str = ""
    avoid: frozenset[str] = frozenset()


def take(fleet: Fleet, directory: Directory, advisories: Advisories, session_key: object, now: float) -> Snapshot:
    """The picture for one session at time `now`."""
    session = directory.get(session_key)  # type: ignore[arg-type]
    most = max((h.bytes for h in session.holders.values()), default=0) if session else 0
    views = []
    for name in sorted(fleet.nodes):
        node = fleet.nodes[name]
        held = session.holders.get(name) if session else None
        views.append(
            NodeView(
                name=name,
                serving=node.serving,
                suspect=now - node.heard_s > SUSPECT_AFTER_S,
                models=frozenset(m.name for m in node.models),
                work_s=node.work_s(fleet.request_s),
                advised=advisories.on_node(name),
                held_tokens=held.tokens if held else 0,
                missing_bytes=most - (held.bytes if held else 0),
                link_bytes_per_s=node.link_bytes_per_s,
            )
        )
    return Snapshot(tuple(views), fleet.request_s)
