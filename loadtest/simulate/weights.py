"""Weights that come and go in virtual time: carries out what `worker.core.residency` says. Decides nothing.

Copies share the bus with KV, which goes first; a model's layers come in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.simulate.channels import Channel, Job
from loadtest.simulate.events import Events
from loadtest.simulate.shared_kind import SharedKind, SharedModel
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
    _models: Mapping[str, SharedModel] = field(init=False)
    _fillings: dict[str, _Filling] = field(default_factory=dict)

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
            else:
                if (filling := self._fillings.pop(model.name, None)) is not None:
                    for job in filling.jobs:
                        self.bus.cancel(job)
                self.memory(-model.granules)
                seconds += model.granules * self.kind.unmap_s
        return seconds

    def when_here(self, name: str, follow: Callable[[], None]) -> bool:
        """False: all of the model's layers are here. Else `follow` is called when they are."""
        filling = self._fillings.get(name)
        if filling is None or filling.over:
            return False
        filling.follow.append(follow)
        return True

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
