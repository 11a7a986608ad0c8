"""What the scheduler knows of its nodes: soft state, rebuilt from their reports.

A node's life: *serving* while both of its processes are here and its worker takes work; *suspect* when its lease is over, as nothing
was heard of it for a while, or when its worker says that its engine stands still: then it gets work only if there is no other; *dead* when
nothing is heard of it for longer: what ran there is gone, and what it held cannot be had from it, until it reports again; *draining* when
its worker says that it takes nothing new; *starting* while one of its processes has not come yet, for `STARTING_S` at most; *absent* when
one of them was here and is not. One that comes and goes is suspect for a growing
while after each return, so that work and hints do not follow it.

Invariants (checked by `validate`):
- A request is outstanding on exactly one node.
- A node that has no worker or no store attached is not serving.
- The columns say what the nodes say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from contracts.kv import KvShape
from contracts.models import ModelState
from scheduler.core.columns import SUSPECT_AFTER_S, Columns, urgency_class
from scheduler.core.models import ModelLoad

#: A node that has not reported for this long is as good as gone, whatever its connections say, in seconds.
DEAD_AFTER_S = 15.0
#: A placement that no worker report has confirmed within this time is forgotten, in seconds.
UNCONFIRMED_S = 10.0
#: An engine that has done nothing for this long beyond the time its step should have taken stands still, in seconds.
STALLED_AFTER_S = 2.0
#: A node of which only one process has ever come counts as starting for this long, in seconds: a large model takes minutes to load.
STARTING_S = 600.0
_WEIGHT = 0.1
#: A node that leaves again within this time of having left before is unsteady. At its second return it is suspect for
#: `_FIRST_DOUBT_S`, then for twice as long each time, up to this time, in seconds.
STEADY_S, _FIRST_DOUBT_S = 30.0, 1.0
#: Reports of all workers together that this process takes in a second; none is asked for more than ten.
_REPORTS_PER_S, _REPORT_EVERY_S = 1000.0, 0.1


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
    """

    running: int = 0
    waiting: int = 0
    outstanding_tokens: float = 0.0
    outstanding_s: float = 0.0
    request_s: float = 0.0
    hbm_pages_total: int = 0
    hbm_pages_free: int = 0
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
    """One node: a worker and a store."""

    name: str
    worker_address: str = ""
    store_address: str = ""
    models: tuple[Model, ...] = ()
    rates: Rates = Rates()
    load: Load = Load()
    #: Of its device's memory, which models share; 0: not known.
    device_bytes: int = 0
    #: The last report's number in its stream; 0: none.
    reported: int = 0
    #: Outstanding requests that the worker has confirmed, and those that it has not.
    confirmed: set[str] = field(default_factory=set)
    young: dict[str, Placed] = field(default_factory=dict)
    worker_here: bool = False
    store_here: bool = False
    draining: bool = False
    dead: bool = False
    heard_s: float = 0.0
    #: How often the worker left, each time within `STEADY_S` of the last, when it did, and from when on it is trusted.
    leaves: int = 0
    left_s: float = float("-inf")
    trusted_s: float = 0.0
    #: The last message about sessions in the store's stream; 0: none.
    held_number: int = 0
    #: Since when something of it is known; None: for less than a tick.
    known_s: float | None = None
    #: Both of its processes have been here at the same time.
    was_whole: bool = False
    #: What watchers were told of its state.
    shown: str = ""
    dram_bytes_total: int = 0
    dram_bytes_used: int = 0
    ssd_bytes_used: int = 0
    #: What its processes last said of themselves, by Prometheus sample; for people, not for decisions.
    worker_metrics: dict[str, float] = field(default_factory=dict)
    store_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loads(self) -> dict[str, ModelLoad]:
        """By model: how it is here."""
        return {model.name: self.load.of(model) for model in self.models}

    @property
    def outstanding(self) -> set[str]:
        """Request ids that were placed here and have not ended, as far as is known."""
        return self.confirmed | self.young.keys()

    @property
    def serving(self) -> bool:
        """Both processes are here and the worker takes work."""
        return self.worker_here and self.store_here and not self.draining and not self.dead

    def state(self, now: float) -> str:
        """serving, suspect, draining, dead, starting or absent."""
        if not (self.worker_here and self.store_here):
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


class Fleet:
    """All nodes, and how much work a request is. Mutated by events; `columns` is kept to what the nodes say."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.columns = Columns()
        #: How the KV of each model is laid out.
        self.shapes: dict[str, KvShape] = {}
        #: The work of a typical request in seconds, of any model and by model: a running mean of what workers report.
        self.request_s = 1.0
        self._request_s: dict[str, float] = {}
        #: Models of the configuration: one that no node has is not active, and not unknown.
        self.registered: frozenset[str] = frozenset()
        #: Grows with every change that a watcher wants to know.
        self.version = 0
        self._where: dict[str, str] = {}  #: by outstanding request: its node

    def node(self, name: str) -> Node:
        """The node of this name, made when first heard of."""
        if name not in self.nodes:
            self.nodes[name] = Node(name)
            self.columns.add(name)
        return self.nodes[name]

    # ---- joining and leaving -----------------------------------------------------------------------------------
    def worker_joined(
        self, name: str, address: str, models: tuple[Model, ...], now: float, rates: Rates | None = None, device_bytes: int = 0
    ) -> None:
        """A worker process said hello; a new process has nothing outstanding."""
        node = self.node(name)
        node.rates, node.device_bytes = rates or Rates(), device_bytes
        node.worker_address, node.models, node.worker_here, node.draining = address, models, True, False
        node.dead, node.heard_s, node.load, node.reported = False, now, Load(), 0
        if node.leaves > 1 and now - node.left_s < STEADY_S:
            node.trusted_s = now + min(_FIRST_DOUBT_S * 2.0 ** min(node.leaves - 2, 16), STEADY_S)
            self.columns.trusted_s[self.columns.rows[name]] = node.trusted_s
        self._forget_requests(node)
        self.shapes |= {m.name: m.shape for m in models}
        r = node.rates
        self.columns.describe(name, r.link_bytes_per_s, r.ssd_bytes_per_s, r.blob_bytes_per_s)
        self._changed(node)

    def worker_left(self, name: str, now: float | None = None) -> None:
        """The worker's stream ended; whatever ran there is gone. now: None is when it was last heard of."""
        node = self.node(name)
        if node.worker_here:
            left_s = node.heard_s if now is None else now
            node.leaves = node.leaves + 1 if left_s - node.left_s < STEADY_S else 1
            node.left_s = left_s
        node.worker_here, node.load = False, Load()
        self._forget_requests(node)
        self._changed(node)

    def store_joined(self, name: str, address: str) -> None:
        """A store process said hello."""
        node = self.node(name)
        node.store_address, node.store_here, node.held_number = address, True, 0
        self._changed(node)

    def store_left(self, name: str) -> None:
        """The store's stream ended."""
        node = self.node(name)
        node.store_here = False
        self._changed(node)

    def drain(self, name: str) -> None:
        """The worker takes nothing new; what runs there goes on."""
        node = self.node(name)
        if not node.draining:
            node.draining = True
            self._changed(node)

    def silent(self, now: float) -> list[str]:
        """Nodes that have just become dead. What ran on them is forgotten."""
        found = [n for n in self.nodes.values() if n.worker_here and not n.dead and now - n.heard_s > DEAD_AFTER_S]
        for node in found:
            node.dead, node.load = True, Load()
            self._forget_requests(node)
            self._changed(node)
        return [node.name for node in found]

    def note_states(self, now: float) -> None:
        """Let watchers know of states that have changed because time has passed."""
        for node in self.nodes.values():
            node.known_s = now if node.known_s is None else node.known_s
            state = node.state(now)
            if state != node.shown:
                node.shown = state
                self.version += 1

    @property
    def serving(self) -> int:
        """How many nodes serve."""
        return int(self.columns.serving.sum())

    @property
    def report_every_s(self) -> float:
        """How long workers shall leave between two reports at least, so that a thousand nodes cost this process little."""
        return max(_REPORT_EVERY_S, len(self.nodes) / _REPORTS_PER_S)

    # ---- work --------------------------------------------------------------------------------------------------
    def loaded(self, name: str, load: Load, in_flight: Iterable[str], finished: Iterable[str], now: float, number: int = 0) -> None:
        """Take a worker's report: it is the truth about confirmed requests; young placements may not have arrived yet.

        number: counts the reports of one stream from 1; one that comes again or late changes nothing. 0: not numbered.
        """
        node = self.node(name)
        if number and number <= node.reported:
            return
        node.reported, node.load, node.heard_s, node.dead = number, load, now, False
        for request_id in finished:
            self._ended(node, request_id)
        if load.request_s > 0:
            self.request_s += _WEIGHT * (load.request_s - self.request_s)
        for model, of_model in node.loads.items():
            if of_model.request_s > 0:
                before = self._request_s.get(model, 1.0)
                self._request_s[model] = before + _WEIGHT * (of_model.request_s - before)
        here = set(in_flight)
        for request_id in node.confirmed - here:
            self._ended(node, request_id)
        for request_id in here - node.confirmed:
            self._leave(request_id, but=node)
            node.young.pop(request_id, None)
            node.confirmed.add(request_id)
            self._where[request_id] = name
        for request_id in [r for r, placed in node.young.items() if now - placed.placed_s > UNCONFIRMED_S]:
            self._ended(node, request_id)
        self._changed(node)

    def request_s_of(self, model: str) -> float:
        """The work of a typical request of a model; of any, where nobody has reported one of it."""
        return self._request_s.get(model, self.request_s)

    def serves(self, name: str, model: str, now: float) -> bool:
        """The node serves, and has the model active."""
        node = self.nodes.get(name)
        if node is None or node.state(now) != "serving" or (column := self.columns.models.get(model)) is None:
            return False
        return bool(column.state[self.columns.rows[name]] == ModelState.ACTIVE)

    def placed(self, name: str, request_id: str, now: float, priority: int = 0, model: str = "") -> None:
        """A request for a model goes to this node; one that moves there leaves its former node."""
        node = self.node(name)
        self._leave(request_id)
        placed = node.young[request_id] = Placed(urgency_class(priority), now, self.request_s_of(model))
        self._where[request_id] = name
        self.columns.young(name, placed.urgency, placed.seconds)

    def _leave(self, request_id: str, but: Node | None = None) -> None:
        name = self._where.get(request_id)
        if name is not None and (but is None or name != but.name):
            former = self.nodes[name]
            self._ended(former, request_id)
            self._changed(former, seen=False)

    def _ended(self, node: Node, request_id: str) -> None:
        if request_id in node.confirmed or request_id in node.young:
            node.confirmed.discard(request_id)
            node.young.pop(request_id, None)
            del self._where[request_id]

    def _forget_requests(self, node: Node) -> None:
        for request_id in node.outstanding:
            self._ended(node, request_id)

    def _changed(self, node: Node, *, seen: bool = True) -> None:
        node.was_whole |= node.worker_here and node.store_here
        young: dict[int, float] = {}
        for placed in node.young.values():
            young[placed.urgency] = young.get(placed.urgency, 0.0) + placed.seconds
        stalled = node.load.stalled_s > STALLED_AFTER_S
        self.columns.report(node.name, node.serving, node.heard_s, node.load.seconds, young, node.loads, stalled=stalled)
        self.version += seen

    def work_s(self, name: str) -> float:
        """A node's outstanding work in seconds: what the worker reports, and what was placed since."""
        node = self.nodes[name]
        return sum(node.load.seconds.values()) + sum(placed.seconds for placed in node.young.values())

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        seen: set[str] = set()
        for node in self.nodes.values():
            assert not seen & node.outstanding, "a request is outstanding on two nodes"
            seen |= node.outstanding
            assert not node.confirmed & node.young.keys(), f"{node.name}: confirmed and young at once"
            assert not node.serving or (node.worker_here and node.store_here)
            assert all(self._where[r] == node.name for r in node.outstanding)
            work_s = self.columns.work_s(node.name)
            assert abs(work_s - self.work_s(node.name)) <= 1e-6 * max(1.0, work_s), f"{node.name}: the columns say {work_s} s"
        assert seen == self._where.keys()
        self.columns.validate(self.nodes)
