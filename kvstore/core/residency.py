"""How much of a session a tier holds, for whoever asks. Decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from contracts.kv import leading
from kvstore.core.chunk import Chunk
from kvstore.core.state import CopyState, PieceState


@dataclass(slots=True)
class Residency:
    """How much of one session one tier holds (contracts: TierResidency)."""

    layer_chunks: list[int] = field(default_factory=list)
    tokens: int = 0
    bytes: int = 0


def residency(chunks: Mapping[bytes, Chunk], keys: Sequence[bytes], tier: str) -> Residency:
    """What the tier ("dram", "ssd", "blob") holds of the chunks with these keys. chunks: those known here."""
    whole: list[bool] = []
    complete: Counter[int] = Counter()  # number of layers -> number of whole chunks
    partial: Counter[int] = Counter()  # layer -> number of other chunks that have it
    tokens = size = 0
    for key in keys:
        chunk = chunks.get(key)
        if chunk is None:
            whole.append(False)
            continue
        whole.append(chunk.complete if tier == "dram" else getattr(chunk, tier) is CopyState.PRESENT)
        complete[chunk.shape.layers] += whole[-1]
        tokens = chunk.shape.chunk_tokens
        if whole[-1]:
            size += chunk.shape.chunk_bytes
        elif tier == "dram" and chunk.ready:
            size += chunk.ready * chunk.shape.piece_bytes
            partial.update(layer for layer, state in enumerate(chunk.states) if state is PieceState.READY)
    most = range(max(complete, default=0))
    by_layer = [partial[i] + sum(count for layers, count in complete.items() if i < layers) for i in most]
    return Residency(by_layer, leading(whole) * tokens, size)
