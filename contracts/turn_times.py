"""Time of a turn by phase; `Server-Timing`, metrics and `upbeat explain` use these names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum


class Phase(str, Enum):
    """What a turn waits for or what is done for it. A turn is in one phase at a time.

    In the gateway:

    - ADMIT: waits for its body and for limits of tenant and gateway
    - PLACE: waits for the scheduler
    - PREPARE: until the worker has its tokens (template, tokeniser, grammar, network, lost attempts)

    In the worker:

    - QUEUE: waits behind other requests or for a place in the batch
    - MEMORY: waits for pages of HBM
    - LOCATE: waits for the store to report what it has
    - LOAD_*: waits for pieces of its KV, named by the slowest source of the load
    - OTHERS: waits during steps that computed other requests only
    - COMPUTE: steps that compute its prompt
    - SLOWED: extra time of those steps while other requests' KV was copied
    - DECODE: from the first token on, including other requests' steps
    """

    __str__ = str.__str__

    ADMIT = "admit"
    PLACE = "place"
    PREPARE = "prepare"
    QUEUE = "queue"
    MEMORY = "memory"
    LOCATE = "locate"
    LOAD_DRAM = "load-dram"
    LOAD_SSD = "load-ssd"
    LOAD_PEER = "load-peer"
    LOAD_BLOB = "load-blob"
    OTHERS = "others"
    COMPUTE = "compute"
    SLOWED = "slowed"
    DECODE = "decode"


#: Descriptions for users.
WORDS: dict[Phase, str] = {
    Phase.ADMIT: "waited for the gateway",
    Phase.PLACE: "placed",
    Phase.PREPARE: "tokenised and sent",
    Phase.QUEUE: "waited in the queue",
    Phase.MEMORY: "waited for memory",
    Phase.LOCATE: "cache located",
    Phase.LOAD_DRAM: "loaded from DRAM",
    Phase.LOAD_SSD: "loaded from SSD",
    Phase.LOAD_PEER: "loaded from another node",
    Phase.LOAD_BLOB: "loaded from the blob tier",
    Phase.OTHERS: "waited for others' steps",
    Phase.COMPUTE: "computed",
    Phase.SLOWED: "slowed by others' KV",
    Phase.DECODE: "decoded",
}

#: All phases in order.
PHASES = tuple(Phase)
#: The phases that workers report; the gateway measures the others.
OF_WORKER = tuple(p for p in PHASES if p not in (Phase.ADMIT, Phase.PLACE, Phase.PREPARE))
#: Limit of turn records in one message to a scheduler.
MOST_TOGETHER = 512
#: Longest plausible phase in seconds.
_MOST_S = 1e5


def checked(told: object, known: Iterable[Phase] = PHASES) -> dict[Phase, float]:
    """The valid times in another process's report, in seconds, in the order of `known`."""
    if not isinstance(told, Mapping):
        return {}
    return {phase: float(told[phase]) for phase in known if phase in told and _is_time(told[phase])}


def _is_time(said: object) -> bool:
    # NaN fails the range check.
    return isinstance(said, int | float) and not isinstance(said, bool) and 0 <= said <= _MOST_S
