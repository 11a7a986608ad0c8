"""Requests and loads as a node's cores know them, and the coarser pieces that they count in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from contracts.kv import KvShape
from contracts.request import GenerateRequest, Sampling
from loadtest.simulate.core_engine import Tokens
from loadtest.simulate.sequences import Request
from worker.core.instructions import OpenLoad
from worker.core.sequence import Sequence

_SAMPLING = Sampling()


def coarse(shape: KvShape, bands: int = 4, chunk_tokens: int = 256) -> KvShape:
    """As many bytes a token in fewer, larger pieces: `bands` layers, each as wide as all that it stands for."""
    return replace(shape, layers=bands, kv_heads=shape.kv_heads * shape.layers // bands, chunk_tokens=chunk_tokens)


def sequence_of(request: Request, kept_tokens: int, keys: list[bytes], sources: tuple[str, ...]) -> Sequence:
    """As a gateway and a worker make it of a turn. keys: of all its chunks, the answer's included, which nobody computes here."""
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
    made = Sequence(asked, request.prompt_tokens, cast("list[int]", Tokens(request.prompt_tokens)), request.answer_tokens, arrival=0)
    made.keys = keys
    return made


@dataclass(slots=True, eq=False)
class Coming:
    """A load on its way into HBM: which pieces are there, how many layers' pieces are on the bus, whether the store sends no more."""

    asked: OpenLoad
    here: set[tuple[int, int]] = field(default_factory=set)
    on_bus: int = 0
    ended: bool = False
    first_s: float = 0.0
    last_s: float = 0.0
