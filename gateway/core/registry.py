"""The models as callers see them: registered ones and others that some node has, with their state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from contracts.models import ModelState, ModelWire
from gateway.core.routing import FleetView, Model, ModelThere, NodeView

#: The engine with HTTP of its own, as the configuration calls it.
_HTTP_ENGINE = "vllm"
#: A model's state when its nodes differ: the first of these that occurs.
_BEST = (ModelState.ACTIVE, ModelState.LOADING, ModelState.DRAINING)


class Registered(NamedTuple):
    """A configured model: its service level objectives in seconds (0: none), its engine, and how it shares a device."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    engine: str = ""
    priority: int = 0
    pinned: bool = False


def names(registered: Iterable[str], seen: Iterable[str]) -> list[str]:
    """Registered models in configuration order, then other models that nodes have had."""
    first = list(registered)
    return first + sorted(set(seen) - set(first))


def wires(registered: Mapping[str, Registered], seen: Mapping[str, Model]) -> dict[str, ModelWire]:
    """How requests reach each model: as nodes say; by its engine while no node has had it."""
    configured = {
        name: ModelWire.HTTP if model.engine == _HTTP_ENGINE else ModelWire.FRAMES for name, model in registered.items()
    }
    return configured | {name: model.wire for name, model in seen.items()}


def targets(name: str, registered: Mapping[str, Registered], seen: Mapping[str, Model]) -> dict[str, float]:
    """A model's targets in seconds, 0: none. The configuration's word counts before its nodes'."""
    said, model = registered.get(name), seen.get(name, Model(name))
    return {
        "ttft": said.ttft_s if said is not None else model.ttft_slo_s,
        "tpot": said.tpot_s if said is not None else model.tpot_slo_s,
    }


def described(
    name: str, registered: Mapping[str, Registered], seen: Mapping[str, Model], fleet: FleetView | None
) -> dict[str, Any]:
    """One model, as `GET /v1/models` shows it. Sizes are in bytes (`weight_bytes`: on one node), times in seconds (0:
    no objective). `max_model_len`, `created` and `layers` are 0 until a node has had the model."""
    model, said = seen.get(name, Model(name)), registered.get(name)
    nodes = [(node, there) for node in (fleet.nodes if fleet else ()) for there in node.there if there.model == name]
    states = {there.state for node, there in nodes if node.serving}
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "upbeat",
        "max_model_len": model.max_tokens,
        "state": next((state for state in _BEST if state in states), ModelState.COLD).word,
        "nodes": [_on(node, there) for node, there in nodes],
        "weight_bytes": model.weight_bytes,
        "layers": model.layers,
        **{f"{target}_slo_s": most_s for target, most_s in targets(name, registered, seen).items()},
        "engine": said.engine if said is not None else model.engine,
        "priority": said.priority if said is not None else 0,
        "pinned": said is not None and said.pinned,
    }


def adapter(name: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """A LoRA adapter of the model `base` (as `described`): it has the model's state and place. What is counted by model
    is at its parent."""
    kept = ("object", "created", "owned_by", "max_model_len", "state", "engine")
    return {"id": name} | {key: base[key] for key in kept} | {"parent": base["id"]}


def _on(node: NodeView, there: ModelThere) -> dict[str, Any]:
    return {
        "node": node.name,
        "state": there.state.word if node.serving else node.state or "absent",
        "running": there.running,
        "waiting": there.waiting,
        "kv_bytes_used": there.kv_bytes_used,
        "kv_bytes_cached": there.kv_bytes_cached,
        "kv_bytes_limit": there.kv_bytes_limit,
        "layers_lent": there.layers_lent,
        "idle_s": there.idle_s,
        "activation_s": there.activation_s,
    }
