"""Finds placement policies by name: built in, or entry points of other distributions (docs/placement.md)."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import numpy as np

from contracts.errors import ConfigError
from contracts.kv import KvShape
from scheduler.core import snapshot
from scheduler.core.fleet import Fleet, Model
from scheduler.core.policies import POLICIES, Policy
from scheduler.core.snapshot import PlacementRequest

GROUP = "upbeat.placement_policies"


def policy_named(name: str) -> Policy:
    """The policy that `scheduler.policy` names. Raises ConfigError if it is unknown, cannot be loaded or fails its
    trial."""
    if name in POLICIES:
        return POLICIES[name]
    others = {e.name: e for e in entry_points(group=GROUP)}
    if name not in others:
        known = ", ".join(sorted({*POLICIES, *others}))
        raise ConfigError(
            f"scheduler.policy = {name!r} does not exist; known: {known}; others are entry points of the group "
            f"{GROUP!r}"
        )
    return _loaded(others[name])


def _loaded(entry: EntryPoint) -> Policy:
    """Load a policy and try it on two idle nodes, so that a broken one fails the start and not every turn."""
    key = f"scheduler.policy = {entry.name!r} ({entry.value})"
    try:
        policy: Policy = entry.load()
    except Exception as e:
        raise ConfigError(
            f"{key} cannot be loaded: {e}; install its distribution anew, or choose one of {', '.join(POLICIES)}"
        ) from e
    if not callable(policy):
        raise ConfigError(f"{key} is not a function of (snapshot, turn, rows, seed)")
    view, rows = _two_idle_nodes(), np.arange(2)
    for turn in (PlacementRequest("m"), PlacementRequest("m", advised=True)):
        try:
            terms = policy(view, turn, rows, 0)
            shapes = {term: np.shape(values) for term, values in terms.items()}
        except Exception as e:
            raise ConfigError(f"{key} fails on a fleet of two idle nodes: {type(e).__name__}: {e}") from e
        if not shapes or any(shape != rows.shape for shape in shapes.values()):
            raise ConfigError(
                f"{key} must give a dictionary of terms, each an array with a value a row; for two rows it gave "
                f"{shapes}"
            )
    return policy


def _two_idle_nodes() -> snapshot.Snapshot:
    fleet = Fleet()
    for name in ("node-0", "node-1"):
        fleet.worker_joined(name, name, (Model("m", KvShape.of_heads(b"", 1, 1, 1, 64, "float32"), 1, 0),), 0.0)
        fleet.store_joined(name, name)
    return snapshot.take(fleet, None, "m", 0.0)
