"""A load: KV that is on its way from the store into pages of HBM."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.ids import SessionKey
from storelink.core.load_plan import Source
from worker.core.hbm import Block
from worker.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Load:
    """blocks[i] receives `layers[i]` of the chunk i that was asked for. `hint`: nobody waits for it; else `sequence` does.

    upto: chunks of the sequence that can be used when all of it has come. sources: where the found chunks come from, in order.
    closed: nothing of it comes any more.
    """

    load_id: int
    session: SessionKey
    blocks: list[Block]
    layers: list[list[int]]
    hint: bool
    asked_s: float
    sequence: Sequence | None = None
    upto: int = 0
    sources: list[Source] = field(default_factory=list)
    cancelled: bool = False
    closed: bool = False
