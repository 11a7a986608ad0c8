"""Where a turn's time went, by phase; the names are those of `Server-Timing`, of metrics and of `upbeat explain`."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """What a turn waited for, or what was done for it. At any moment it is in one.

    In the gateway: ADMIT, for its tenant's and the gateway's shares; PLACE, for the scheduler; PREPARE, for the worker to have its tokens
    (the way there, template, tokeniser, grammar). In the worker: QUEUE, behind others or for a place in the batch; MEMORY, for pages of
    HBM; LOCATE, for the store to say what it has; LOAD_*, for pieces of its KV, by the slowest source of the load; OTHERS, for steps that
    held others only; COMPUTE, in steps of its own; SLOWED, what those took longer than usual while KV of others moved; DECODE, from the
    first token on, with the steps of others among its own.
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
