"""InferCept (Abhyankar et al., ICML '24) as SYMPHONY uses it: a session's KV stays in its node's host memory, and the
session stays on that node.

SYMPHONY, section 4: InferCept "offloads KV caches to the host's main memory"; "the first request in each session is
routed to the node with the fewest active requests, while subsequent requests in that session are sent to the same
node"; and 4.2: it "only supports storing KV cache into host memory and discards if the KV cache sizes grow higher than
host memory".

From InferCept's paper: a paused request's KV is preserved in HBM, discarded or swapped, whichever wastes the least
memory over time (`min_waste`). The expected pause is the average of those that have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.ids import SessionKey
from loadtest.simulate.systems.contract import Active, Migration, Paused, View
from loadtest.simulate.systems.llumnix import Llumnix

PRESERVE, SWAP, DISCARD = frozenset(("hbm", "dram")), frozenset(("dram",)), frozenset[str]()
#: Expected pause at first, and the weight of each new pause in the moving average.
_FIRST_PAUSE_S, _WEIGHT = 30.0, 0.05


def min_waste(paused: Paused, pause_s: float) -> frozenset[str]:
    """The tiers that keep its KV: the choice with the least waste, in byte-seconds of HBM.

    Preserving wastes the KV's memory during the pause. Discarding wastes its memory and the waiting batch's while it is
    computed again. Swapping wastes the batch's memory during both transfers.
    """
    own, batch = paused.tokens * paused.token_bytes, paused.batch_tokens * paused.token_bytes
    wastes = {
        SWAP: 2 * paused.swap_s * batch,
        PRESERVE: pause_s * own,
        DISCARD: paused.fwd_s * (own + batch),
    }
    return min(wastes, key=lambda kept: wastes[kept])


class InferCept:
    """See the module."""

    migrates_every_s = 0.0

    def __init__(self) -> None:
        self._home: dict[SessionKey, str] = {}
        self._paused_s: dict[SessionKey, float] = {}
        self.pause_s = _FIRST_PAUSE_S

    def place(self, session: SessionKey, group: str, now: float, views: Sequence[View]) -> str:
        """The session's node; for a first turn, the node with the fewest requests."""
        since_s = self._paused_s.pop(session, None)
        if since_s is not None:
            self.pause_s += _WEIGHT * (now - since_s - self.pause_s)
        if session not in self._home:
            self._home[session] = min(views, key=lambda v: v.requests).name
        return self._home[session]

    def sources(self, session: SessionKey) -> tuple[str, ...]:
        """None."""
        return ()

    def ended(self, paused: Paused, node: str, now: float) -> frozenset[str]:
        """The tiers by least waste; `node` becomes the session's node."""
        self._home[paused.session] = node
        self._paused_s[paused.session] = now
        return min_waste(paused, self.pause_s)

    def migrations(self, views: Sequence[View], active: Mapping[str, Sequence[Active]]) -> list[Migration]:
        """None."""
        return []


class MigratingInferCept(InferCept):
    """SYMPHONY's figure 6: a turn goes to the node with the fewest requests, and its KV is fetched then."""

    def __init__(self) -> None:
        super().__init__()
        self._cached_at: dict[SessionKey, str] = {}

    def place(self, session: SessionKey, group: str, now: float, views: Sequence[View]) -> str:
        """The node with the fewest requests."""
        super().place(session, group, now, views)
        return min(views, key=lambda v: v.requests).name

    def sources(self, session: SessionKey) -> tuple[str, ...]:
        """The node of its last turn."""
        return (self._cached_at[session],) if session in self._cached_at else ()

    def ended(self, paused: Paused, node: str, now: float) -> frozenset[str]:
        """As in InferCept."""
        self._cached_at[paused.session] = node
        return super().ended(paused, node, now)


class LlumnixInferCept(InferCept):
    """SYMPHONY's combination: "we integrate Llumnix with Infercept, enabling Llumnix to avoid recomputation". A turn
    goes to its session's node; Llumnix may migrate it while it decodes, and the session's KV and node move with it."""

    migrates_every_s = Llumnix.migrates_every_s

    def __init__(self) -> None:
        super().__init__()
        self._llumnix = Llumnix()

    def migrations(self, views: Sequence[View], active: Mapping[str, Sequence[Active]]) -> list[Migration]:
        """Llumnix's migrations."""
        return self._llumnix.migrations(views, active)
