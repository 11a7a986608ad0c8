"""An engine's policy from the configuration."""

from __future__ import annotations

import math
from dataclasses import replace

from runtime.sections import KvSection, WorkerSection
from worker.core.policy import Policy


def policy_of(kv: KvSection, worker: WorkerSection) -> Policy:
    """The policy that these sections describe."""
    return Policy(
        cache=kv.cache,
        cooperative=kv.cooperative,
        layerwise=kv.layerwise,
        layer_priority=kv.layer_priority,
        load_plan=kv.load_plan,
        max_batch=worker.max_batch,
        max_waiting=worker.max_waiting,
        step_tokens=worker.step_tokens,
        mixed_step_s=worker.mixed_step_s,
        shared_step_s=worker.shared_step_s,
    )


def within(policy: Policy, token_s: float) -> Policy:
    """The policy with mixed steps short enough for a token in `token_s` (0: any time): a round of turns has one of
    them, which gets half of it, and other models' decodes the rest."""
    if not token_s:
        return policy
    return replace(policy, mixed_step_s=min(policy.mixed_step_s or math.inf, token_s / 2))
