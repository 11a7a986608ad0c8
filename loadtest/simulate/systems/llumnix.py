"""Llumnix (Sun et al., OSDI '24) as SYMPHONY uses it: requests go where there is most freeness, and running ones move live.

SYMPHONY, section 4: "Llumnix handles unpredictability by performing iteration-level scheduling. However, Llumnix does not consider KV
cache management for multi-turn workloads [...] and will use recomputation"; and 4.2: it "can only migrate a request after transferring its
KV cache; until then, the request continues on an overloaded GPU".

From Llumnix's own paper (section 4.4): a node's freeness is F = (M - sum of V) / B, memory that nobody uses, virtual usage of what waits at
the head of the queue included, over the size of the batch. A new request goes to the freest node. Now and then nodes are paired, the least
free with the freest, and requests migrate while they decode, of lower priority and with shorter contexts first, until the source is
no longer short. Its thresholds are settings; here a pair is made where the freest is more than twice as free as the least free, and a
request is moved at a time for each pair, which balances more eagerly than its defaults, which wait until memory runs out.

Where no node has anything free, F is negative, and over more requests it is nearer to nothing: by the letter, the node with the longest
queue is the freest, and all that comes stands in line there: many are hardly served, and as few of their requests end, the mean of those
that do looks well. Here such nodes are ranked by their requests, the fewest first, which serves everybody and more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.ids import SessionKey
from loadtest.simulate.systems.contract import Active, Migration, Paused, View

#: A pair migrates where the target is so many times as free as the source.
UNEQUAL = 2.0


def freeness(view: View) -> float:
    """Bytes for each request of the batch (F in the paper); what waits counts as used and as part of the batch. Below nothing: only its
    order means anything."""
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
        """One request for each pair of nodes, the least free with the freest, the next with the next."""
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
