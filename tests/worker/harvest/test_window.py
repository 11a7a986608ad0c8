"""The frozen layers of a trainer: right bytes whichever slots come and go, and slots that are wanted back come."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.model_config import load_config
from tests.worker.engine_harness import tiny_model
from tests.worker.owners import KV
from worker.harvest.gate import Stopped
from worker.harvest.window import Window
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.models.checkpoint import Checkpoint
from worker.models.weights import Layout, layer_parts, top_parts

GRANULE = 1 << 16


class Slots:
    """A window, and the worker's side of it: which slots it has."""

    def __init__(self, directory: Path, memory: DeviceMemory) -> None:
        checkpoint, config = Checkpoint(directory), load_config(directory)
        self.layouts = [Layout(layer_parts(checkpoint, config, n), torch.float32) for n in range(config.layers)]
        top = Layout(top_parts(checkpoint, config), torch.float32)
        self.memory, self.layers = memory, config.layers
        self.granules = -(-max(layout.bytes for layout in self.layouts) // GRANULE)
        self.held: dict[int, list[int]] = {}
        self.came_back = threading.Condition()
        self.window = Window(self.layouts, top, self.returned)
        self.grant(-1, -(-top.bytes // GRANULE))
        #: Of each layer, read directly.
        names = [f"model.layers.{n}.mlp.down_proj.weight" for n in range(self.layers)]
        self.sums = [float(checkpoint.tensors[name].sum()) for name in names]

    def grant(self, slot: int, granules: int | None = None) -> None:
        self.held[slot] = self.memory.take(granules or self.granules, KV)
        self.window.grant(slot, self.memory.export(self.held[slot]))

    def returned(self, slots: list[int]) -> None:
        with self.came_back:
            for slot in slots:
                # Whoever gets it next may write at once.
                self.memory.give(self.held.pop(slot))
            self.came_back.notify_all()

    def wait_for(self, count: int) -> None:
        with self.came_back:
            assert self.came_back.wait_for(lambda: len(self.held) - 1 == count, timeout=20)

    def use(self, layer: int, forward: bool) -> float:
        self.window.next(layer, forward)
        weights = self.window.acquire(layer)
        try:
            return float(weights.down.sum())
        finally:
            self.window.release(layer)


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    memory = host_memory(128 * GRANULE, GRANULE)
    made = Slots(tiny_model(tmp_path), memory)
    yield made
    made.window.validate()
    made.window.end(Stopped("the test is over"))


def circle(layers: int) -> list[tuple[int, bool]]:
    return [(n, True) for n in range(layers)] + [(n, False) for n in reversed(range(layers))]


def test_all_layers_pass_through_two_slots(slots: Slots) -> None:
    slots.grant(0)
    slots.grant(1)
    for _ in range(3):
        for layer, forward in circle(slots.layers):
            assert slots.use(layer, forward) == slots.sums[layer]


def test_a_single_slot_is_enough_though_slow(slots: Slots) -> None:
    slots.grant(0)
    for layer, forward in circle(slots.layers):
        assert slots.use(layer, forward) == slots.sums[layer]


def test_whoever_uses_a_layer_waits_for_a_slot_and_may_be_told_to_stop(slots: Slots) -> None:
    failed = list[BaseException]()

    def use() -> None:
        try:
            slots.use(0, True)
        except BaseException as error:
            failed.append(error)

    user = threading.Thread(target=use)
    user.start()
    user.join(0.2)
    assert user.is_alive()
    slots.window.end(Stopped("enough"))
    user.join(20)
    assert isinstance(failed[0], Stopped)


def test_a_slot_whose_layer_is_used_comes_back_when_the_unit_ends_and_another_at_once(slots: Slots) -> None:
    slots.grant(0)
    slots.grant(1)
    slots.window.next(0, True)
    slots.window.acquire(0)
    slots.window.revoke(2)
    slots.wait_for(1)
    assert len(slots.held) == 2, "the layer in use stays"
    slots.window.release(0)
    slots.wait_for(0)


def test_layers_are_right_whatever_slots_come_and_go(slots: Slots) -> None:
    dice, number = random.Random(5), 10
    slots.grant(number)
    for layer, forward in circle(slots.layers) * 12:
        have = len(slots.held) - 1
        if dice.random() < 0.3 and have < 6:
            number += 1
            slots.grant(number)
        elif dice.random() < 0.3 and have > 1:
            count = dice.randint(1, have - 1)
            slots.window.revoke(count)
            slots.wait_for(have - count)
        assert slots.use(layer, forward) == slots.sums[layer]
        slots.window.validate()
