"""Who holds a device's memory, why models' weights came and went, and what they lend to KV: workers tell it users. It
decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from contracts.models import ModelState

#: Moves that are remembered of a model on a device.
MOST_MOVES = 16
#: Owners of a device's memory that a scheduler keeps.
MOST_SHARES = 256


class MemoryShare(NamedTuple):
    """What one owner holds of a device's memory. use: weights, kv, trainer or engine; of nobody: warm (backed, so that
    it is mapped sooner) or free. name: of the model or job; empty: nobody's."""

    use: str
    name: str
    bytes_: int


class Why(str, Enum):
    """Why a model's weights moved. `other`: see `WeightsMove`."""

    #: The worker started.
    START = "start"
    #: COLD to LOADING: a request waits for it, or a hint says that one comes.
    REQUEST = "request"
    HINT = "hint"
    #: LOADING to ACTIVE.
    LOADED = "loaded"
    #: ACTIVE to DRAINING: all models were busy and `other` waited; its slice was over, its group of requests was
    #: served, or it had no memory for KV.
    SLICE = "slice"
    GROUP = "group"
    STARVED = "starved"
    #: DRAINING to COLD.
    DRAINED = "drained"
    #: To COLD: it was idle, and `other` needed memory for weights or for KV.
    FOR_WEIGHTS = "for_weights"
    FOR_KV = "for_kv"
    #: To COLD: no request came for as long as loading takes.
    UNUSED = "unused"
    #: LOADING to COLD: its weights could not be read or placed.
    FAILED = "failed"
    #: The state stays. KV of `other` got a layer's memory; or a layer got it back, as nobody had lacked memory for a
    #: while, or as steps were too slow.
    LENT = "lent"
    CALM = "calm"
    SLOW = "slow"


#: Layers were lent or taken back.
OF_LAYERS = frozenset({Why.LENT, Why.CALM, Why.SLOW})


@dataclass(frozen=True, slots=True)
class WeightsMove:
    """A model entered `state` at `at_s`. other: the model that asked for the memory or the turn. seconds: of LOADED,
    how long it took; of weights that left for `other` or unused, the time since their last request, 0 if there had been
    none; of layers, the time since the first of them. layers_lent: from then on."""

    at_s: float
    state: ModelState
    why: Why
    other: str = ""
    seconds: float = 0.0
    layers_lent: int = 0


class Never(str, Enum):
    """Why a model lends no layers."""

    #: `worker.remap` is off.
    OFF = "off"
    #: Host memory has no image of its weights.
    NO_IMAGE = "no_image"
    #: Its layers differ in size.
    SIZES = "sizes"
    #: `worker.remap_cap` is less than one of its layers, or it has only one.
    CAP = "cap"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class MayLend:
    """What a model may lend now. idle, computing: layers at most in that state. transfer_s: of a copy of a layer.
    layer_s: of computing one. never: why it lends none, whatever these are."""

    idle: int = 0
    computing: int = 0
    transfer_s: float = 0.0
    layer_s: float = 0.0
    never: Never | None = None
