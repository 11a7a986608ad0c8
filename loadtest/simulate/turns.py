"""Requests and loads in the form of a node's cores, and the coarse pieces of simulated nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from contracts.kv import KvShape
from contracts.request import GenerateRequest, Sampling
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.request import Request
from worker.core import instructions as do
from worker.core.sequence import Sequence

_SAMPLING = Sampling()


def coarse(shape: KvShape, bands: int = 4, chunk_tokens: int = 256) -> KvShape:
    """The same bytes a token in fewer, larger pieces: `bands` layers, each with the KV of those it replaces."""
    kv_heads = shape.kv_heads * shape.layers // bands
    return KvShape.of_heads(shape.fingerprint, bands, kv_heads, shape.head_dim, chunk_tokens, shape.dtype)


def coarsened(kind: NodeKind, bands: int = 4, chunk_tokens: int = 256) -> NodeKind:
    """The same node with coarse pieces."""
    return replace(kind, shape=coarse(kind.shape, bands, chunk_tokens), layers_modelled=kind.shape.layers)


def slabs(kind: NodeKind) -> tuple[int, int]:
    """(number of HBM slabs of a node, pages of each)."""
    per_slab = max(kind.shape.layers, 4)
    return int(kind.hbm_bytes // kind.shape.piece_bytes) // per_slab, per_slab


def most_tokens(kind: NodeKind) -> int:
    """Tokens of the longest conversation that fits a node, with one chunk spare."""
    count, per_slab = slabs(kind)
    return (count * per_slab // kind.shape.layers - 1) * kind.shape.chunk_tokens


def sequence_of(request: Request, kept_tokens: int, keys: list[bytes], sources: tuple[str, ...]) -> Sequence:
    """The sequence that gateway and worker would make of a request. keys: of all its chunks, the answer's included."""
    asked = GenerateRequest(
        request.request_id,
        request.session.tenant,
        request.session.session_id,
        "",
        _SAMPLING,
        prompt_tokens=[],
        priority=request.priority,
        source_nodes=list(sources),
        kept_tokens=kept_tokens,
        expected_tokens=request.expected_tokens,
    )
    # Only the number of tokens matters.
    tokens = cast("list[int]", bytearray(request.prompt_tokens))
    made = Sequence(asked, request.prompt_tokens, tokens, request.answer_tokens, arrival=0)
    made.keys = keys
    return made


@dataclass(slots=True, eq=False)
class Coming:
    """A load into HBM. here: (block, layer) of its pieces that have arrived. on_bus: copies in progress. ended: the
    store sends no more."""

    asked: do.OpenLoad
    here: set[tuple[int, int]] = field(default_factory=set)
    on_bus: int = 0
    ended: bool = False
    first_s: float = 0.0
    last_s: float = 0.0
