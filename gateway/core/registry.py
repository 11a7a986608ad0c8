"""The models as callers see them: those that the configuration registers and those that some node has, each with its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from contracts.models import ModelState
from gateway.core.routing import FleetView, Model, ModelThere, Node

#: What a model's state is said to be where its nodes differ: the first of these that some node has it in.
_BEST = (ModelState.ACTIVE, ModelState.LOADING, ModelState.DRAINING)


class Registered(NamedTuple):
    """What the configuration promises of a model, in seconds (0: nothing), and what computes it."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    engine: str = ""


def names(registered: Iterable[str], seen: Iterable[str]) -> list[str]:
    """The registered ones in the configuration's order, then what else nodes have had."""
    first = list(registered)
    return first + sorted(set(seen) - set(first))


def described(name: str, registered: Mapping[str, Registered], seen: Mapping[str, Model], fleet: FleetView | None) -> dict[str, Any]:
    """One model, as `GET /v1/models` shows it. Sizes are in bytes, of one node in `weight_bytes`; times in seconds, 0 where nothing is
    promised. `max_model_len` and `created` are 0 until a node has had it."""
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
        "ttft_slo_s": said.ttft_s if said is not None else model.ttft_slo_s,
        "tpot_slo_s": said.tpot_s if said is not None else model.tpot_slo_s,
        "engine": said.engine if said is not None else model.engine,
    }


def _on(node: Node, there: ModelThere) -> dict[str, Any]:
    return {
        "node": node.name,
        "state": there.state.word if node.serving else node.state or "absent",
        "running": there.running,
        "waiting": there.waiting,
        "kv_bytes_used": there.kv_bytes_used,
        "kv_bytes_cached": there.kv_bytes_cached,
        "kv_bytes_limit": there.kv_bytes_limit,
    }
