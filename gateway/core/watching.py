"""When a watched session is looked at again, how thoroughly, and what its watchers are shown.

A quick look asks the nodes that have to do with the session, and no blob tier; a thorough one asks every node and the blob tier. So a quick
look says nothing of a node that it does not name: what was seen there before stands until the next thorough one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

#: Between two looks, in seconds: while something moves or is hinted, and otherwise.
MOVING_S, STILL_S = 0.2, 1.0
#: How long after its last change a session counts as moving.
SETTLED_S = 3.0
#: Between two thorough looks.
THOROUGH_S = 5.0


@dataclass(frozen=True, slots=True)
class Picture:
    """Where a session's cache is: layer counts by tier ("hbm", "dram", "ssd") by node, and in the blob tier.

    hint_node: where a hint has said that the next turn will run; empty: no hint stands. tokens: of its history, as last written.
    """

    known: bool = False
    model: str = ""
    tokens: int = 0
    hint_node: str = ""
    nodes: dict[str, dict[str, Tier]] = field(default_factory=dict)
    blob: Tier | None = None

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
                {"node": node, "tiers": [tier.body(name) for name, tier in tiers.items()]} for node, tiers in sorted(self.nodes.items())
            ],
            "blob": self.blob.body("blob") if self.blob is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Tier:
    """What one tier has of a session: chunks by layer, tokens of the leading chunks with every layer, bytes."""

    layer_chunks: tuple[int, ...]
    tokens: int
    size_bytes: int

    def body(self, name: str) -> dict[str, Any]:
        """As JSON."""
        return {"tier": name, "tokens": self.tokens, "layer_chunks": list(self.layer_chunks), "bytes": self.size_bytes}


def joined(before: Picture, seen: Picture, *, thorough: bool) -> Picture:
    """What watchers are shown after a look that saw `seen`."""
    if thorough or not seen.known:
        return seen
    blob = max((t for t in (before.blob, seen.blob) if t is not None), key=lambda t: t.size_bytes, default=None)
    return replace(seen, nodes=before.nodes | seen.nodes, blob=blob)


class Pace:
    """When to look, at one session. Times are the caller's clock's, in seconds."""

    def __init__(self) -> None:
        self._moved_s = self._thorough_s = -math.inf
        self._hinted = self._lost = False

    def thorough(self, now: float) -> bool:
        """The look that begins now asks everybody: the first, one in a while, and one after a quick look that found nothing."""
        return self._lost or now - self._thorough_s >= THOROUGH_S

    def looked(self, now: float, before: Picture, seen: Picture, *, thorough: bool) -> None:
        """A look has ended; `before` is what was shown, `seen` what is shown now."""
        if thorough:
            self._thorough_s = now
        if before != seen:
            self._moved_s = now
        self._lost, self._hinted = before.known and not seen.known and not thorough, bool(seen.hint_node)

    def rest_s(self, now: float) -> float:
        """How long to wait before the next look."""
        return MOVING_S if self._hinted or now - self._moved_s < SETTLED_S else STILL_S
