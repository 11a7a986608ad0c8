"""What the store asks of, or tells, the worker beside loads and saves: residency, withdrawn hints, erased sessions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from contracts.convert import session_from_wire
from contracts.ids import SessionKey
from contracts.kv import leading
from contracts.v1 import common_pb2, kvstore_pb2
from worker.core.sequence import Sequence
from worker.engine.device import Device
from worker.engine.prefetching import Prefetching


def answer_store(device: Device, prefetching: Prefetching, sequences: Iterable[Sequence], message: kvstore_pb2.StoreToWorker) -> None:
    """Act on one message. Engine thread only; mutates the cache on erase and invalidate, and marks `sequences` of erased sessions."""
    match message.WhichOneof("kind"):
        case "hbm_query":
            query = message.hbm_query
            device.tell(hbm=kvstore_pb2.HbmResidency(query_id=query.query_id, hbm=residency(device, list(query.keys))))
        case "invalidate":
            prefetching.withdrawn(session_from_wire(message.invalidate))
        case "erase":
            gone = {session_from_wire(s) for s in message.erase.sessions}
            _erase(device, prefetching, sequences, gone, message.erase.keys)


def _erase(
    device: Device, prefetching: Prefetching, sequences: Iterable[Sequence], sessions: set[SessionKey], keys: Iterable[bytes]
) -> None:
    for key in keys:
        device.cache.erase(key)
    for session in sessions:
        prefetching.withdrawn(session)
    if sessions:
        device.cache.forget(sessions)
    for sequence in sequences:
        sequence.erased = sequence.erased or sequence.request.session in sessions


def residency(device: Device, keys: list[bytes]) -> common_pb2.TierResidency:
    """How much of these chunks is in HBM."""
    shape = device.shape
    ready = [b.ready if (b := device.cache.index.get(key)) is not None else np.zeros(shape.layers, bool) for key in keys]
    per_layer = np.sum(ready, axis=0, dtype=int) if ready else np.zeros(shape.layers, int)
    return common_pb2.TierResidency(
        tier="hbm",
        layer_chunks=[int(n) for n in per_layer],
        tokens=leading(bool(r.all()) for r in ready) * shape.chunk_tokens,
        bytes=int(per_layer.sum()) * shape.piece_bytes,
    )
