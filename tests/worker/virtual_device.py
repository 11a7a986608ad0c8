"""Several virtual engines that share one device's memory, and its thread; their weights may come and go."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch

from contracts.models import ModelState
from tests.worker.trouble import Trouble
from tests.worker.virtual_engine import VirtualEngine
from tests.worker.virtual_model import LAYERS, Granules, World
from tests.worker.virtual_trainer import VirtualTrainer
from worker.core.arbitration import Arbitration
from worker.core.balloon import Balloon
from worker.core.lending import Lending
from worker.core.remap import Circulate
from worker.core.residency import Load, Residency
from worker.core.resident import Resident
from worker.core.turns import turns_of
from worker.core.yielding import Yielding
from worker.devices.runner import Slice
from worker.engine.device_loop import IDLE_S, in_order, share_memory, unmap_for


class VirtualPlacing:
    """Weights of `granules` slabs a model that take `layer_s` a layer to come; each load fails with chance `fails`."""

    def __init__(self, world: World, memory: Granules, residency: Residency, granules: int) -> None:
        self.world, self.memory, self.residency, self.granules = world, memory, residency, granules
        self.layer_s, self.fails, self.dice = 0.01, 0.0, random.Random(1)
        self.woken: Callable[[], object] = lambda: None
        self.clock = world
        #: Layers whose memory each model has lent; layers' granules.
        self.lent: dict[str, int] = {}
        #: Layers that are here, of each model on the device; and the number of the load that brings them.
        self.here: dict[str, int] = {}
        self._load = 0
        self._news: list[tuple[str, int]] = []
        self._loads: dict[str, int] = {}

    def turn(self, make_way: Callable[[], None]) -> None:
        news, self._news = self._news, []
        for name, load in news:
            if self._loads[name] != load or name not in self.here:
                continue
            if self.here[name] < 0:
                self.residency.failed(name, self.world.now())
            elif not self.fails or self.here[name] == LAYERS:  # as with an image, or without
                self.residency.landed(name, self.here[name], self.layer_s, self.world.now())
        self.residency.tick(self.world.now())
        self.execute(make_way)

    def execute(self, make_way: Callable[[], None]) -> None:
        for instruction in self.residency.take():
            name = instruction.name
            if isinstance(instruction, Load):
                make_way()
                assert name not in self.here
                self.memory.mapped += self.granules
                assert self.memory.mapped <= self.memory.total, "weights are mapped where there is no memory"
                self.here[name] = 0
                self._load += 1
                self._loads[name] = self._load
                self.world.at(self.layer_s, functools.partial(self._landed, name, self._load))
            elif isinstance(instruction, Circulate):
                make_way()
                assert self.here[name] == LAYERS, "layers of a model that is not here"
                self.memory.mapped -= instruction.lent - self.lent.get(name, 0)
                assert self.memory.mapped <= self.memory.total, "layers are mapped where there is no memory"
                self.lent[name] = instruction.lent
            else:
                del self.here[name]
                self.memory.mapped -= self.granules - self.lent.pop(name, 0)

    def _landed(self, name: str, load: int) -> None:
        if self._loads[name] != load or name not in self.here:
            return
        failed = self.dice.random() < self.fails
        self.here[name] = -1 if failed else self.here[name] + 1
        self._news.append((name, load))
        if 0 <= self.here[name] < LAYERS:
            self.world.at(self.layer_s, functools.partial(self._landed, name, load))

    def wait(self, name: str, layer: int) -> None:
        """A step needs this layer."""
        assert name in self.here, "a step of a model whose weights are not here"
        while self.here[name] <= layer:
            self.world.next(1.0)


class VirtualDevice:
    """Models on `slabs` slabs of memory: each may use all of it. Every invariant is checked after every turn.

    weights: slabs of each model's weights, which come when they are needed, by `sharing`; 0: none. targets:
    seconds to each model's first token; 0: none. copy_s: of a layer, of one slab, that a model lends; None: none does.
    trains: draws what a trainer does; None: there is none.
    """

    def __init__(
        self,
        models: int,
        slabs: int,
        *,
        priorities: tuple[int, ...] = (),
        weights: int = 0,
        sharing: str = "prism",
        targets: tuple[float, ...] = (),
        copy_s: float | None = None,
        trains: random.Random | None = None,
        **engine: Any,
    ) -> None:
        self.world, self.granules = World(), Granules(slabs)
        self.models = [
            VirtualEngine(pages=slabs * LAYERS, world=self.world, granules=self.granules, **engine)
            for _ in range(models)
        ]
        self.balloon = Balloon(slabs)
        self.residency = Residency(self.balloon, turns_of(sharing))
        self.placing = VirtualPlacing(self.world, self.granules, self.residency, weights) if weights else None
        for number, model in enumerate(self.models):
            priority = priorities[number] if priorities else 0
            share = self.balloon.join(f"m{number}", model.cache, 1, priority=priority)
            share.yields = yielding = Yielding(model.engine.core)
            if self.placing is not None:
                core = model.engine.core
                resident = Resident(share, core, yielding, weights, int(weights * 2e7))
                if copy_s is not None and weights > 1:
                    resident.lending = Lending(weights, 1, copy_s, 4 * copy_s, weights - 1, core.pace)
                self.residency.join(resident, ModelState.COLD)
                model.runner.step = functools.partial(self._step, share.name, model.runner.step)  # type: ignore[method-assign]
        self._engines = [model.engine for model in self.models]
        if any(targets):
            arbitration = Arbitration()
            for number, (target_s, engine_) in enumerate(zip(targets, self._engines, strict=True)):
                core = engine_.core
                coming = functools.partial(self.residency.activation_s, f"m{number}") if weights else lambda: 0.0
                core.state.order.arbitrate(arbitration, target_s, core.live.values, core.pace, coming)
        self.trainer = VirtualTrainer(self.world, self.granules, self.balloon, trains) if trains is not None else None
        share_memory(self._engines, self.placing, self.trainer)  # type: ignore[arg-type]

    def _step(
        self,
        name: str,
        step: Callable[..., torch.Tensor],
        slices: list[Slice],
        before_layer: Callable[[int], None],
        after_layer: Callable[[int], None],
    ) -> torch.Tensor:
        placing = self.placing
        assert placing is not None

        def before(layer: int) -> None:
            placing.wait(name, layer)
            before_layer(layer)

        return step(slices, before, after_layer)

    def _unmap(self) -> None:
        unmap_for(self._engines, self.trainer)  # type: ignore[arg-type]

    def check(self) -> None:
        """Every invariant of the device and of each model."""
        self.balloon.validate()
        if self.placing is not None:
            self.residency.validate()
        for model in self.models:
            model.check()

    def go(self, until: Callable[[], bool] | None = None, *, most_s: float = 3600.0) -> None:
        """As `VirtualEngine.go`, for all."""
        end = self.world.now() + most_s
        while not (until() if until else all(model._quiet() for model in self.models)):
            assert self.world.now() < end, f"nothing more happens: {[len(m.sequences) for m in self.models]}"
            if self.placing is not None:
                self.placing.turn(self._unmap)
                self.check()
            if self.trainer is not None:
                self.trainer.turn(self._unmap)
                self.check()
            busy = [model for model in self.models if model.engine.due_in_s() <= 0]
            if not busy:
                due_s = self.residency.due_in_s(self.world.now()) if self.placing is not None else IDLE_S
                self.world.next(max(min(due_s, IDLE_S), 1e-4))
                busy = [model for model in self.models if model.engine.due_in_s() <= 0] or self.models
            for engine in in_order([model.engine for model in busy]):
                engine.turn()
                self.check()

    def suffer(self, dice: random.Random, requests: int, *, span_s: float, longest: int | None = None) -> None:
        """Everything that can happen (`Trouble`) happens to each model, for about `span_s`."""
        for model in self.models:
            slow_s = dice.choice([0.0, 0.001, 0.05])
            model.store.latency = functools.partial(_up_to, dice, slow_s)
            model.loader.copy_s = dice.choice([0.0, 0.001, 0.1])
            model.store.fault = functools.partial(_chance, dice, dice.choice([0.0, 0.0, 0.05]))
            model.store.refuse = functools.partial(_chance, dice, dice.choice([0.0, 0.0, 0.2, 1.0]))
            trouble = Trouble(model, dice, random.Random(dice.random()), requests, longest)
            for _ in range(requests * 3):
                self.world.at(dice.random() * span_s, trouble.something)
        self.go(until=lambda: self.world.now() >= span_s)
        for model in self.models:
            if model.store.arena is not None:
                model.store.hangs_until_s = min(model.store.hangs_until_s, self.world.now() + 15.0)

    def finish(self) -> None:
        """Everything ends, every answer is a cold run's, and each model can have all memory but its weights'."""
        self.go()
        for model in self.models:
            model.check_answers()
        self.world.pass_(100.0)
        for model in self.models:
            if self.placing is not None:
                self.placing.turn(self._unmap)
            assert model.cache.make_room(model.pool.reach * LAYERS, self.world.now()), "memory is stuck"
            self.check()


def _up_to(dice: random.Random, most_s: float) -> float:
    return dice.random() * most_s


def _chance(dice: random.Random, chance: float, *_: object) -> bool:
    return dice.random() < chance
