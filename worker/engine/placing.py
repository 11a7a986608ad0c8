"""Executes a device's `worker.core.residency`: maps and unmaps weights, and has them copied. On the device's thread."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from contracts.models import ModelState
from runtime import telemetry
from runtime.clock import Clock, RealClock
from worker.core.granules import OutOfGranules
from worker.core.remap import Circulate
from worker.core.residency import Load, Residency
from worker.core.resident import Expected
from worker.engine import failpoints
from worker.models.circulating import Circulation, Mark, no_mark
from worker.models.filling import Copy, Filling, host_copy
from worker.models.image import HostImage
from worker.models.load import Model
from worker.models.other_links import OtherLinks

log = telemetry.logger("worker.engine.placing")


@dataclass(frozen=True, slots=True)
class Placed:
    """A model, and its image in host memory; None: it is packed from the checkpoint each time."""

    model: Model
    image: HostImage | None


@dataclass(slots=True)
class Placing:
    """See the module. copy: from host memory to the device. mark: of the device's queued work. threads: that copy a
    model's weights. others: links of other devices that loads may use."""

    residency: Residency
    models: Mapping[str, Placed]
    copy: Copy = host_copy
    mark: Mark = no_mark
    threads: int = 1
    others: OtherLinks = field(default_factory=OtherLinks)
    clock: Clock = field(default_factory=RealClock)
    #: Wakes the device's thread. Any thread.
    woken: Callable[[], object] = lambda: None
    _expected: queue.SimpleQueue[tuple[str, Expected]] = field(default_factory=queue.SimpleQueue)
    _spared: queue.SimpleQueue[tuple[str, float]] = field(default_factory=queue.SimpleQueue)
    #: Called when a model's state has changed.
    on_moves: Callable[[], object] = lambda: None
    _fillings: dict[str, Filling] = field(default_factory=dict)
    #: Layers that take turns, of models that have lent some.
    circulations: dict[str, Circulation] = field(default_factory=dict)

    def expect(self, name: str, arrival_s: float, expires_s: float, moves: bool = False) -> None:
        """A request for this model is expected, at times from now. moves: see `Expected`. Unknown models are ignored.
        Any thread."""
        now = self.clock.now()
        if name in self.models:
            self._expected.put((name, Expected(now + arrival_s, now + expires_s, moves)))
            self.woken()

    def spare(self, name: str, expires_s: float) -> None:
        """For so long from now, requests for this model go elsewhere. Unknown models are ignored. Any thread."""
        if name in self.models:
            self._spared.put((name, self.clock.now() + expires_s))
            self.woken()

    def turn(self, make_way: Callable[[], None]) -> None:
        """Take note of weights that have come, decide, and execute. make_way: unmaps what engines have given up."""
        while not self._expected.empty():
            self.residency.expect(*self._expected.get())
        while not self._spared.empty():
            self.residency.spare(*self._spared.get())
        for name, filling in list(self._fillings.items()):
            self._note(name, filling)
        for resident in self.residency.models.values():
            if resident.state is ModelState.COLD and resident.core.live:
                failpoints.reach("model.waiting")
            elif resident.state is ModelState.DRAINING:
                failpoints.reach("model.draining")
        self.residency.tick(self.clock.now())
        self.execute(make_way)

    def execute(self, make_way: Callable[[], None]) -> None:
        """Execute the residency's instructions."""
        for instruction in self.residency.take():
            placed = self.models[instruction.name]
            if isinstance(instruction, Load):
                make_way()
                self._load(instruction.name, placed)
            elif isinstance(instruction, Circulate):
                make_way()
                self._circulate(instruction, placed)
                continue
            else:
                self._unload(instruction.name, placed)
            self.on_moves()

    def stop(self) -> None:
        """End the copies."""
        for filling in self._fillings.values():
            filling.cancel()
        for circulation in self.circulations.values():
            circulation.close()

    def _load(self, name: str, placed: Placed) -> None:
        model = placed.model
        try:
            model.take()
        except OutOfGranules:
            log.exception("no memory for weights that was counted", model=name)
            self.residency.failed(name, self.clock.now())
            return
        filling = self._fillings[name] = Filling(
            model.spans, placed.image, self.woken, copy=self._copy, threads=self.threads, others=self.others
        )
        model.layers.before_use = functools.partial(_use, filling)
        failpoints.reach("model.loading")
        mib, image = round(filling.bytes / 2**20), placed.image is not None
        log.info("activating", model=name, mib=mib, image=image, **self._reason(name, ModelState.LOADING))

    def _unload(self, name: str, placed: Placed) -> None:
        if (filling := self._fillings.pop(name, None)) is not None:
            filling.cancel()
        placed.model.layers.before_use = lambda layer: None
        failpoints.reach("model.unloading")
        if (circulation := self.circulations.get(name)) is not None:
            circulation.leave()
        placed.model.unload()
        log.info("evicted", model=name, **self._reason(name, ModelState.COLD))

    def _reason(self, name: str, state: ModelState) -> dict[str, str]:
        """Why the model last entered this state, and the model for which it did."""
        moves = self.residency.models[name].moves
        last = next((move for move in reversed(moves) if move.state is state), None)
        if last is None:
            return {}
        return {"why": last.why.value} | ({"other": last.other} if last.other else {})

    def _circulate(self, instruction: Circulate, placed: Placed) -> None:
        name, lent = instruction.name, instruction.lent
        if (circulation := self.circulations.get(name)) is None:
            assert placed.image is not None, f"{name}: only weights with an image lend"
            circulation = self.circulations[name] = Circulation(placed.model, placed.image, self._copy, self.mark)
        failpoints.reach("model.circulating")
        circulation.change(lent, instruction.slots)
        log.info("lends", model=name, layers=lent, slots=instruction.slots)

    def _copy(self, to: int, source: int, bytes_: int) -> None:
        failpoints.reach("model.piece")
        self.copy(to, source, bytes_)

    def _note(self, name: str, filling: Filling) -> None:
        layers = len(filling) - 1
        if filling.failed is not None:
            del self._fillings[name]
            filling.cancel()
            self.residency.failed(name, self.clock.now())
        elif filling.over:
            del self._fillings[name]
            self.models[name].model.layers.before_use = lambda layer: None
            self.residency.landed(name, layers, filling.span_s, self.clock.now())
            failpoints.reach("model.active")
            mib = [round(carried / 2**20) for carried in filling.carried]
            log.info("active", model=name, seconds=round(filling.seconds, 3), mib_by_link=mib)
            self.on_moves()
        elif filling.layerwise:
            self.residency.landed(name, max(filling.ready - 1, 0), filling.span_s, self.clock.now())


def _use(filling: Filling, layer: int) -> None:
    """A step uses this layer next."""
    if not filling.over:
        failpoints.reach("model.layerwise")
    filling.wait(layer + 1)
