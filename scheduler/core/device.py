"""State of a node and of its devices: plain values, kept by `fleet`.

States of a device:
- *serving*: its worker and its node's store are connected, and the worker takes work.
- *suspect*: its worker has not reported for `SUSPECT_AFTER_S`, says that its engine is stalled, or left repeatedly and
  has just returned. It gets work only if there is no other device.
- *dead*: no report for longer (`fleet.DEAD_AFTER_S`). Its requests are lost. It may report again.
- *draining*: its worker takes no new work.
- *starting*: worker or store has not connected yet, for `STARTING_S` at most.
- *absent*: worker or store has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contracts.kv import KvShape
from contracts.models import ModelState, ModelWire
from contracts.residency import MemoryShare, WeightsMove
from scheduler.core.columns import SUSPECT_AFTER_S, urgency_class
from scheduler.core.models import ModelLoad

#: An engine whose step is overdue by this much is stalled, in seconds.
STALLED_AFTER_S = 2.0
#: A device whose worker and store were never connected together is starting for this long, in seconds: a large model
#: takes minutes to load.
STARTING_S = 600.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a worker has.

    state: when the worker joined. longest_token_bytes, message_token_bytes and all fields after `state`: as in the
    proto, for gateways. ttft_slo_s, tpot_slo_s: 0 without a target.
    """

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
    wire: ModelWire = ModelWire.FRAMES


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates at which KV reaches a node, in bytes a second: from another node, its SSD, the blob tier. Defaults: a
    10 Gbit/s link, a common NVMe disk, an object store."""

    link_bytes_per_s: float = 1e9
    ssd_bytes_per_s: float = 2e9
    blob_bytes_per_s: float = 3e8


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's last report.

    outstanding_tokens: prompt tokens to compute plus tokens to generate. outstanding_s: the time for these by the
    worker's measurements. by_priority: the same time by priority; empty: all of priority 0. request_s: work of a
    typical request; prefill_token_s: time per prompt token; each 0 if not yet measured. hbm_pages_cached: those of
    hbm_pages_free that hold cache. stalled_s: how long the engine's step is overdue. models: the same by model; empty:
    the device's values hold for each of its models. device_bytes_free: unallocated. memory: who holds the device's
    memory; for users, not for decisions.
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
    stalled_s: float = 0.0
    models: Mapping[str, ModelLoad] = field(default_factory=dict)
    device_bytes_free: int = 0
    memory: tuple[MemoryShare, ...] = ()

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
    """A placed request: urgency class, time of placement, estimated seconds of work, and model."""

    urgency: int
    placed_s: float
    seconds: float
    model: str = ""


@dataclass(slots=True)
class Node:
    """A machine's store and the devices that share it. rates: as its workers measured."""

    name: str
    store_address: str = ""
    store_here: bool = False
    rates: Rates = Rates()
    #: Number of the last message about sessions in the store's stream; 0: none.
    held_number: int = 0
    #: It has left the fleet for good, and said no hello since.
    gone: bool = False
    #: When its store last said hello or reported its load, in seconds.
    heard_s: float = float("-inf")
    dram_bytes_total: int = 0
    dram_bytes_used: int = 0
    ssd_bytes_used: int = 0
    #: The store's last metrics by Prometheus sample; for users, not for decisions.
    store_metrics: dict[str, float] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)

    @property
    def silent(self) -> bool:
        """Whether none of its workers reports."""
        return not any(device.worker_here and not device.dead for device in self.devices)


@dataclass(slots=True)
class Device:
    """A worker's device, on which work is placed. name: `contracts.devices.device_name`."""

    name: str
    node: Node
    worker_address: str = ""
    models: tuple[Model, ...] = ()
    #: Of the worker's process; and adopted models that it could not start with, and why.
    instance: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    load: LoadReport = LoadReport()
    #: Size of its memory, shared by its models; 0: not known.
    device_bytes: int = 0
    #: Number of the last report in its stream; 0: none.
    reported: int = 0
    #: Outstanding requests, confirmed by the worker's reports or not yet.
    confirmed: set[str] = field(default_factory=set)
    unconfirmed: dict[str, Placed] = field(default_factory=dict)
    worker_here: bool = False
    draining: bool = False
    dead: bool = False
    heard_s: float = 0.0
    #: Departures of the worker within `STEADY_S` of each other, time of the last, and the end of the suspicion.
    leaves: int = 0
    left_s: float = float("-inf")
    trusted_s: float = 0.0
    #: When its state was first noted; None: not yet.
    known_s: float | None = None
    #: Whether its worker and its node's store were ever connected together.
    was_whole: bool = False
    #: The state that watchers last saw.
    shown: str = ""
    #: Like `Node.store_metrics`.
    worker_metrics: dict[str, float] = field(default_factory=dict)
    #: By model: when its weights came and went, the oldest first; for users, not for decisions.
    moves: Mapping[str, tuple[WeightsMove, ...]] = field(default_factory=dict)

    @property
    def loads(self) -> dict[str, ModelLoad]:
        """The load of each of its models. One that a request on its way wakes counts as loading."""
        asked = {placed.model for placed in self.unconfirmed.values()}
        return {
            model.name: replace(load, state=ModelState.LOADING)
            if (load := self.load.of(model)).state is ModelState.COLD and model.name in asked
            else load
            for model in self.models
        }

    def model_of(self, request_id: str) -> str:
        """The model of a request that was placed here, or the only one that the device has; empty: not known."""
        placed = self.unconfirmed.get(request_id)
        if placed is not None and placed.model:
            return placed.model
        return self.models[0].name if len(self.models) == 1 else ""

    @property
    def outstanding(self) -> set[str]:
        """Ids of requests that were placed here and are not known to have ended."""
        return self.confirmed | self.unconfirmed.keys()

    @property
    def work_s(self) -> float:
        """Outstanding work in seconds: as the worker reports it, plus placements since."""
        return sum(self.load.seconds.values()) + sum(placed.seconds for placed in self.unconfirmed.values())

    @property
    def serving(self) -> bool:
        """Whether worker and store are connected and the worker takes work; also true while suspect."""
        return self.worker_here and self.node.store_here and not self.draining and not self.dead

    def state(self, now: float) -> str:
        """The state by name: see the module."""
        if not (self.worker_here and self.node.store_here):
            starting = not self.was_whole and (self.known_s is None or now - self.known_s < STARTING_S)
            return "starting" if starting else "absent"
        if self.dead:
            return "dead"
        if self.draining:
            return "draining"
        return "suspect" if self.stalled(now) or now < self.trusted_s else "serving"

    def stalled(self, now: float) -> str:
        """Why its requests make no progress: `silent` (no reports), `engine` (it is stalled), or empty."""
        if not self.worker_here:
            return ""
        return (
            "silent"
            if now - self.heard_s > SUSPECT_AFTER_S
            else "engine"
            if self.load.stalled_s > STALLED_AFTER_S
            else ""
        )
