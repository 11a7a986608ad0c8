"""How many nodes the fleet should have: a policy over `scale_signals.Signals`.

The scheduler recommends with it, and `upbeat autoscale --simulate` replays traces through it (docs/design/0049).

1. *Demand*, in devices. Compute: seconds of work that arrive each second, plus outstanding work over `drain_s`. HBM:
   shares of the devices' KV memory that running requests hold, summed. The larger counts, as a device is full when
   either is.
2. *Wanted nodes*: demand over `target_utilisation`. Within `tolerance` of the target the fleet stays as it is.
3. A missed SLO wants one node more, once in `slo_step_s`, if the fleet is at least half as busy as it should be:
   else more nodes would not help. It never wants fewer.
4. No step down leaves less DRAM than sessions that may come back need, with `kv_most` of it in use.
5. *Windows*, as those of Kubernetes' HorizontalPodAutoscaler: a step up takes the least that was wanted within
   `up_window_s`, a step down the most within `down_window_s`. Steps down are small (`down_share`) and `down_step_s`
   apart, since each makes caches move.
6. Signals that are incomplete change nothing. Nothing is recommended before they were complete once, and some node
   served: a guess would stop nodes that the scheduler does not know yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.core.scale_signals import Signals

#: Answers in the attainment window without which a missed SLO says nothing.
LEAST_TURNS = 20
#: Part of the target utilisation below which more nodes would not help a missed SLO.
_HALF = 0.5
#: Shares are compared with this tolerance, so that rounding does not order a node.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Policy:
    """See the module. slo: share of answers that must keep to their targets. Times in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1
    target_utilisation: float = 0.6
    tolerance: float = 0.1
    drain_s: float = 30.0
    up_window_s: float = 0.0
    down_window_s: float = 300.0
    down_share: float = 0.25
    down_step_s: float = 60.0
    kv_most: float = 0.8
    slo: float = 0.95
    slo_step_s: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"min_nodes {self.min_nodes} must be at least 1, and at most max_nodes {self.max_nodes}: "
                "without a node nothing is answered"
            )


def policy_of(settings: Mapping[str, Any], nodes: int) -> Policy:
    """The policy of the configuration's section `autoscale`. nodes: of the deployment, the default of max_nodes."""
    most = settings["max_nodes"] or max(nodes, settings["min_nodes"])
    return Policy(**{**settings, "max_nodes": most})


@dataclass(frozen=True, slots=True)
class Recommendation:
    """nodes: what the fleet should have now. wanted: the same before windows and steps. demand: in devices;
    utilisation: demand a serving device; None: no device serves. why: one of the reasons below."""

    nodes: int
    wanted: int
    demand: float
    utilisation: float | None
    why: str


#: Reasons of a recommendation.
STEADY, WORK, HBM, SLO, KV, WINDOW, LIMIT, UNKNOWN, EMPTY = (
    "within the tolerance",
    "work",
    "memory of running requests",
    "SLO missed",
    "sessions' KV needs the DRAM",
    "waits for its window",
    "limit",
    "signals are incomplete",
    "no node serves",
)


class Recommender:
    """The policy with its memory: what was wanted lately, and the last steps. `look` mutates it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        #: Recommended at last; 0: nothing yet.
        self.nodes = 0
        self._wanted: deque[tuple[float, int]] = deque()
        self._stepped_down_s = self._slo_s = -math.inf

    def look(self, signals: Signals, now: float) -> Recommendation | None:
        """The recommendation of this moment; None: not yet. Times must not decrease."""
        if not self.nodes:
            if signals.incomplete or not signals.devices:
                return None
            self.nodes = self._clamped(signals.nodes + signals.starting_nodes)
            self._remember(self.nodes, now)  # as HPA does, so that a new process shrinks nothing at once
        demand, cause = self._demand(signals)
        utilisation = demand / signals.devices if signals.devices else None
        if signals.incomplete:
            return Recommendation(self.nodes, self.nodes, demand, utilisation, UNKNOWN)
        if utilisation is None:
            # Nobody says what is asked: the fleet waits for the nodes that it should have.
            return Recommendation(self.nodes, self.nodes, demand, None, EMPTY)
        wanted, why = self._wants(signals, demand, utilisation, cause, now)
        limited = self._clamped(wanted)
        why = LIMIT if limited != wanted else why
        self._remember(limited, now)
        before, self.nodes = self.nodes, self._stabilised(now)
        if self.nodes < before:
            self._stepped_down_s = now
        held = self.nodes == before != limited
        if why == SLO and self.nodes > before:
            self._slo_s = now
        return Recommendation(self.nodes, limited, demand, utilisation, WINDOW if held else why)

    def _demand(self, signals: Signals) -> tuple[float, str]:
        compute = signals.arriving + signals.work_s / self.policy.drain_s
        return max((compute, WORK), (signals.hbm, HBM))

    def _wants(self, signals: Signals, demand: float, utilisation: float, cause: str, now: float) -> tuple[int, str]:
        policy = self.policy
        devices = demand / policy.target_utilisation
        wanted, why = max(math.ceil(devices / signals.devices_a_node - _EQUAL), 0), cause
        # The tolerance is about the fleet that is recommended: one that is still starting is not recommended again.
        planned = demand / (self.nodes * signals.devices_a_node)
        if abs(planned / policy.target_utilisation - 1.0) <= policy.tolerance + _EQUAL:
            wanted, why = self.nodes, STEADY
        missed = signals.attainment is not None and signals.turns >= LEAST_TURNS and signals.attainment < policy.slo
        if missed and wanted <= self.nodes:
            # Nodes that are still starting have not had the chance to help.
            rested = now - self._slo_s >= policy.slo_step_s and signals.nodes >= self.nodes
            helps = rested and utilisation >= _HALF * policy.target_utilisation
            wanted, why = self.nodes + helps, SLO
        kept = self._for_sessions(signals)
        if wanted < min(kept, self.nodes):
            wanted, why = min(kept, self.nodes), KV
        return wanted, why

    def _for_sessions(self, signals: Signals) -> int:
        """Nodes whose DRAM sessions that may come back need."""
        if not signals.dram_bytes or not signals.nodes:
            return 0
        a_node = signals.dram_bytes / signals.nodes
        return math.ceil(signals.resumable_bytes / (self.policy.kv_most * a_node) - _EQUAL)

    def _remember(self, wanted: int, now: float) -> None:
        longest = max(self.policy.up_window_s, self.policy.down_window_s)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - longest:
            self._wanted.popleft()

    def _stabilised(self, now: float) -> int:
        policy = self.policy
        latest = self._wanted[-1][1]
        up = min([latest, *(wanted for at_s, wanted in self._wanted if at_s > now - policy.up_window_s)])
        down = max([latest, *(wanted for at_s, wanted in self._wanted if at_s > now - policy.down_window_s)])
        if self.nodes < up:
            return up
        if self.nodes > down and now - self._stepped_down_s >= policy.down_step_s:
            return max(down, self.nodes - max(int(self.nodes * policy.down_share), 1))
        return self.nodes

    def _clamped(self, nodes: int) -> int:
        return min(max(nodes, self.policy.min_nodes), self.policy.max_nodes)
