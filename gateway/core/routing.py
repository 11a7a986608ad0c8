"""What the fleet looks like from a gateway, whether it is ready, and where a request goes when no scheduler answers.

Without a scheduler there is no knowledge of hints or caches, so the choice is the plainest safe one: the serving node with
the least outstanding work. The cache follows the session anyway; only its head start is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the fleet reports it. `max_tokens`: longest prompt plus output; `created_s`: seconds since the epoch."""

    name: str
    max_tokens: int = 0
    created_s: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the last known fleet. `serving`: both of its processes are there and its models are loaded."""

    name: str
    worker_address: str
    serving: bool
    models: frozenset[str] = frozenset()
    running: int = 0
    waiting: int = 0
    #: What else the scheduler says of it, for `GET /v1/fleet`.
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetView:
    """The last known fleet. `expected`: how many nodes the configuration names."""

    nodes: tuple[Node, ...] = ()
    expected: int = 0

    def node(self, name: str) -> Node | None:
        """The node of this name, or None."""
        return next((n for n in self.nodes if n.name == name), None)


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt of a request goes. `why` is what `X-Upbeat-Why` says."""

    node: str
    worker_address: str
    source_nodes: tuple[str, ...] = ()
    why: str = ""


def direct_route(
    fleet: FleetView,
    model: str,
    in_flight: Mapping[str, int],
    connected: Collection[str],
    *,
    pin: str = "",
    avoid: Collection[str] = (),
) -> Route | None:
    """The least loaded node that can serve `model`, or None.

    in_flight: this gateway's own requests per node; they count in full, what others run there as last reported.
    connected: nodes to which a stream stands; one without goes last, whatever its load.
    """
    able = [n for n in fleet.nodes if n.serving and (not n.models or model in n.models) and (n.name == pin if pin else n.name not in avoid)]
    if not able:
        return None

    def load(n: Node) -> tuple[bool, int, int, str]:
        own = in_flight.get(n.name, 0)
        return (n.name not in connected, max(own, n.running + n.waiting), own, n.name)

    best = min(able, key=load)
    return Route(best.name, best.worker_address, (), f"no scheduler answered: least outstanding ({load(best)[1]}) of {len(able)}")


def missing(fleet: FleetView | None, live: bool, connected: Collection[str], draining: bool) -> list[str]:
    """Why the deployment is not ready, one reason each; empty when it is. `live`: the fleet is known as of now."""
    reasons = ["the gateway is draining"] if draining else []
    if fleet is None or not live:
        return [*reasons, "the scheduler does not answer"]
    serving = [n for n in fleet.nodes if n.serving]
    expected = max(1, fleet.expected)
    if len(serving) < expected:
        reasons.append(f"{len(serving)} of {expected} nodes serve")
    reasons += [f"{n.name} does not serve" for n in fleet.nodes if not n.serving]
    reasons += [f"{n.name} has no stream to this gateway" for n in serving if n.name not in connected]
    return reasons
