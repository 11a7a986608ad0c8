"""Totals of the requests that a sidecar has passed on, since it started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """outcomes: requests by how they ended: answered, refused (by us, before the server had them), unreached, lost (the
    server died or closed the connection), cancelled. up_bytes, down_bytes: of bodies and of answers. held_bytes: of
    bodies that the server does not have yet."""

    outcomes: Counter[str] = field(default_factory=Counter)
    up_bytes: int = 0
    down_bytes: int = 0
    held_bytes: int = 0
