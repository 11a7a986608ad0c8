"""Placement policies by name: our own, and those that other distributions bring as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from contracts.errors import ConfigError
from scheduler.core.policies import POLICIES, Policy

GROUP = "upbeat.placement_policies"


def policy_named(name: str) -> Policy:
    """The policy that `scheduler.policy` names. Raises ConfigError for one that is not there or cannot be loaded."""
    if name in POLICIES:
        return POLICIES[name]
    others = {e.name: e for e in entry_points(group=GROUP)}
    if name not in others:
        known = ", ".join(sorted({*POLICIES, *others}))
        raise ConfigError(f"scheduler.policy = {name!r} does not exist; known: {known}; others are entry points of the group {GROUP!r}")
    try:
        policy: Policy = others[name].load()
    except Exception as e:
        raise ConfigError(f"scheduler.policy = {name!r} ({others[name].value}) cannot be loaded: {e}") from e
    if not callable(policy):
        raise ConfigError(f"scheduler.policy = {name!r} ({others[name].value}) is not a function of (snapshot, turn, rows, seed)")
    return policy
