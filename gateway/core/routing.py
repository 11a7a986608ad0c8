"""The fleet as a gateway sees it, its readiness, and the route of a request when no scheduler answers.

Without a scheduler the gateway knows no hints and little of caches. It chooses the node that last served the session,
unless that node is clearly busier than the least loaded one. The cache follows the session; only its early start is
lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.devices import is_of, node_of
from contracts.ids import SessionKey
from contracts.models import ModelState, ModelWire
from contracts.placement import LEAVES_CACHE_REQUESTS


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the fleet reports it. `max_tokens`: longest prompt plus output; `created_s`: seconds since the epoch.
    wire: how requests reach it. weight_bytes: on one device, of `layers` layers. ttft_slo_s, tpot_slo_s: 0: no
    objective."""

    name: str
    max_tokens: int = 0
    created_s: int = 0
    weight_bytes: int = 0
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0
    engine: str = ""
    wire: ModelWire = ModelWire.FRAMES
    layers: int = 0


@dataclass(frozen=True, slots=True)
class ModelThere:
    """A model on a node, as last reported."""

    model: str
    state: ModelState = ModelState.ACTIVE
    running: int = 0
    waiting: int = 0
    #: Used by running requests; cached and evictable.
    kv_bytes_used: int = 0
    kv_bytes_cached: int = 0
    kv_bytes_limit: int = 0
    #: Since its last request; and until its weights are there.
    idle_s: float = 0.0
    activation_s: float = 0.0
    #: Layers whose memory KV has.
    layers_lent: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One device of the last known fleet, by its name (contracts.devices): a node with one device, or one of several.
    serving: its worker and its node's store are present and the worker takes work. models: the active ones."""

    name: str
    worker_address: str
    serving: bool
    models: frozenset[str] = frozenset()
    running: int = 0
    waiting: int = 0
    #: serving, suspect, draining, dead, starting or absent.
    state: str = ""
    #: silent: its worker is not heard; engine: its engine is hung; empty: neither.
    stalled: str = ""
    #: Every model on it, active or not.
    there: tuple[ModelThere, ...] = ()
    #: The scheduler's other figures, for `GET /v1/fleet`.
    details: Mapping[str, Any] = field(default_factory=dict)

    def able(self, model: str) -> bool:
        """Whether it serves the model, or may because its models are unknown."""
        return self.serving and (model in self.models or not (self.models or self.there))

    def has(self, model: str) -> bool:
        """Whether it serves the model or can wake it."""
        return self.able(model) or (self.serving and any(there.model == model for there in self.there))

    def wakes(self, model: str) -> bool:
        """Whether its requests wait for the model's weights."""
        states = (there.state for there in self.there if there.model == model)
        return self.serving and any(state in (ModelState.COLD, ModelState.LOADING) for state in states)


@dataclass(frozen=True, slots=True)
class FleetView:
    """The last known fleet. expected: number of devices in the configuration."""

    nodes: tuple[NodeView, ...] = ()
    expected: int = 0

    def node(self, name: str) -> NodeView | None:
        """The device of this name, or None."""
        return next((n for n in self.nodes if n.name == name), None)

    def lacks(self, name: str, model: str) -> bool:
        """Whether all devices of this name serve and none has the model."""
        nodes = [n for n in self.nodes if is_of(name, n.name)]
        return bool(nodes) and all(n.serving and not n.has(model) for n in nodes)


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one attempt. kept_tokens: tokens of its session that are cached somewhere. why: for `X-Upbeat-Why`.
    decided_by: address of the scheduler that chose the node, or empty. hint_trace: the trace of the session's hint,
    which the turn uses; empty: none."""

    node: str
    worker_address: str
    source_nodes: tuple[str, ...] = ()
    why: str = ""
    #: From a route hint, so the scheduler must still be told of the turn.
    from_hint: bool = False
    kept_tokens: int = 0
    decided_by: str = ""
    hint_trace: str = ""


#: Sessions whose last node is stored.
_REMEMBERED = 50_000
_DRAINING, _NO_SCHEDULER = "the gateway is draining", "the scheduler does not answer"


class LastNodes:
    """The node that last served each of the most recent sessions."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._nodes: dict[SessionKey, str] = {}
        self._most = most

    def note(self, session: SessionKey, node: str) -> None:
        """`node` serves it now."""
        self._nodes.pop(session, None)
        self._nodes[session] = node
        if len(self._nodes) > self._most:
            del self._nodes[next(iter(self._nodes))]

    def get(self, session: SessionKey) -> str:
        """The name of the session's last node, or empty."""
        return self._nodes.get(session, "")


def following(last: FleetView | None, new: FleetView, gathering: bool) -> FleetView:
    """The fleet as `new` has it; while its scheduler is still gathering, with the nodes of `last` that it has not found
    yet."""
    if not gathering or last is None:
        return new
    found = {n.name: n for n in new.nodes}
    for n in last.nodes:
        if n.name not in found or (n.serving and not found[n.name].serving):
            found[n.name] = n
    return FleetView(tuple(found[name] for name in sorted(found)), max(last.expected, new.expected))


def load(node: NodeView, in_flight: Mapping[str, int]) -> int:
    """Requests outstanding on a node: this gateway's count, or what the node last reported if that is more."""
    return max(in_flight.get(node.name, 0), node.running + node.waiting)


def direct_route(
    fleet: FleetView,
    model: str,
    in_flight: Mapping[str, int],
    connected: Collection[str],
    *,
    pin: str = "",
    avoid: Collection[str] = (),
    last: str = "",
) -> Route | None:
    """The least loaded node that can serve `model`, or `last`, which served the session before, unless it is clearly
    busier. None: no node can.

    in_flight: this gateway's requests per node. connected: nodes with a stream; nodes without one, and stalled nodes,
    come last whatever their load.
    """
    able = [n for n in fleet.nodes if n.able(model) and (is_of(pin, n.name) if pin else n.name not in avoid)]
    able = [n for n in able if n.name not in avoid] or able  # for a pinned node, prefer its other devices
    if not able:
        return None

    def rank(n: NodeView) -> tuple[bool, int, int, str]:
        return (n.name not in connected or bool(n.stalled), load(n, in_flight), in_flight.get(n.name, 0), n.name)

    best = min(able, key=rank)
    why = f"least outstanding ({rank(best)[1]}) of {len(able)}"
    before = next((n for n in able if n.name == last), None)
    if (
        before is not None
        and rank(before)[0] == rank(best)[0]
        and rank(before)[1] <= rank(best)[1] + LEAVES_CACHE_REQUESTS
    ):
        best, why = before, f"it served the session last ({rank(before)[1]} outstanding, least is {rank(best)[1]})"
    sources = (node_of(last),) if last and node_of(last) != node_of(best.name) and fleet.node(last) is not None else ()
    return Route(best.name, best.worker_address, sources, f"no scheduler answered: {why}")


def unserved(fleet: FleetView | None, models: Collection[str], connected: Collection[str], draining: bool) -> list[str]:
    """Reasons why this gateway cannot answer requests for some of `models`; empty when each has a node that serves or
    can wake it.

    A silent scheduler is no reason once the fleet is known: `direct_route` then uses the last known nodes, and a node
    that has left since has no stream.
    """
    reasons = [_DRAINING] if draining else []
    if fleet is None:
        return [*reasons, _NO_SCHEDULER]
    for model in models:
        having = [n for n in fleet.nodes if n.has(model)]
        if not having:
            served = ", ".join(sorted({name for n in fleet.nodes if n.serving for name in n.models}))
            reasons.append(f"no node serves {model}{f' (served: {served})' if served else ''}")
        elif not any(n.name in connected for n in having):
            reasons.append(f"no node that serves {model} has a stream to this gateway")
    return reasons


def missing(fleet: FleetView | None, live: bool, connected: Collection[str], draining: bool) -> list[str]:
    """Reasons why not every device serves; empty when all do. live: the fleet is current."""
    reasons = [_DRAINING] if draining else []
    if fleet is None or not live:
        return [*reasons, _NO_SCHEDULER]
    serving = [n for n in fleet.nodes if n.serving]
    expected = max(1, fleet.expected)
    if len(serving) < expected:
        reasons.append(f"{len(serving)} of {expected} {counted(fleet)} serve")
    reasons += [_why_not(n) for n in fleet.nodes if not n.serving]
    reasons += [f"{n.name} has no stream to this gateway" for n in serving if n.name not in connected]
    return reasons


def counted(fleet: FleetView) -> str:
    """The unit of `fleet.nodes`: devices if some node has several, else nodes."""
    return "devices" if any(n.name != node_of(n.name) for n in fleet.nodes) else "nodes"


def _why_not(node: NodeView) -> str:
    if node.state == "starting":
        return f"{node.name} is starting"
    return f"{node.name} does not serve{f' ({node.state})' if node.state else ''}"
