"""Several virtual engines that share one device's memory, and its thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.worker.virtual_engine import VirtualEngine
from tests.worker.virtual_model import LAYERS, Granules, World
from worker.core.balloon import Balloon
from worker.engine.device_loop import IDLE_S, let_others_go


class VirtualDevice:
    """Models on `slabs` slabs of memory: each may use all of it. Every invariant is checked after every turn."""

    def __init__(self, models: int, slabs: int, *, priorities: tuple[int, ...] = (), **engine: Any) -> None:
        self.world, self.granules = World(), Granules(slabs)
        self.models = [
            VirtualEngine(pages=slabs * LAYERS, world=self.world, granules=self.granules, **engine)
            for _ in range(models)
        ]
        self.balloon = Balloon(slabs)
        for number, model in enumerate(self.models):
            share = self.balloon.join(f"m{number}", model.cache, 1, priority=priorities[number] if priorities else 0)
            share.yields = model.engine.core
        let_others_go([model.engine for model in self.models])

    def check(self) -> None:
        """Every invariant of the device and of each model."""
        self.balloon.validate()
        for model in self.models:
            model.check()

    def go(self, until: Callable[[], bool] | None = None, *, most_s: float = 3600.0) -> None:
        """As `VirtualEngine.go`, for all."""
        end = self.world.now() + most_s
        while not (until() if until else all(model._quiet() for model in self.models)):
            assert self.world.now() < end, f"nothing more happens: {[m.sequences for m in self.models]}"
            busy = [model for model in self.models if model.engine.due_in_s() <= 0]
            if not busy:
                self.world.next(IDLE_S)
                busy = [model for model in self.models if model.engine.due_in_s() <= 0] or self.models
            for model in busy:
                model.engine.turn()
                self.check()

    def finish(self) -> None:
        """Everything ends, every answer is a cold run's, and each model can have all memory."""
        self.go()
        for model in self.models:
            model.check_answers()
            assert model.cache.make_room(model.pool.slab_count * LAYERS, self.world.now()), "memory is stuck"
            self.check()
