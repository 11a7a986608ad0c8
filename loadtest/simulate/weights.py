"""Weights that come and go in virtual time: carries out what `worker.core.residency` says. Decides nothing.

Copies share the bus with KV, which goes first; a model's layers come in order. Copies of layers that take turns
(`circulating`) do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.simulate.channels import Channel, Job
from loadtest.simulate.circulating import CirculatingCosts
from loadtest.simulate.events import Events
from loadtest.simulate.shared_kind import SharedKind, SharedModel
from worker.core.remap import Circulate
from worker.core.residency import Load, Residency

#: Behind KV that a request waits for, before that of hints.
_KEY = (0, 1)


@dataclass(slots=True, eq=False)
class _Filling:
    """A model's weights on their way. ready: layers that are here. follow: called when all are."""

    began_s: float
    layers: int
    ready: int = 0
    jobs: list[Job] = field(default_factory=list)
    follow: list[Callable[[], None]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether all layers are here."""
        return self.ready == self.layers


@dataclass(slots=True)
class Weights:
    """See the module. memory: called with the granules that are mapped, or with a minus unmapped; it checks that there
    are so many. woken: something has come."""

    events: Events
    kind: SharedKind
    residency: Residency
    bus: Channel
    memory: Callable[[int], None]
    woken: Callable[[], None]
    #: Costs of models that may lend layers.
    lenders: Mapping[str, CirculatingCosts] = field(default_factory=dict)
    #: Copies of layers that have come back to their own places, or into a slot when a model's lending changed.
    moved: int = 0
    _models: Mapping[str, SharedModel] = field(init=False)
    _fillings: dict[str, _Filling] = field(default_factory=dict)
    #: Layers on their way after a change of a model's lending.
    _returns: dict[str, _Filling] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._models = {model.name: model for model in self.kind.models}

    def turn(self, make_way: Callable[[], None]) -> float:
        """Note what has come, let the residency decide, and carry that out. Returns the seconds that this takes the
        device."""
        for name, filling in list(self._fillings.items()):
            if filling.ready:
                seconds = self.events.now - filling.began_s
                self.residency.landed(name, filling.ready, seconds / filling.ready, self.events.now)
            if filling.over:
                del self._fillings[name]
        self.residency.tick(self.events.now)
        return self.execute(make_way)

    def execute(self, make_way: Callable[[], None]) -> float:
        """Carry out the residency's instructions. Returns seconds of the device."""
        seconds = 0.0
        for instruction in self.residency.take():
            model = self._models[instruction.name]
            if isinstance(instruction, Load):
                make_way()
                self.memory(model.granules)
                self._load(model)
            elif isinstance(instruction, Circulate):
                seconds += self._circulate(model, make_way)
            else:
                for coming in (self._fillings, self._returns):
                    if (filling := coming.pop(model.name, None)) is not None:
                        for job in filling.jobs:
                            self.bus.cancel(job)
                granules = model.granules
                if (costs := self.lenders.get(model.name)) is not None:
                    granules -= (len(costs.chosen) - costs.slots) * model.layer_granules
                    costs.chosen, costs.slots = (), 0
                self.memory(-granules)
                seconds += granules * self.kind.unmap_s
        return seconds

    def _circulate(self, model: SharedModel, make_way: Callable[[], None]) -> float:
        """As `worker.models.circulating.Circulation.change`: the device's thread unmaps; the copying thread maps, and
        copies what is not where steps read it from now on. Returns seconds of the device."""
        costs, each = self.lenders[model.name], model.layer_granules
        lending = self.residency.models[model.name].lending
        assert lending is not None
        before, after, slots = set(costs.chosen), set(lending.circulating), costs.slots
        freed = (len(after) - lending.slots) - (len(before) - slots)
        if freed < 0:
            make_way()
        self.memory(-freed * each)
        costs.chosen, costs.slots = lending.circulating, lending.slots
        mapped = len(before - after) + max(lending.slots - slots, 0)
        copied = len(before - after) + lending.slots
        self.moved += copied
        self._return(model, copied, (copied * costs.transfer_s + mapped * each * self.kind.map_s) / max(copied, 1))
        return (len(after - before) + max(slots - lending.slots, 0)) * each * self.kind.unmap_s

    def _return(self, model: SharedModel, layers: int, seconds: float) -> None:
        """So many layers come, each within `seconds` of the bus."""
        if layers == 0:
            return
        unfinished = [job for job in self._returns[model.name].jobs if not job.finished] if self._waits(model) else []
        filling = _Filling(self.events.now, layers)
        filling.jobs = unfinished
        bytes_ = seconds * self.bus.bytes_per_s
        filling.jobs += [self.bus.send(bytes_, _KEY, lambda: self._landed(filling)) for _ in range(layers)]
        self._returns[model.name] = filling

    def _waits(self, model: SharedModel) -> bool:
        return model.name in self._returns and not self._returns[model.name].over

    def when_here(self, name: str, follow: Callable[[], None]) -> bool:
        """False: all of the model's layers are here. Else `follow` is called when they are."""
        for coming in (self._fillings, self._returns):
            filling = coming.get(name)
            if filling is not None and not filling.over:
                filling.follow.append(follow)
                return True
        return False

    def _load(self, model: SharedModel) -> None:
        layers = model.kind.shape.layers
        filling = self._fillings[model.name] = _Filling(self.events.now, layers)
        # Copy threads map the granules, one piece after the other.
        bytes_ = self.kind.activation_s(model) * self.bus.bytes_per_s / layers
        filling.jobs = [self.bus.send(bytes_, _KEY, lambda: self._landed(filling)) for _ in range(layers)]

    def _landed(self, filling: _Filling) -> None:
        filling.ready += 1
        if filling.over:
            for follow in filling.follow:
                follow()
        self.woken()
