"""A model of a device, as `worker.core.residency` sees it: what it needs, its state, and since when it waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from contracts.models import ModelState
from contracts.residency import MOST_MOVES, OF_LAYERS, MayLend, Never, WeightsMove
from worker.core.balloon import Share
from worker.core.engine_core import EngineCore
from worker.core.lending import Lending
from worker.core.sequence import Sequence
from worker.core.yielding import Yielding

#: Layers that go for the same reason count as one move of weights while no more than this is between two, in seconds.
SERIES_S = 10.0


class Expected(NamedTuple):
    """When a hinted request is expected, and until when. moves: the model moves to this device."""

    arrival_s: float
    until_s: float
    moves: bool = False


@dataclass(slots=True, eq=False)
class Resident:
    """One model. granules: of its weights. bytes_: to copy. pinned: never evicted."""

    share: Share
    core: EngineCore
    yielding: Yielding
    granules: int
    bytes_: int
    pinned: bool = False
    #: Measured bytes a second of its copies, if they do not come from an image as those of others do.
    copy_bytes_s: float | None = None
    #: What it may lend; None: nothing, ever, for the reason `never`.
    lending: Lending | None = None
    never: Never = Never.OFF
    state: ModelState = ModelState.COLD
    #: When the state began, and when a request last was live.
    since_s: float = -math.inf
    used_s: float = -math.inf
    #: Since when its requests have waited for weights or, with weights, for any memory; infinite: they do not.
    waits_s: float = math.inf
    #: Not even all idle models' memory would do for it: others must give way first.
    crowded_out: bool = False
    #: Layers that are here, while loading.
    ready: int = 0
    #: Hinted requests of sessions without KV here, soonest first; hints of others reach the engine by the store.
    expected: list[Expected] = field(default_factory=list)
    #: Until when its requests go elsewhere, as the scheduler says.
    spare_until_s: float = -math.inf
    #: Weights of another model came at the same time: how long these took says little of the copies' speed.
    crowded: bool = False
    #: Failed activations since the last good one, and when to try again.
    failures: int = 0
    retry_s: float = -math.inf
    #: Totals: times that its weights came and left, and the time that coming took.
    activations: int = 0
    evictions: int = 0
    loading_s: float = 0.0
    #: Its group (`worker.core.turns`): requests that arrived before this number, of at most this priority.
    _group: tuple[int, int] = (0, 0)
    #: Its last changes of state, the oldest first. Replaced, never changed: read on any thread.
    moves: tuple[WeightsMove, ...] = ()

    @property
    def name(self) -> str:
        """The model's name."""
        return self.share.name

    @property
    def weights(self) -> int:
        """Granules of its weights that are on the device, or on their way."""
        if self.state is ModelState.COLD:
            return 0
        return self.granules - (self.lending.lent_granules if self.lending is not None else 0)

    @property
    def layers_lent(self) -> int:
        """Layers that it lends."""
        return self.lending.lent if self.lending is not None else 0

    def may_lend(self, decodes: int, now: float) -> MayLend | None:
        """What it may lend, with steps of so many decodes; None: `worker.remap` is off. Any thread."""
        lending = self.lending
        if lending is None:
            return None if self.never is Never.OFF else MayLend(never=self.never)
        never = Never.PINNED if self.pinned else None
        idle, computing = lending.idle_most(), lending.active_most(decodes, now)
        return MayLend(idle, computing, lending.transfer_s, lending.layer_s(decodes), never)

    def note(self, move: WeightsMove) -> None:
        """Remember it."""
        before = self.moves
        last = before[-1] if before else None
        if last is not None and move.why in OF_LAYERS and (last.why, last.other) == (move.why, move.other):
            between_s = move.at_s - last.at_s
            if between_s <= SERIES_S:
                before, move = before[:-1], replace(move, seconds=last.seconds + between_s)
        self.moves = (*before[1 - MOST_MOVES :], move)

    @property
    def least(self) -> int:
        """Granules of KV without which it can do nothing: a chunk's."""
        return self.granules_of(1)

    def granules_of(self, chunks: int) -> int:
        """Granules of KV for so many chunks more, all in new slabs."""
        pool = self.share.pool
        slabs = max(math.ceil(chunks * pool.layers / pool.pages_per_slab), pool.bands) if chunks else 0
        return slabs * self.share.slab_granules

    @property
    def idle_since_s(self) -> float:
        """When a request last was live, or its weights came."""
        return max(self.used_s, self.since_s)

    @property
    def group(self) -> list[Sequence]:
        """What is left of its group of requests."""
        before, priority = self._group
        return [s for s in self.core.live.values() if s.arrival < before and s.request.priority <= priority]

    def begin_group(self) -> None:
        """Its live requests of the most urgent priority are a new group."""
        priority = min((s.request.priority for s in self.core.live.values()), default=0)
        self._group = (self.core.arrivals, priority)

    @property
    def starved(self) -> bool:
        """Its weights are here, and no request finds memory for KV."""
        return self.state is ModelState.ACTIVE and self.core.starved

    def note_wait(self, now: float, held: bool) -> None:
        """Set `waits_s`. It lasts from the first request without weights to the first step. held: requests get no
        memory, for weights that move here: then no model with weights begins to wait."""
        if not self.core.live or self.core.stepping:
            self.waits_s = math.inf
        elif math.isinf(self.waits_s) and (self.state is not ModelState.ACTIVE or (self.core.starved and not held)):
            self.waits_s = now
