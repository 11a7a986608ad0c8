"""A load: KV being copied from the store into pages of HBM."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.ids import SessionKey
from storelink.core.load_plan import Missing, Source
from worker.core.block import Block
from worker.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Load:
    """blocks[i] receives `layers[i]` of requested chunk i. hint: for a hint; otherwise `sequence` waits for it.

    upto: leading chunks of the sequence that are usable when the load is complete. sources, due_s: of the found chunks,
    in order (see `events.Found`). closed: no more pieces arrive.
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
        """The found chunks, for `load_plan`'s estimate of their time."""
        estimates = self.due_s if len(self.due_s) == len(self.sources) else (-1.0,) * len(self.sources)
        due_s = (seconds if seconds >= 0.0 else None for seconds in estimates)
        return [
            Missing(len(each), source, due) for each, source, due in zip(self.layers, self.sources, due_s, strict=False)
        ]
