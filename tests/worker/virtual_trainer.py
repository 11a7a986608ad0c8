"""A trainer on a virtual device, as far as memory goes: it takes what nobody needs, and returns what serving takes."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.worker.virtual_model import Granules, World
from worker.core.balloon import Balloon
from worker.core.window import LEAST_LAYERS


class VirtualTrainer:
    """`Harvesting`'s side of memory. layers: of its model, a slab each; fixed: slabs of everything else."""

    def __init__(self, world: World, memory: Granules, balloon: Balloon, dice: random.Random) -> None:
        self.world, self.memory, self.balloon, self.dice = world, memory, balloon, dice
        self.layers, self.fixed = dice.choice([2, 4, 8]), dice.choice([1, 3])
        self.reserve = dice.choice([0, 2])
        self.mapped = self.most = 0

    def turn(self, make_way: Callable[[], None]) -> None:
        """Begin, or use another layer, now and then."""
        balloon, loan = self.balloon, self.balloon.loan
        self.make_way()
        if self.dice.random() < 0.5:
            return
        wanted = self.fixed + LEAST_LAYERS
        if not loan.held:
            if balloon.waiting or balloon.obtainable < wanted + self.reserve:
                return
            if balloon.collect(wanted + self.reserve, self.world.now()):
                loan.fixed, loan.layer, loan.layers = self.fixed, 1, LEAST_LAYERS
        elif loan.layers < self.layers and balloon.spare > self.reserve:
            loan.layers += 1
        if loan.held > self.mapped:
            make_way()
            self._map(loan.held)
        self.most = max(self.most, loan.held)

    def make_way(self) -> None:
        """Return what serving has taken."""
        if self.balloon.loan.held < self.mapped:
            self._map(self.balloon.loan.held)

    def _map(self, slabs: int) -> None:
        self.memory.mapped += slabs - self.mapped
        self.mapped = slabs
        assert self.memory.mapped <= self.memory.total, "a trainer is given memory that is not there"
