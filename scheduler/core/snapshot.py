"""The immutable picture that one placement decision looks at: columns with a row a node, and what each node has of the session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.core.columns import Flags, Floats, Hashes, urgency_class
from scheduler.core.directory import Session
from scheduler.core.fleet import Fleet

Rows = npt.NDArray[np.intp]


class Holder(NamedTuple):
    """A node (its row) that has so much of a session's cache, in DRAM, and in DRAM or on its SSD."""

    row: int
    tokens: int
    bytes: float
    dram_bytes: float


@dataclass(frozen=True, slots=True)
class Cached:
    """What is known of a session's cache: its size in the slowest tier, the HBM pages it takes, and who has some of it."""

    tokens: int = 0
    bytes: float = 0.0
    pages: int = 0
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes, a row each. Read-only; valid for as long as one likes.

    work_s: outstanding work by class of urgency, what was placed since the last report included; `classes` says which class each row of
    the array is, ascending; there is none of the others. expected: requests that hints promise, by class too. prefill_token_s: infinite
    where nobody knows. request_s: the work of a typical request. decisions: turns placed so far.
    """

    names: tuple[str, ...]
    rows: Mapping[str, int]
    models: Mapping[str, Flags]
    serving: Flags
    pages_total: Floats
    pages_free: Floats
    prefill_token_s: Floats
    link_bytes_per_s: Floats
    ssd_bytes_per_s: Floats
    blob_bytes_per_s: Floats
    hashes: Hashes
    suspect: Flags
    classes: tuple[int, ...]
    work_s: Floats
    expected: Floats
    cached: Cached
    request_s: float
    decisions: int

    def row(self, name: str) -> int | None:
        """The node's row, if there is one of that name."""
        return self.rows.get(name)


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be placed.

    advised: there is time to move the cache before the request comes, `lead_s` (infinity: nobody knows how much).
    prefetched: the node to which a hint moves it, and for how long already. urgency: its class (`columns.urgency_class`).
    """

    model: str
    advised: bool = False
    lead_s: float = math.inf
    prefetched: str = ""
    prefetched_s: float = math.inf
    pin: str = ""
    avoid: frozenset[str] = frozenset()
    urgency: int = urgency_class(0)


def take(fleet: Fleet, session: Session | None, model: str, now: float, decisions: int = 0) -> Snapshot:
    """The picture for one session and the model that is to answer, at time `now`."""
    c, n = fleet.columns, fleet.columns.count
    classes = list(c.classes)
    return Snapshot(
        *c.steady(),
        suspect=c.suspect(now),
        classes=c.classes,
        work_s=c.reported_s[classes, :n] + c.young_count[classes, :n] * fleet.request_s,
        expected=c.expected[classes, :n],
        cached=_cached(fleet, session, model) if session is not None else _UNKNOWN,
        request_s=fleet.request_s,
        decisions=decisions,
    )


_UNKNOWN = Cached()


def _cached(fleet: Fleet, session: Session, model: str) -> Cached:
    shape = fleet.shapes.get(model)
    if not session.tokens or session.model != model or shape is None:
        return _UNKNOWN
    chunks = session.tokens // shape.chunk_tokens
    rows = fleet.columns.rows
    return Cached(
        tokens=session.tokens,
        bytes=float(chunks * shape.chunk_bytes),
        pages=chunks * shape.layers,
        holders=tuple([Holder(rows[n], h.tokens, float(h.bytes), h.bytes * h.tokens_dram / h.tokens) for n, h in session.holders.items()]),
    )
