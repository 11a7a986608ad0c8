"""The immutable input of one placement decision: columns with a row per device, and who holds the session's cache."""

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
    """A node that holds some of a session's cache. bytes: in DRAM or on SSD; dram_bytes: in DRAM."""

    place: Place
    tokens: int
    bytes: float
    dram_bytes: float


@dataclass(frozen=True, slots=True)
class Cached:
    """A session's cache: its whole size, in the tokens and bytes of its newest manifest, and the nodes that hold some
    of it."""

    tokens: int = 0
    bytes: float = 0.0
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All devices, a row each, for the model of one turn. Read-only; later reports do not change it.

    rows: device to its row. places: node to its devices' rows. hashes: of the devices' names. known: the model is
    registered, or some device has it. serves: the model is active there, or will be `activation_s` after a request.
    here: its weights are there or on their way. kv_total_bytes, kv_free_bytes: of the model's pages in HBM.
    prefill_token_s: of the model there; infinite where unknown. suspect: gets work only without others.
    classes: urgency classes that have work, ascending, one per row of work_s and expected. work_s: outstanding seconds
    by (class, device), including placements since the last report. expected: requests that hints announce, by (class,
    device), weighted by their probability. request_s: work of a typical request of the model. decisions: turns placed
    so far.
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
    here: Flags
    activation_s: Floats
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
        """The row of the device of this name, if any."""
        return self.rows.get(name)

    def beside(self, name: str) -> Place | None:
        """The place of this node, or of this device's node, if any."""
        return self.places.get(node_of(name))


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A turn or hint to place.

    advised: it is a hint, whose request is expected in `lead_s` (infinity: unknown). prefetched: the device to which
    the turn's hint has sent its cache, `prefetched_s` ago. pin: the node or device that must take it. avoid: devices
    that have just failed it. urgency: its class (`columns.urgency_class`).
    """

    model: str
    advised: bool = False
    lead_s: float = math.inf
    prefetched: str = ""
    prefetched_s: float = math.inf
    pin: str = ""
    avoid: frozenset[str] = frozenset()
    urgency: int = urgency_class(0)


def take(fleet: Fleet, session: Session | None, model: str, now: float, decisions: int = 0, last: str = "") -> Snapshot:
    """The snapshot for one session and the model that is to answer, at time `now`. last: the node that has all of the
    session's cache, although no store has reported it."""
    c, n = fleet.columns, fleet.columns.count
    classes = list(c.classes)
    of_model, request_s = c.of_model(model), fleet.request_s_of(model)
    return Snapshot(
        *c.steady(),
        known=model in c.models or model in fleet.registered,
        serves=of_model.serves,
        here=of_model.here,
        activation_s=of_model.activation_s,
        kv_total_bytes=of_model.kv_total_bytes,
        kv_free_bytes=of_model.kv_free_bytes,
        prefill_token_s=of_model.prefill_token_s,
        suspect=c.suspect(now),
        classes=c.classes,
        work_s=c.reported_s[classes, :n] + c.unconfirmed_s[classes, :n],
        expected=c.expected[classes, :n],
        cached=_cached(fleet, session, model, last),
        request_s=request_s,
        decisions=decisions,
    )


_UNKNOWN = Cached()


def _cached(fleet: Fleet, session: Session | None, model: str, last: str) -> Cached:
    shape, places = fleet.shapes.get(model), fleet.columns.places
    if shape is None:
        return _UNKNOWN
    if session is None or not session.tokens or session.model != model:
        if last not in places:
            return _UNKNOWN
        tokens, size, held = shape.chunk_tokens, float(shape.chunk_bytes), {}  # of unknown size: a chunk at least
    else:
        tokens, size = session.tokens, float(session.tokens // shape.chunk_tokens * shape.chunk_bytes)
        held = {
            n: Holder(places[n], h.tokens, float(h.bytes), h.bytes * h.tokens_dram / h.tokens)
            for n, h in session.holders.items()
        }
    if last in places:
        held[last] = Holder(places[last], tokens, size, size)
    return Cached(tokens, size, tuple(held.values()))
