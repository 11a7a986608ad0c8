"""Llumnix (Sun et al., OSDI '24) as SYMPHONY uses it: requests go to the node with the highest freeness, and running
ones migrate live.

SYMPHONY, section 4: "Llumnix handles unpredictability by performing iteration-level scheduling. However, Llumnix does
not consider KV cache management for multi-turn workloads [...] and will use recomputation"; and 4.2: it "can only
migrate a request after transferring its KV cache; until then, the request continues on an overloaded GPU".

From Llumnix's paper (section 4.4): a node's freeness is F = (M - sum of V) / B: unused memory, with the head of the
queue counted as used, over the batch size. A new request goes to the freest node. Periodically the least free nodes are
paired with the freest, and decoding requests migrate, lowest priority and shortest context first. Thresholds are
settings. Here a pair migrates one request when the target is more than twice as free as the source, which balances
earlier than the defaults, which wait until memory runs out.

When no node has free memory, F is negative and closer to 0 with more requests, so by the formula the longest queue
would attract all requests and starve them. Here such nodes are ranked by fewest requests instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.ids import SessionKey
from loadtest.simulate.systems.contract import Active, Migration, Paused, View

#: A pair migrates if the target's freeness exceeds the source's by this factor.
UNEQUAL = 2.0


def freeness(view: View) -> float:
    """Free bytes a request (F in the paper); waiting requests count as used and as part of the batch. Negative values
    only rank nodes."""
    waiting = view.requests - view.running
    free = view.hbm_bytes - view.used_bytes - view.queued_bytes * min(waiting, 1)
    return free / max(view.requests, 1) if free >= 0 else -float(view.requests)


class Llumnix:
    """See the module. Keeps no KV between turns."""

    migrates_every_s = 0.5

    def place(self, session: SessionKey, group: str, now: float, views: Sequence[View]) -> str:
        """The freest node."""
        return max(views, key=freeness).name

    def sources(self, session: SessionKey) -> tuple[str, ...]:
        """None."""
        return ()

    def ended(self, paused: Paused, node: str, now: float) -> frozenset[str]:
        """Nothing is kept."""
        return frozenset()

    def migrations(self, views: Sequence[View], active: Mapping[str, Sequence[Active]]) -> list[Migration]:
        """One request for each pair: the least free node with the freest, the second least with the second
        freest, ..."""
        ranked = sorted(views, key=lambda v: (freeness(v), v.name))
        found = []
        for source, target in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if freeness(target) <= UNEQUAL * max(freeness(source), 0.0) or source.requests <= target.requests + 1:
                continue
            free = target.hbm_bytes - target.used_bytes
            able = [a for a in active[source.name] if a.bytes <= free]
            if able:
                least = min(able, key=lambda a: (-a.priority, a.bytes, a.request_id))
                found.append(Migration(least.request_id, source.name, target.name))
        return found
