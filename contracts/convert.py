"""Converts between protobuf messages and domain values."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.advisory import Advisory
from contracts.ids import SessionKey
from contracts.kv import DTYPE_BYTES, MAX_NOTE_BYTES, KvShape, Manifest, check_shape
from contracts.residency import MayLend, WeightsMove
from contracts.v1 import common_pb2 as pb
from contracts.v1 import scheduler_pb2


def session_to_wire(session: SessionKey) -> pb.Session:
    return pb.Session(tenant=session.tenant, session_id=session.session_id)


def session_from_wire(message: pb.Session) -> SessionKey:
    return SessionKey(message.tenant, message.session_id)


def shape_to_wire(shape: KvShape) -> pb.KvShape:
    return pb.KvShape(
        fingerprint=shape.fingerprint,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        chunk_tokens=shape.chunk_tokens,
        dtype=shape.dtype,
        piece_bytes=shape.piece_bytes,
        windows=shape.windows,
    )


def shape_from_wire(m: pb.KvShape) -> KvShape:
    """Raises InvalidRequest naming an impossible field. Without piece_bytes (older peers) a piece is K and V of all
    heads."""
    geometry = m.fingerprint, m.layers, m.kv_heads, m.head_dim, m.chunk_tokens, m.dtype
    of_heads = not m.piece_bytes and m.dtype in DTYPE_BYTES
    windows = tuple(m.windows)
    return check_shape(KvShape.of_heads(*geometry, windows) if of_heads else KvShape(*geometry, m.piece_bytes, windows))


def manifest_to_wire(manifest: Manifest) -> pb.Manifest:
    return pb.Manifest(
        session=session_to_wire(manifest.session),
        model=manifest.model,
        fingerprint=manifest.fingerprint,
        keys=manifest.keys,
        tokens=manifest.tokens,
        last_use_s=manifest.last_use_s,
        note=manifest.note,
    )


def manifest_from_wire(m: pb.Manifest) -> Manifest:
    return Manifest(
        session_from_wire(m.session),
        m.model,
        m.fingerprint,
        list(m.keys),
        m.tokens,
        m.last_use_s,
        note=m.note[:MAX_NOTE_BYTES],
    )


def advisory_to_wire(
    advisory: Advisory, tenant: str, advisory_id: str, pin_node: str = "", caller: str = "", trace: str = ""
) -> pb.Advisory:
    return pb.Advisory(
        session=pb.Session(tenant=tenant, session_id=advisory.session_id),
        model_id=advisory.model_id or "",
        expected_arrival_s=advisory.expected_arrival_s,
        ordered=advisory.ordered,
        priority=advisory.priority,
        ttl_s=advisory.ttl_s,
        advisory_id=advisory_id,
        pin_node=pin_node,
        caller=caller,
        trace=trace,
    )


def layers_to_bitmap(layers: Iterable[int], count: int) -> bytes:
    """Bit `l % 8` of byte `l // 8` is set for each layer; empty when all `count` layers are."""
    bits = 0
    for layer in layers:
        bits |= 1 << layer
    if bits == (1 << count) - 1:
        return b""
    return bits.to_bytes((count + 7) // 8, "little")


def layers_from_bitmap(bitmap: bytes, count: int) -> list[int]:
    """The inverse of `layers_to_bitmap`; bits past `count` are ignored."""
    if not bitmap:
        return list(range(count))
    bits = int.from_bytes(bitmap, "little")
    return [layer for layer in range(count) if bits >> layer & 1]


def move_to_wire(model: str, move: WeightsMove, now: float) -> scheduler_pb2.WeightsMove:
    """A move of a model's weights, with its age at `now`."""
    return scheduler_pb2.WeightsMove(
        model=model,
        ago_s=max(now - move.at_s, 0.0),
        state=move.state.value,  # type: ignore[arg-type]
        why=move.why,
        other=move.other,
        seconds=move.seconds,
        layers_lent=move.layers_lent,
    )


def may_lend_to_wire(may: MayLend | None) -> scheduler_pb2.MayLend | None:
    """What a model may lend, if it may lend at all."""
    if may is None:
        return None
    return scheduler_pb2.MayLend(
        idle=may.idle,
        computing=may.computing,
        transfer_s=may.transfer_s,
        layer_s=may.layer_s,
        never=may.never.value if may.never is not None else "",
    )
