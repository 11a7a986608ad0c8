"""What each node would cost a turn, by term, in seconds (lower is better).

The default is the paper's: fewest outstanding work wherever the cache happens to be (SYMPHONY, section 3.3). The time to
bring the cache only breaks ties while there is time to bring it; for a turn that is here it counts in full, except on the
node where a hint has brought it already.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.snapshot import NodeView, Snapshot, Turn

#: The chance that a hint comes true, until it is measured.
HINT_CHANCE = 0.9
_TIE = 1e-3

Terms = dict[str, float]
Scorer = Callable[[NodeView, Snapshot, Turn], Terms]


def balanced(node: NodeView, snapshot: Snapshot, turn: Turn) -> Terms:
    """Outstanding work, expected arrivals, and the load time as far as it will be felt."""
    load_s = 0.0 if node.name == turn.prefetched else node.missing_bytes / node.link_bytes_per_s
    return {
        "work_s": node.work_s,
        "arrivals_s": node.advised * HINT_CHANCE * snapshot.request_s,
        "load_s": load_s * _TIE if turn.advised else load_s,
    }


def sticky(node: NodeView, snapshot: Snapshot, turn: Turn) -> Terms:
    """The node that has the cache, whatever its load (InferCept style: the baseline); else the least loaded."""
    return {"away_s": -1e6 * (node.held_tokens > 0) - float(node.held_tokens), "work_s": node.work_s * _TIE}


POLICIES: dict[str, Scorer] = {"balanced": balanced, "sticky": sticky}
