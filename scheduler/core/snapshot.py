"""The immutable picture that one placement decision looks at: columns with a row a device, and what each node has of the session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from contracts.devices import node_of
from scheduler.core.columns import Hashes, Place, urgency_class
from scheduler.core.columns import Rows as Rows
from scheduler.core.directory import Session
from scheduler.core.fleet import Fleet
from scheduler.core.models import Flags, Floats


class Holder(NamedTuple):
    """A node (the place of its devices) that has so much of a session's cache, in DRAM, and in DRAM or on its SSD."""

    place: Place
    tokens: int
    bytes: float
    dram_bytes: float


@dataclass(frozen=True, slots=True)
class Cached:
    """What is known of a session's cache: its size, the same in every tier, and who has some of it."""

    tokens: int = 0
    bytes: float = 0.0
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All devices, a row each, as the model of one turn sees them. Read-only; valid for as long as one likes.

    places: by node, its devices' rows. known: the model is registered, or some device has it. serves: it is active there. kv_total_bytes,
    kv_free_bytes: of its pages in HBM.
    prefill_token_s: of the model there; infinite where nobody knows. request_s: the work of a typical request of the model. work_s:
    outstanding work by class of urgency, what was placed since the last report included; `classes` says which class each row of the
    array is, ascending; there is none of the others. expected: requests that hints promise, by class too. decisions: turns placed so
    far.
    """

    names: tuple[str, ...]
    rows: Mapping[str, int]
    places: Mapping[str, Place]
    serving: Flags
    link_bytes_per_s: Floats
    ssd_bytes_per_s: Floats
    blob_bytes_per_s: Floats
    hashes: Hashes
    known: bool
    serves: Flags
    kv_total_bytes: Floats
    kv_free_bytes: Floats
    prefill_token_s: Floats
    suspect: Flags
    classes: tuple[int, ...]
    work_s: Floats
    expected: Floats
    cached: Cached
    request_s: float
    decisions: int

    def row(self, name: str) -> int | None:
        """The device's row, if there is one of that name."""
        return self.rows.get(name)

    def beside(self, name: str) -> Place | None:
        """The rows of all devices of a device's node, or of a node's, if there is one of that name."""
        return self.places.get(node_of(name))


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be placed.

    advised: there is time to move the cache before the request comes, `lead_s` (infinity: nobody knows how much).
    prefetched: the device to whose node a hint moves it, and for how long already. urgency: its class (`columns.urgency_class`).
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
    of_model, request_s = c.of_model(model), fleet.request_s_of(model)
    return Snapshot(
        *c.steady(),
        known=model in c.models or model in fleet.registered,
        serves=of_model.serves,
        kv_total_bytes=of_model.kv_total_bytes,
        kv_free_bytes=of_model.kv_free_bytes,
        prefill_token_s=of_model.prefill_token_s,
        suspect=c.suspect(now),
        classes=c.classes,
        work_s=c.reported_s[classes, :n] + c.young_s[classes, :n],
        expected=c.expected[classes, :n],
        cached=_cached(fleet, session, model) if session is not None else _UNKNOWN,
        request_s=request_s,
        decisions=decisions,
    )


_UNKNOWN = Cached()


def _cached(fleet: Fleet, session: Session, model: str) -> Cached:
    shape = fleet.shapes.get(model)
    if not session.tokens or session.model != model or shape is None:
        return _UNKNOWN
    chunks = session.tokens // shape.chunk_tokens
    places = fleet.columns.places
    return Cached(
        tokens=session.tokens,
        bytes=float(chunks * shape.chunk_bytes),
        holders=tuple(
            [Holder(places[n], h.tokens, float(h.bytes), h.bytes * h.tokens_dram / h.tokens) for n, h in session.holders.items()]
        ),
    )
