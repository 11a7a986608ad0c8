"""What is known of a node and of each of its devices: plain values, which `fleet` keeps.

A device's life: *serving* while its worker and its node's store are here and the worker takes work; *suspect* when its lease is over, as
nothing was heard of the worker for a while, or when that says that its engine stands still: then it gets work only if there is no other;
*dead* when nothing is heard of it for longer: what ran there is gone, until it reports again; *draining* when its worker says that it
takes nothing new; *starting* while worker or store has not come yet, for `STARTING_S` at most; *absent* when one of them was here and is
not. One that comes and goes is suspect for a growing while after each return, so that work and hints do not follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.kv import KvShape
from contracts.models import ModelState
from scheduler.core.columns import SUSPECT_AFTER_S, urgency_class
from scheduler.core.models import ModelLoad

#: An engine that has done nothing for this long beyond the time its step should have taken stands still, in seconds.
STALLED_AFTER_S = 2.0
#: A device of which only worker or store has ever come counts as starting for this long, in seconds: a large model takes minutes to load.
STARTING_S = 600.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a worker has. longest_token_bytes, message_token_bytes: as in the proto, for gateways; so is what follows `state`, which
    is the one that the worker said when it joined. ttft_slo_s, tpot_slo_s: 0 where nothing is promised."""

    name: str
    shape: KvShape
    max_tokens: int
    created_s: int
    longest_token_bytes: int = 0
    message_token_bytes: int = 0
    state: ModelState = ModelState.ACTIVE
    weight_bytes: int = 0
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast KV comes to a node, in bytes a second: from another node, its own SSD, the blob tier. Where nobody has measured:
    a 10 Gbit/s link, a usual NVMe disk, an object store."""

    link_bytes_per_s: float = 1e9
    ssd_bytes_per_s: float = 2e9
    blob_bytes_per_s: float = 3e8


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's last report.

    outstanding_tokens: prompt tokens to compute plus tokens still to generate; outstanding_s: the time that takes by the
    worker's own measurements. by_priority: the same time by priority of its requests; empty: all of priority 0.
    request_s: the work of a typical request there; prefill_token_s: what a prompt's token costs; each 0 when it has not seen any.
    models: the same by model; empty: what is said of the node holds for each of its models. device_bytes_free: that nobody holds.
    hbm_pages_cached: of hbm_pages_free, those with cache.
    """

    running: int = 0
    waiting: int = 0
    outstanding_tokens: float = 0.0
    outstanding_s: float = 0.0
    request_s: float = 0.0
    hbm_pages_total: int = 0
    hbm_pages_free: int = 0
    hbm_pages_cached: int = 0
    prefill_token_s: float = 0.0
    by_priority: Mapping[int, float] = field(default_factory=dict)
    #: How long the engine has done nothing beyond the time its step should have taken.
    stalled_s: float = 0.0
    models: Mapping[str, ModelLoad] = field(default_factory=dict)
    device_bytes_free: int = 0

    def of(self, model: Model) -> ModelLoad:
        """One model's part."""
        if (known := self.models.get(model.name)) is not None:
            return known
        page_bytes, total, free = model.shape.piece_bytes, self.hbm_pages_total, self.hbm_pages_free
        return ModelLoad(
            state=model.state,
            running=self.running,
            waiting=self.waiting,
            outstanding_tokens=self.outstanding_tokens,
            by_priority=self.by_priority or {0: self.outstanding_s},
            request_s=self.request_s,
            prefill_token_s=self.prefill_token_s,
            kv_bytes_used=(total - free) * page_bytes,
            kv_bytes_cached=self.hbm_pages_cached * page_bytes,
            kv_bytes_limit=total * page_bytes,
        )

    @property
    def seconds(self) -> dict[int, float]:
        """Outstanding work by class of urgency."""
        found: dict[int, float] = {}
        for priority, seconds in (self.by_priority or {0: self.outstanding_s}).items():
            found[urgency_class(priority)] = found.get(urgency_class(priority), 0.0) + seconds
        return found


@dataclass(slots=True)
class Placed:
    """A request that was placed: how urgent, when, and how much work it was thought to be, in seconds."""

    urgency: int
    placed_s: float
    seconds: float


@dataclass(slots=True)
class Node:
    """A machine's store, and the devices that share it. rates: how fast KV comes to it, as its workers measured."""

    name: str
    store_address: str = ""
    store_here: bool = False
    rates: Rates = Rates()
    #: The last message about sessions in the store's stream; 0: none.
    held_number: int = 0
    dram_bytes_total: int = 0
    dram_bytes_used: int = 0
    ssd_bytes_used: int = 0
    #: What the store last said of itself, by Prometheus sample; for people, not for decisions.
    store_metrics: dict[str, float] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)

    @property
    def silent(self) -> bool:
        """Nothing is heard of any of its workers."""
        return not any(device.worker_here and not device.dead for device in self.devices)


@dataclass(slots=True)
class Device:
    """A worker and what is known of it: what work is placed on. name: `contracts.devices.device_name`."""

    name: str
    node: Node
    worker_address: str = ""
    models: tuple[Model, ...] = ()
    load: Load = Load()
    #: Of its memory, which models share; 0: not known.
    device_bytes: int = 0
    #: The last report's number in its stream; 0: none.
    reported: int = 0
    #: Outstanding requests that the worker has confirmed, and those that it has not.
    confirmed: set[str] = field(default_factory=set)
    young: dict[str, Placed] = field(default_factory=dict)
    worker_here: bool = False
    draining: bool = False
    dead: bool = False
    heard_s: float = 0.0
    #: How often the worker left, each time within `STEADY_S` of the last, when it did, and from when on it is trusted.
    leaves: int = 0
    left_s: float = float("-inf")
    trusted_s: float = 0.0
    #: Since when something of it is known; None: for less than a tick.
    known_s: float | None = None
    #: Its worker and its node's store have been here at the same time.
    was_whole: bool = False
    #: What watchers were told of its state.
    shown: str = ""
    #: As of its node.
    worker_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loads(self) -> dict[str, ModelLoad]:
        """By model: how it is here."""
        return {model.name: self.load.of(model) for model in self.models}

    @property
    def outstanding(self) -> set[str]:
        """Request ids that were placed here and have not ended, as far as is known."""
        return self.confirmed | self.young.keys()

    @property
    def work_s(self) -> float:
        """Outstanding work in seconds: what the worker reports, and what was placed since."""
        return sum(self.load.seconds.values()) + sum(placed.seconds for placed in self.young.values())

    @property
    def serving(self) -> bool:
        """Worker and store are here and the worker takes work."""
        return self.worker_here and self.node.store_here and not self.draining and not self.dead

    def state(self, now: float) -> str:
        """serving, suspect, draining, dead, starting or absent."""
        if not (self.worker_here and self.node.store_here):
            starting = not self.was_whole and (self.known_s is None or now - self.known_s < STARTING_S)
            return "starting" if starting else "absent"
        if self.dead:
            return "dead"
        if self.draining:
            return "draining"
        return "suspect" if self.stalled(now) or now < self.trusted_s else "serving"

    def stalled(self, now: float) -> str:
        """Why what runs there does not get on: silent, as nothing is heard of its worker; engine, as that stands still; else empty."""
        if not self.worker_here:
            return ""
        return "silent" if now - self.heard_s > SUSPECT_AFTER_S else "engine" if self.load.stalled_s > STALLED_AFTER_S else ""
