"""What the scheduler knows of its nodes: soft state, rebuilt from their reports.

Invariants (checked by `validate`):
- A request is outstanding on exactly one node.
- A node that has no worker or no store attached is not serving.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.kv import KvShape

#: A node that has not reported for this long gets no new work while others can take it, in seconds.
SUSPECT_AFTER_S = 3.0
#: Between two nodes or a slow tier and DRAM, bytes a second, where nobody has measured: the order of a 10 Gbit/s link.
LINK_BYTES_PER_S = 1e9
#: A placement that no worker report has confirmed within this time is forgotten, in seconds.
UNCONFIRMED_S = 10.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a worker serves."""

    name: str
    shape: KvShape
    max_tokens: int
    created_s: int


@dataclass(slots=True)
class Load:
    """A worker's last report.

    outstanding_tokens: prompt tokens to compute plus tokens still to generate; outstanding_s: the time that takes by the
    worker's own measurements. request_s: the work of a typical request there, 0 when it has not seen any.
    """

    running: int = 0
    waiting: int = 0
    outstanding_tokens: float = 0.0
    outstanding_s: float = 0.0
    request_s: float = 0.0
    hbm_pages_total: int = 0
    hbm_pages_free: int = 0


@dataclass(slots=True)
class Node:
    """One node: a worker and a store."""

    name: str
    worker_address: str = ""
    store_address: str = ""
    models: tuple[Model, ...] = ()
    #: How fast KV comes here from elsewhere.
    link_bytes_per_s: float = LINK_BYTES_PER_S
    load: Load = field(default_factory=Load)
    #: request id -> time of its placement; the node's outstanding work.
    outstanding: dict[str, float] = field(default_factory=dict)
    #: request ids the worker has confirmed.
    confirmed: set[str] = field(default_factory=set)
    worker_here: bool = False
    store_here: bool = False
    draining: bool = False
    heard_s: float = 0.0
    dram_bytes_total: int = 0
    dram_bytes_used: int = 0
    ssd_bytes_used: int = 0
    #: What its processes last said of themselves, by Prometheus sample; for people, not for decisions.
    worker_metrics: dict[str, float] = field(default_factory=dict)
    store_metrics: dict[str, float] = field(default_factory=dict)

    def work_s(self, request_s: float) -> float:
        """Outstanding work in seconds: what the worker reports, and what was placed since and takes `request_s` each."""
        return self.load.outstanding_s + len(self.outstanding.keys() - self.confirmed) * request_s

    @property
    def serving(self) -> bool:
        """Both processes are here and the worker takes work."""
        return self.worker_here and self.store_here and not self.draining


class Fleet:
    """All nodes, and how much work a request is."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        #: The work of a typical request in seconds: a running mean of what workers report.
        self.request_s = 1.0
        #: Grows with every change that a watcher wants to know.
        self.version = 0

    def node(self, name: str) -> Node:
        """The node of this name, made when first heard of."""
        if name not in self.nodes:
            self.nodes[name] = Node(name)
        return self.nodes[name]

    def worker_joined(self, name: str, address: str, models: tuple[Model, ...], now: float, link_bytes_per_s: float = 0.0) -> None:
        """A worker process said hello; a new process has nothing outstanding. link_bytes_per_s: 0 when it was not measured."""
        node = self.node(name)
        node.link_bytes_per_s = link_bytes_per_s if link_bytes_per_s > 0 else LINK_BYTES_PER_S
        node.worker_address, node.models, node.worker_here, node.draining, node.heard_s = address, models, True, False, now
        node.outstanding.clear()
        node.confirmed.clear()
        self.version += 1

    def worker_left(self, name: str) -> None:
        """The worker's stream ended; whatever ran there is gone."""
        node = self.node(name)
        node.worker_here = False
        node.outstanding.clear()
        node.confirmed.clear()
        node.load = Load()
        self.version += 1

    def store_joined(self, name: str, address: str) -> None:
        """A store process said hello."""
        node = self.node(name)
        node.store_address, node.store_here = address, True
        self.version += 1

    def store_left(self, name: str) -> None:
        """The store's stream ended."""
        self.node(name).store_here = False
        self.version += 1

    def loaded(self, name: str, load: Load, in_flight: list[str], finished: list[str], now: float) -> None:
        """Take a worker's report: it is the truth about confirmed requests; young placements may not have arrived yet."""
        node = self.node(name)
        node.load, node.heard_s = load, now
        for request_id in finished:
            node.outstanding.pop(request_id, None)
            node.confirmed.discard(request_id)
        if load.request_s > 0:
            self.request_s += 0.1 * (load.request_s - self.request_s)
        here = set(in_flight)
        for request_id in here:
            node.outstanding.setdefault(request_id, now)
        for request_id, placed in list(node.outstanding.items()):
            if request_id not in here and (request_id in node.confirmed or now - placed > UNCONFIRMED_S):
                del node.outstanding[request_id]
        node.confirmed = here
        self.version += 1

    def placed(self, name: str, request_id: str, now: float) -> None:
        """A request goes to this node; one that moves there leaves its former node."""
        for other in self.nodes.values():
            other.outstanding.pop(request_id, None)
            other.confirmed.discard(request_id)
        self.node(name).outstanding[request_id] = now

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        seen: set[str] = set()
        for node in self.nodes.values():
            assert not seen & node.outstanding.keys(), "a request is outstanding on two nodes"
            seen |= node.outstanding.keys()
            assert node.confirmed <= node.outstanding.keys(), f"{node.name}: confirmed but not outstanding"
            assert not node.serving or (node.worker_here and node.store_here)
