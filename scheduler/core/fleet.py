"""What the scheduler knows of its nodes and their devices: soft state, rebuilt from their reports.

Work is placed on devices; what a store holds belongs to its node (docs/design/0028). What a device's life is: `core.device`. One
worker's end leaves its node's other devices and the store in service; the store's end takes all of them, until it is back; what a node
holds cannot be had from it when its store has left, or when nothing is heard of any of its workers.

Invariants (checked by `validate`):
- A request is outstanding on exactly one device.
- A device that has no worker, or whose node has no store, is not serving.
- The columns say what the devices say.
"""

from __future__ import annotations

from collections.abc import Iterable

from contracts.devices import device_name, node_of, number_of
from contracts.kv import KvShape
from contracts.models import ModelState
from scheduler.core.columns import Columns, urgency_class
from scheduler.core.device import STALLED_AFTER_S, Device, Node, Placed
from scheduler.core.device import Load as Load
from scheduler.core.device import Model as Model
from scheduler.core.device import Rates as Rates

#: A device that has not reported for this long is as good as gone, whatever its connections say, in seconds.
DEAD_AFTER_S = 15.0
#: A placement that no worker report has confirmed within this time is forgotten, in seconds.
UNCONFIRMED_S = 10.0
_WEIGHT = 0.1
#: A device that leaves again within this time of having left before is unsteady. At its second return it is suspect for
#: `_FIRST_DOUBT_S`, then for twice as long each time, up to this time, in seconds.
STEADY_S, _FIRST_DOUBT_S = 30.0, 1.0
#: Reports of all workers together that this process takes in a second; none is asked for more than ten.
_REPORTS_PER_S, _REPORT_EVERY_S = 1000.0, 0.1


class Fleet:
    """All nodes and devices, by name, and how much work a request is. Mutated by events; `columns` is kept to what the devices say."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.devices: dict[str, Device] = {}
        self.columns = Columns()
        #: How the KV of each model is laid out.
        self.shapes: dict[str, KvShape] = {}
        #: The work of a typical request in seconds, of any model and by model: a running mean of what workers report.
        self.request_s = 1.0
        self._request_s: dict[str, float] = {}
        #: Models of the configuration: one that no device has is not active, and not unknown.
        self.registered: frozenset[str] = frozenset()
        #: Grows with every change that a watcher wants to know.
        self.version = 0
        self._where: dict[str, str] = {}  #: by outstanding request: its device

    def node(self, name: str) -> Node:
        """The node of this name; when first heard of, it is made with one device."""
        if name not in self.nodes:
            self.add(name)
        return self.nodes[name]

    def device(self, name: str) -> Device:
        """The device of this name, made when first heard of, as its node is."""
        if name not in self.devices:
            node = self.nodes.setdefault(node_of(name), Node(node_of(name)))
            device = self.devices[name] = Device(name, node)
            node.devices = sorted([*node.devices, device], key=lambda one: number_of(one.name))
            self.columns.add(name)
        return self.devices[name]

    def add(self, node: str, devices: int = 1) -> None:
        """A node and its devices are known from now on, those included that have not come yet."""
        for number in range(devices):
            self.device(device_name(node, number, devices))

    # ---- joining and leaving -----------------------------------------------------------------------------------
    def worker_joined(
        self, name: str, address: str, models: tuple[Model, ...], now: float, rates: Rates | None = None, device_bytes: int = 0
    ) -> None:
        """A device's worker said hello; a new process has nothing outstanding."""
        device = self.device(name)
        device.node.rates, device.device_bytes = rates or Rates(), device_bytes
        device.worker_address, device.models, device.worker_here, device.draining = address, models, True, False
        device.dead, device.heard_s, device.load, device.reported = False, now, Load(), 0
        if device.leaves > 1 and now - device.left_s < STEADY_S:
            device.trusted_s = now + min(_FIRST_DOUBT_S * 2.0 ** min(device.leaves - 2, 16), STEADY_S)
            self.columns.trusted_s[self.columns.rows[name]] = device.trusted_s
        self._forget_requests(device)
        self.shapes |= {m.name: m.shape for m in models}
        r = device.node.rates
        self.columns.describe(device.node.name, r.link_bytes_per_s, r.ssd_bytes_per_s, r.blob_bytes_per_s)
        self._changed(device)

    def worker_left(self, name: str, now: float | None = None) -> None:
        """The worker's stream ended; whatever ran there is gone. now: None is when it was last heard of."""
        device = self.device(name)
        if device.worker_here:
            left_s = device.heard_s if now is None else now
            device.leaves = device.leaves + 1 if left_s - device.left_s < STEADY_S else 1
            device.left_s = left_s
        device.worker_here, device.load = False, Load()
        self._forget_requests(device)
        self._changed(device)

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

    def drain(self, name: str) -> None:
        """The device's worker takes nothing new; what runs there goes on."""
        device = self.device(name)
        if not device.draining:
            device.draining = True
            self._changed(device)

    def silent(self, now: float) -> list[str]:
        """Let devices die of which nothing was heard for too long; what ran on them is forgotten. The nodes of which nothing is heard any
        more since then."""
        died = [d for d in self.devices.values() if d.worker_here and not d.dead and now - d.heard_s > DEAD_AFTER_S]
        for device in died:
            device.dead, device.load = True, Load()
            self._forget_requests(device)
            self._changed(device)
        return [name for name in dict.fromkeys(device.node.name for device in died) if self.nodes[name].silent]

    def note_states(self, now: float) -> None:
        """Let watchers know of states that have changed because time has passed."""
        for device in self.devices.values():
            device.known_s = now if device.known_s is None else device.known_s
            state = device.state(now)
            if state != device.shown:
                device.shown = state
                self.version += 1

    @property
    def serving(self) -> int:
        """How many devices serve."""
        return int(self.columns.serving.sum())

    @property
    def report_every_s(self) -> float:
        """How long workers shall leave between two reports at least, so that a thousand of them cost this process little."""
        return max(_REPORT_EVERY_S, len(self.devices) / _REPORTS_PER_S)

    # ---- work --------------------------------------------------------------------------------------------------
    def loaded(self, name: str, load: Load, in_flight: Iterable[str], finished: Iterable[str], now: float, number: int = 0) -> None:
        """Take a worker's report: it is the truth about confirmed requests; young placements may not have arrived yet.

        number: counts the reports of one stream from 1; one that comes again or late changes nothing. 0: not numbered.
        """
        device = self.device(name)
        if number and number <= device.reported:
            return
        device.reported, device.load, device.heard_s, device.dead = number, load, now, False
        for request_id in finished:
            self._ended(device, request_id)
        if load.request_s > 0:
            self.request_s += _WEIGHT * (load.request_s - self.request_s)
        for model, of_model in device.loads.items():
            if of_model.request_s > 0:
                before = self._request_s.get(model, 1.0)
                self._request_s[model] = before + _WEIGHT * (of_model.request_s - before)
        here = set(in_flight)
        for request_id in device.confirmed - here:
            self._ended(device, request_id)
        for request_id in here - device.confirmed:
            self._leave(request_id, but=device)
            device.young.pop(request_id, None)
            device.confirmed.add(request_id)
            self._where[request_id] = name
        for request_id in [r for r, placed in device.young.items() if now - placed.placed_s > UNCONFIRMED_S]:
            self._ended(device, request_id)
        self._changed(device)

    def request_s_of(self, model: str) -> float:
        """The work of a typical request of a model; of any, where nobody has reported one of it."""
        return self._request_s.get(model, self.request_s)

    def serves(self, name: str, model: str, now: float) -> bool:
        """The device serves, and has the model active."""
        device = self.devices.get(name)
        if device is None or device.state(now) != "serving" or (column := self.columns.models.get(model)) is None:
            return False
        return bool(column.state[self.columns.rows[name]] == ModelState.ACTIVE)

    def placed(self, name: str, request_id: str, now: float, priority: int = 0, model: str = "") -> None:
        """A request for a model goes to this device; one that moves there leaves its former one."""
        device = self.device(name)
        self._leave(request_id)
        placed = device.young[request_id] = Placed(urgency_class(priority), now, self.request_s_of(model))
        self._where[request_id] = name
        self.columns.young(name, placed.urgency, placed.seconds)

    def where(self, request_id: str) -> str:
        """The device that has this request, as far as is known; empty: none."""
        return self._where.get(request_id, "")

    def _leave(self, request_id: str, but: Device | None = None) -> None:
        name = self._where.get(request_id)
        if name is not None and (but is None or name != but.name):
            former = self.devices[name]
            self._ended(former, request_id)
            self._changed(former, seen=False)

    def _ended(self, device: Device, request_id: str) -> None:
        if request_id in device.confirmed or request_id in device.young:
            device.confirmed.discard(request_id)
            device.young.pop(request_id, None)
            del self._where[request_id]

    def _forget_requests(self, device: Device) -> None:
        for request_id in device.outstanding:
            self._ended(device, request_id)

    def _changed(self, device: Device, *, seen: bool = True) -> None:
        device.was_whole |= device.worker_here and device.node.store_here
        young: dict[int, float] = {}
        for placed in device.young.values():
            young[placed.urgency] = young.get(placed.urgency, 0.0) + placed.seconds
        stalled = device.load.stalled_s > STALLED_AFTER_S
        self.columns.report(device.name, device.serving, device.heard_s, device.load.seconds, young, device.loads, stalled=stalled)
        self.version += seen

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        seen: set[str] = set()
        for device in self.devices.values():
            assert not seen & device.outstanding, "a request is outstanding on two devices"
            seen |= device.outstanding
            assert not device.confirmed & device.young.keys(), f"{device.name}: confirmed and young at once"
            assert not device.serving or (device.worker_here and device.node.store_here)
            assert all(self._where[r] == device.name for r in device.outstanding)
            work_s = self.columns.work_s(device.name)
            assert abs(work_s - device.work_s) <= 1e-6 * max(1.0, work_s), f"{device.name}: the columns say {work_s} s"
        assert seen == self._where.keys()
        self.columns.validate(self.devices)
        by_node = [device.name for node in self.nodes.values() for device in node.devices]
        assert sorted(by_node) == sorted(self.devices) and all(node_of(name) in self.nodes for name in by_node)
