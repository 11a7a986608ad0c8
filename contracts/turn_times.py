"""Where a turn's time went, by phase; the names are those of `Server-Timing`, of metrics and of `upbeat explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum


class Phase(str, Enum):
    """What a turn waited for, or what was done for it. At any moment it is in one.

    In the gateway: ADMIT, for its body and its tenant's and the gateway's shares; PLACE, for the scheduler; PREPARE, for the worker to have
    its tokens (template, tokeniser, grammar, the way there and back, attempts that were lost). In the worker: QUEUE, behind others or for a
    place in the batch; MEMORY, for pages of HBM; LOCATE, for the store to say what it has; LOAD_*, for pieces of its KV, by the slowest
    source of the load; OTHERS, for steps that held others only; COMPUTE, in steps of its own; SLOWED, what those took longer than usual
    while KV of others moved; DECODE, from the first token on, with the steps of others among its own.
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


#: What each is called where people read.
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

#: In order.
PHASES = tuple(Phase)
#: Those that a worker tells; the others are the gateway's own.
OF_WORKER = tuple(p for p in PHASES if p not in (Phase.ADMIT, Phase.PLACE, Phase.PREPARE))
#: Records of turns in one message to a scheduler.
MOST_TOGETHER = 512
#: No phase takes longer, in seconds.
_MOST_S = 1e5


def checked(told: object, known: Iterable[Phase] = PHASES) -> dict[Phase, float]:
    """What another process said of a turn's time, in seconds, in the order of `known`: what can be a time of those."""
    if not isinstance(told, Mapping):
        return {}
    return {phase: float(told[phase]) for phase in known if phase in told and _is_time(told[phase])}


def _is_time(said: object) -> bool:
    # What is not a number is not in any range.
    return isinstance(said, int | float) and not isinstance(said, bool) and 0 <= said <= _MOST_S
