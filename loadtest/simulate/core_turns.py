"""What a node with every core in full knows of a request's KV and of a hinted band, and the coarser pieces that it counts in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from contracts.ids import SessionKey
from contracts.kv import KvShape
from kvstore.core import events as ev
from loadtest.simulate.sequences import Running
from worker.core.hbm import Block


def coarse(shape: KvShape, bands: int = 4, chunk_tokens: int = 256) -> KvShape:
    """As many bytes a token in fewer, larger pieces: `bands` layers, each as wide as all that it stands for."""
    return replace(shape, layers=bands, kv_heads=shape.kv_heads * shape.layers // bands, chunk_tokens=chunk_tokens)


@dataclass(slots=True, eq=False)
class TurnKv:
    """A request's KV. blocks: of all its chunks; wants: chunks that are loaded, with the layers that are missing, and how many pieces of
    each layer have come; expected: of `wants`, that will come; None until the store has said so."""

    sequence: Running
    keys: list[bytes]
    sources: tuple[str, ...]
    blocks: list[Block] = field(default_factory=list)
    wants: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    load: ev.LoadId | None = None
    expected: int | None = None
    planned: bool = False
    came: list[int] = field(default_factory=list)
    asked_s: float = 0.0
    started: bool = False
    on_bus: int = 0
    ended: bool = False


@dataclass(slots=True, eq=False)
class HintedBand:
    """A band of an offered session on its way into HBM."""

    session: SessionKey
    blocks: list[Block]
    on_bus: int = 0
    ended: bool = False
