"""Converts the store's messages to events of an engine's core."""

from __future__ import annotations

from contracts.convert import session_from_wire
from contracts.v1 import kvstore_pb2
from storelink.core.load_plan import Source
from worker.core import events as ev


def from_store(message: kvstore_pb2.StoreToWorker, fingerprint: bytes) -> ev.Event | None:
    """The event; None if the message is for another model or unknown. fingerprint: of this model's KV."""
    match message.WhichOneof("kind"):
        case "found":
            found = message.found
            sources = tuple(Source(min(x, Source.BLOB)) for x in found.sources)
            return ev.Found(found.load_id, found.chunks, sources, tuple(found.due_s))
        case "offer" if message.offer.fingerprint == fingerprint:
            offer = message.offer
            return ev.Offered(
                session_from_wire(offer.session), tuple(offer.keys), offer.priority, offer.arrival_s, offer.expires_s
            )
        case "invalidate":
            return ev.Withdrawn(session_from_wire(message.invalidate))
        case "erase":
            return ev.Erased({session_from_wire(s) for s in message.erase.sessions}, tuple(message.erase.keys))
        case "hbm_query":
            return ev.Queried(message.hbm_query.query_id, tuple(message.hbm_query.keys))
    return None
