"""The scheduler's nodes and devices: soft state, rebuilt from their reports.

Work is placed on devices; what a store holds belongs to its node (docs/design/0028). The states of a device are in
`core.device`. When a worker leaves, its node's other devices and the store stay in service. When a store leaves, all
devices of its node stop serving until it is back. A node is no source of cache while its store is away or none of its
workers reports.

Invariants (checked by `validate`):
- A request is outstanding on exactly one device.
- A device without a worker, or whose node has no store, is not serving.
- `columns` agrees with the devices.
"""

from __future__ import annotations

from collections.abc import Iterable

from contracts.devices import device_name, node_of, number_of
from contracts.kv import KvShape
from contracts.models import ModelState, ModelWire
from scheduler.core.columns import Columns, urgency_class
from scheduler.core.device import STALLED_AFTER_S, Device, Node, Placed
from scheduler.core.device import LoadReport as LoadReport
from scheduler.core.device import Model as Model
from scheduler.core.device import Rates as Rates
from scheduler.core.recent import Recent

#: A device that has not reported for this long counts as dead, even while connected, in seconds.
DEAD_AFTER_S = 15.0
#: A placement that no worker report has confirmed within this time is forgotten, in seconds.
UNCONFIRMED_S = 10.0
#: Weight of a new report in the running mean of a request's work.
_WEIGHT = 0.1
#: A device that leaves twice within `STEADY_S` is suspect for `_FIRST_DOUBT_S` after its return, then for twice as long
#: each time, up to `STEADY_S`, in seconds.
STEADY_S, _FIRST_DOUBT_S = 30.0, 1.0
#: Time over which the rate of arriving work is taken, in seconds.
ARRIVED_S = 60.0
#: Reports a second of all workers together, and the shortest time between two of one worker.
_REPORTS_PER_S, _REPORT_EVERY_S = 1000.0, 0.1


class Fleet:
    """All nodes and devices by name, their outstanding requests, and the typical work of a request."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.devices: dict[str, Device] = {}
        self.columns = Columns()
        #: By model.
        self.shapes: dict[str, KvShape] = {}
        #: Seconds of work of a typical request, of any model and by model: a running mean of the workers' reports.
        self.request_s = 1.0
        self._request_s: dict[str, float] = {}
        #: Configured models. One that no device has is inactive, not unknown.
        self.registered: frozenset[str] = frozenset()
        #: Grows with every change that watchers must see.
        self.version = 0
        self._where: dict[str, str] = {}  #: outstanding request to its device
        #: Seconds of work by model of requests that workers reported for the first time; empty: of an unknown model.
        self.arrived: Recent[str] = Recent(ARRIVED_S, ARRIVED_S / 12)

    @property
    def current(self) -> list[Device]:
        """The devices of nodes that have not left."""
        return [device for device in list(self.devices.values()) if not device.node.gone]

    def node(self, name: str) -> Node:
        """The node of this name; a new one is created with one device."""
        if name not in self.nodes:
            self.add(name)
        return self.nodes[name]

    def device(self, name: str) -> Device:
        """The device of this name; created, with its node, if it is new."""
        if name not in self.devices:
            node = self.nodes.setdefault(node_of(name), Node(node_of(name)))
            device = self.devices[name] = Device(name, node)
            node.devices = sorted([*node.devices, device], key=lambda one: number_of(one.name))
            self.columns.add(name)
        return self.devices[name]

    def add(self, node: str, devices: int = 1) -> None:
        """Create a node and all its devices, including those that have not joined yet."""
        for number in range(devices):
            self.device(device_name(node, number, devices))
        self.nodes[node].gone = False

    # ---- joining and leaving -----------------------------------------------------------------------------------
    def worker_joined(
        self,
        name: str,
        address: str,
        models: tuple[Model, ...],
        now: float,
        rates: Rates | None = None,
        device_bytes: int = 0,
    ) -> None:
        """A device's worker said hello. Its requests are forgotten until it reports them."""
        device = self.device(name)
        device.node.rates, device.device_bytes = rates or Rates(), device_bytes
        device.worker_address, device.models, device.worker_here, device.draining = address, models, True, False
        device.moves = {}
        device.dead, device.heard_s, device.load, device.reported = False, now, LoadReport(), 0
        if device.leaves > 1 and now - device.left_s < STEADY_S:
            device.trusted_s = now + min(_FIRST_DOUBT_S * 2.0 ** min(device.leaves - 2, 16), STEADY_S)
            self.columns.trusted_s[self.columns.rows[name]] = device.trusted_s
        self._forget_requests(device)
        self.shapes |= {m.name: m.shape for m in models}
        r = device.node.rates
        self.columns.describe(device.node.name, r.link_bytes_per_s, r.ssd_bytes_per_s, r.blob_bytes_per_s)
        self._changed(device)

    def worker_left(self, name: str, now: float | None = None) -> None:
        """The worker's stream ended; its requests are lost. now: None stands for the time of its last report."""
        device = self.device(name)
        if device.worker_here:
            left_s = device.heard_s if now is None else now
            device.leaves = device.leaves + 1 if left_s - device.left_s < STEADY_S else 1
            device.left_s = left_s
        device.worker_here, device.load = False, LoadReport()
        self._forget_requests(device)
        self._changed(device)

    def wires(self, but: str) -> dict[str, ModelWire]:
        """By model: how requests reach it on the devices that are here, except the device `but`."""
        here = [device for name, device in self.devices.items() if name != but and device.worker_here]
        return {m.name: m.wire for device in here for m in device.models}

    def store_joined(self, name: str, address: str) -> None:
        """A node's store said hello."""
        node = self.node(name)
        node.store_address, node.store_here, node.held_number = address, True, 0
        for device in node.devices:
            self._changed(device)

    def store_left(self, name: str) -> None:
        """The store's stream ended."""
        node = self.node(name)
        node.store_here = False
        for device in node.devices:
            self._changed(device)

    def forget(self, name: str) -> None:
        """The node has left for good: watchers see it no more. Its devices stay known, without work, until it says
        hello again."""
        node = self.nodes.get(name)
        if node is None:
            return
        node.gone = True
        for device in node.devices:
            device.was_whole, device.known_s = False, None
            self._changed(device)

    def drain(self, name: str) -> None:
        """The device's worker takes no new requests; running ones go on."""
        device = self.device(name)
        if not device.draining:
            device.draining = True
            self._changed(device)

    def silent(self, now: float) -> list[str]:
        """Declare devices dead that have not reported for `DEAD_AFTER_S`, and forget their requests.

        Returns the nodes whose last reporting device died.
        """
        died = [d for d in self.devices.values() if d.worker_here and not d.dead and now - d.heard_s > DEAD_AFTER_S]
        for device in died:
            device.dead, device.load = True, LoadReport()
            self._forget_requests(device)
            self._changed(device)
        return [name for name in dict.fromkeys(device.node.name for device in died) if self.nodes[name].silent]

    def note_states(self, now: float) -> None:
        """Update `version` for states that have changed with time alone."""
        for device in self.devices.values():
            device.known_s = now if device.known_s is None else device.known_s
            state = device.state(now)
            if state != device.shown:
                device.shown = state
                self.version += 1

    @property
    def serving(self) -> int:
        """Number of devices that serve."""
        return int(self.columns.serving.sum())

    @property
    def report_every_s(self) -> float:
        """Shortest time between two reports of one worker; longer in large fleets, to limit this process's load."""
        return max(_REPORT_EVERY_S, len(self.devices) / _REPORTS_PER_S)

    # ---- work --------------------------------------------------------------------------------------------------
    def loaded(
        self,
        name: str,
        load: LoadReport,
        in_flight: Iterable[str],
        finished: Iterable[str],
        now: float,
        number: int = 0,
    ) -> None:
        """Take a worker's report. It replaces what is known of confirmed requests; unconfirmed placements may still be
        on their way.

        number: position in the stream, from 1; a repeated or late report is ignored. 0: not numbered.
        """
        device = self.device(name)
        if number and number <= device.reported:
            return
        device.reported, device.load, device.heard_s, device.dead = number, load, now, False
        here, finished = set(in_flight), list(finished)
        arrived = [
            device.model_of(request_id) for request_id in here.union(finished) if request_id not in device.confirmed
        ]
        for request_id in finished:
            self._ended(device, request_id)
        if load.request_s > 0:
            self.request_s += _WEIGHT * (load.request_s - self.request_s)
        for model, of_model in device.loads.items():
            if of_model.request_s > 0:
                before = self._request_s.get(model, 1.0)
                self._request_s[model] = before + _WEIGHT * (of_model.request_s - before)
        for model in arrived:
            self.arrived.add(model, self.request_s_of(model), now)
        for request_id in device.confirmed - here:
            self._ended(device, request_id)
        for request_id in here - device.confirmed:
            self._leave(request_id, but=device)
            device.unconfirmed.pop(request_id, None)
            device.confirmed.add(request_id)
            self._where[request_id] = name
        for request_id in [r for r, placed in device.unconfirmed.items() if now - placed.placed_s > UNCONFIRMED_S]:
            self._ended(device, request_id)
        self._changed(device)

    def request_s_of(self, model: str) -> float:
        """Seconds of work of a typical request of this model; of any model if none was reported."""
        return self._request_s.get(model, self.request_s)

    def serves(self, name: str, model: str, now: float) -> bool:
        """Whether the device serves, and requests for the model may go to it."""
        device = self.devices.get(name)
        if device is None or device.state(now) != "serving" or (column := self.columns.models.get(model)) is None:
            return False
        return bool(column.serves(self.columns.rows[name]))

    def is_cold(self, name: str, model: str) -> bool:
        """Whether the device serves the model and its weights are not there."""
        column, row = self.columns.models.get(model), self.columns.rows.get(name)
        return column is not None and row is not None and column.state[row] == ModelState.COLD

    def placed(self, name: str, request_id: str, now: float, priority: int = 0, model: str = "") -> None:
        """Count a request as outstanding on this device, and no longer on its former one."""
        device = self.device(name)
        self._leave(request_id)
        placed = device.unconfirmed[request_id] = Placed(urgency_class(priority), now, self.request_s_of(model), model)
        self._where[request_id] = name
        if self.is_cold(name, model):
            self._changed(device, seen=False)
        else:
            self.columns.add_unconfirmed(name, placed.urgency, placed.seconds)

    def where(self, request_id: str) -> str:
        """The device that has this request; empty: not known."""
        return self._where.get(request_id, "")

    def _leave(self, request_id: str, but: Device | None = None) -> None:
        name = self._where.get(request_id)
        if name is not None and (but is None or name != but.name):
            former = self.devices[name]
            self._ended(former, request_id)
            self._changed(former, seen=False)

    def _ended(self, device: Device, request_id: str) -> None:
        if request_id in device.confirmed or request_id in device.unconfirmed:
            device.confirmed.discard(request_id)
            device.unconfirmed.pop(request_id, None)
            del self._where[request_id]

    def _forget_requests(self, device: Device) -> None:
        for request_id in device.outstanding:
            self._ended(device, request_id)

    def _changed(self, device: Device, *, seen: bool = True) -> None:
        device.was_whole |= device.worker_here and device.node.store_here
        unconfirmed: dict[int, float] = {}
        for placed in device.unconfirmed.values():
            unconfirmed[placed.urgency] = unconfirmed.get(placed.urgency, 0.0) + placed.seconds
        stalled = device.load.stalled_s > STALLED_AFTER_S
        self.columns.report(
            device.name, device.serving, device.heard_s, device.load.seconds, unconfirmed, device.loads, stalled=stalled
        )
        self.version += seen

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        seen: set[str] = set()
        for device in self.devices.values():
            assert not seen & device.outstanding, "a request is outstanding on two devices"
            seen |= device.outstanding
            assert not device.confirmed & device.unconfirmed.keys(), f"{device.name}: confirmed and unconfirmed at once"
            assert not device.serving or (device.worker_here and device.node.store_here)
            assert all(self._where[r] == device.name for r in device.outstanding)
            work_s = self.columns.work_s(device.name)
            assert abs(work_s - device.work_s) <= 1e-6 * max(1.0, work_s), f"{device.name}: the columns say {work_s} s"
        assert seen == self._where.keys()
        self.columns.validate(self.devices)
        by_node = [device.name for node in self.nodes.values() for device in node.devices]
        assert sorted(by_node) == sorted(self.devices) and all(node_of(name) in self.nodes for name in by_node)
