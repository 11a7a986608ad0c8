"""Decides when a watched session is looked at, how thoroughly, and what its watchers see.

A quick look asks the session's nodes and not the blob tier; a thorough look asks every node and the blob tier. Nodes
missing from a quick look keep their last state until the next thorough one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

#: Seconds between looks: while the session moves or is hinted, and otherwise.
MOVING_S, STILL_S = 0.2, 1.0
#: How long after its last change a session counts as moving.
SETTLED_S = 3.0
#: Seconds between thorough looks.
THOROUGH_S = 5.0


@dataclass(frozen=True, slots=True)
class Picture:
    """Where a session's cache is: by node and tier ("hbm", "dram", "ssd"), and in the blob tier.

    hint_node: the node where a hint has placed the next turn; empty: no hint. tokens: length of its history, as last
    written.
    """

    known: bool = False
    model: str = ""
    tokens: int = 0
    hint_node: str = ""
    nodes: dict[str, dict[str, TierContents]] = field(default_factory=dict)
    blob: TierContents | None = None

    def body(self, session_id: str) -> dict[str, Any]:
        """As JSON (docs/api.md)."""
        return {
            "id": session_id,
            "object": "session.residency",
            "known": self.known,
            "model": self.model or None,
            "tokens": self.tokens,
            "hint_node": self.hint_node or None,
            "nodes": [
                {"node": node, "tiers": [tier.body(name) for name, tier in tiers.items()]}
                for node, tiers in sorted(self.nodes.items())
            ],
            "blob": self.blob.body("blob") if self.blob is not None else None,
        }


@dataclass(frozen=True, slots=True)
class TierContents:
    """A session's cache in one tier: chunks by layer, tokens of the leading chunks with every layer, bytes."""

    layer_chunks: tuple[int, ...]
    tokens: int
    size_bytes: int

    def body(self, name: str) -> dict[str, Any]:
        """As JSON."""
        return {"tier": name, "tokens": self.tokens, "layer_chunks": list(self.layer_chunks), "bytes": self.size_bytes}


def joined(before: Picture, seen: Picture, *, thorough: bool) -> Picture:
    """The picture for watchers after a look that saw `seen`."""
    if thorough or not seen.known:
        return seen
    blob = max((t for t in (before.blob, seen.blob) if t is not None), key=lambda t: t.size_bytes, default=None)
    return replace(seen, nodes=before.nodes | seen.nodes, blob=blob)


class LookSchedule:
    """When to look at one session. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._moved_s = self._thorough_s = -math.inf
        self._hinted = self._lost = False

    def thorough(self, now: float) -> bool:
        """Whether the next look is thorough: the first, one every `THOROUGH_S`, and one after a quick look that lost
        the session."""
        return self._lost or now - self._thorough_s >= THOROUGH_S

    def looked(self, now: float, before: Picture, seen: Picture, *, thorough: bool) -> None:
        """A look has ended. before, seen: the pictures before and after it."""
        if thorough:
            self._thorough_s = now
        if before != seen:
            self._moved_s = now
        self._lost, self._hinted = before.known and not seen.known and not thorough, bool(seen.hint_node)

    def rest_s(self, now: float) -> float:
        """Seconds until the next look."""
        return MOVING_S if self._hinted or now - self._moved_s < SETTLED_S else STILL_S
