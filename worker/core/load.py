"""A load: KV that is on its way from the store into pages of HBM."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.ids import SessionKey
from storelink.core.load_plan import Missing, Source
from worker.core.hbm import Block
from worker.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Load:
    """blocks[i] receives `layers[i]` of the chunk i that was asked for. `hint`: nobody waits for it; else `sequence` does.

    upto: chunks of the sequence that can be used when all of it has come. sources: where the found chunks come from, in order; due_s: when
    they will be in the arena, in seconds from then. closed: nothing of it comes any more.
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
    due_s: tuple[float, ...] = ()
    cancelled: bool = False
    closed: bool = False

    def missing(self) -> list[Missing]:
        """What was found, for an estimate of how long it takes."""
        told = self.due_s if len(self.due_s) == len(self.sources) else (-1.0,) * len(self.sources)
        due_s = (seconds if seconds >= 0.0 else None for seconds in told)
        return [Missing(len(each), source, due) for each, source, due in zip(self.layers, self.sources, due_s, strict=False)]
