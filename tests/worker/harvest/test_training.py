"""Training gives the same bits whatever lanes, pauses and moving layers there are, and can stop at any unit."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.model_config import load_config
from tests.worker.harvest.bench import (
    PARTITION,
    SETTINGS,
    AllLayers,
    OneLayerAtATime,
    RestlessGate,
    StoppingGate,
    examples,
    make_model,
    make_trainer,
    random_adapter,
)
from worker.harvest.adapter import Adapter
from worker.harvest.batches import Batches, learning_rate
from worker.harvest.gate import OpenGate, Stopped
from worker.harvest.lanes import Chain, Lanes
from worker.harvest.partition import Partition, head_rows, unit_rows
from worker.harvest.training import Trainer, TrainingFailed, trainer_bytes

LENGTHS = [23, 9, 31, 2, 17, 40, 12, 5]
DATA = examples(LENGTHS)
DROPPING = replace(SETTINGS, dropout=0.2)


def bits(trainer: Trainer, steps: int) -> list[bytes]:
    """Everything that `steps` steps leave."""
    losses = [trainer.train_step() for _ in range(steps)]
    tensors = [trainer.adapter.flat, *trainer.optimizer.named().values()]
    return [repr(losses).encode(), *(t.numpy().tobytes() for t in tensors)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    make_model(directory, "mistral-window")
    return directory


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> list[bytes]:
    torch.set_num_threads(1)
    trainer = make_trainer(base, DATA, DROPPING)
    return bits(trainer, trainer.steps)


@pytest.mark.parametrize("seed", range(3))
def test_lanes_pauses_and_layers_that_come_late_change_no_bit(base: Path, undisturbed: list[bytes], seed: int) -> None:
    frozen, gate = OneLayerAtATime(base), RestlessGate(lanes=3, seed=seed)
    trainer = make_trainer(base, DATA, DROPPING, frozen=frozen, gate=gate, lanes=3)
    assert bits(trainer, trainer.steps) == undisturbed
    assert len(gate.entered) == 3 and min(gate.entered.values()) > 50, "all lanes took part"
    assert not +frozen.held, "every layer was given back"
    trainer.close()


def test_the_order_of_layers_is_forward_then_back(base: Path) -> None:
    frozen = AllLayers(base)
    make_trainer(base, DATA, frozen=frozen).train_step()
    assert frozen.order == [(0, True), (1, True), (2, True), (2, False), (1, False), (0, False)]


def test_a_step_that_is_stopped_at_any_unit_leaves_nothing_half_done(base: Path) -> None:
    gate = StoppingGate(10**9)
    trainer = make_trainer(base, DATA, DROPPING, gate=gate, lanes=2)
    adapter, mean, stops = trainer.adapter.flat.clone(), trainer.optimizer.named()["exp_avg"], 0
    gate.units = 5
    while not trainer.step:
        try:
            trainer.train_step()
        except Stopped:
            stops += 1
            assert trainer.step == trainer.tokens == 0
            assert torch.equal(trainer.adapter.flat, adapter) and not mean.any()
            gate.units = 5 + 13 * stops
    assert stops > 5
    fresh = make_trainer(base, DATA, DROPPING)
    fresh.train_step()
    assert torch.equal(trainer.adapter.flat, fresh.adapter.flat)


def test_an_update_that_has_begun_is_finished_when_the_gate_stops(base: Path) -> None:
    fresh = make_trainer(base, DATA)
    fresh.train_step()

    gate = StoppingGate(10**9)
    trainer = make_trainer(base, DATA, gate=gate)
    run = trainer.optimizer.update

    def update(rate: float, norm: float) -> None:
        gate.units = 1  # that of the first layer
        run(rate, norm)

    trainer.optimizer.update = update  # type: ignore[method-assign]
    assert trainer.train_step().step == 1
    assert torch.equal(trainer.adapter.flat, fresh.adapter.flat)
    with pytest.raises(Stopped):
        trainer.train_step()


def test_a_unit_that_fails_ends_the_step_with_its_reason(base: Path) -> None:
    class Broken(AllLayers):
        """Its layer 1 cannot be had."""

        def acquire(self, layer: int):  # type: ignore[no-untyped-def]
            if layer == 1:
                raise MemoryError("no room for layer 1")
            return super().acquire(layer)

    with pytest.raises(MemoryError, match="no room for layer 1"):
        make_trainer(base, DATA, frozen=Broken(base), lanes=3).train_step()


def test_a_lane_that_must_pause_holds_nothing_that_others_need() -> None:
    """Lane 1 never gets in; all units are computed by lane 0."""
    leave = threading.Event()

    class OnlyTheFirst(OpenGate):
        def enter(self, lane: int) -> None:
            if lane:
                leave.wait()

    lanes, done = Lanes(2, OnlyTheFirst()), []

    def chain(name: int) -> Chain[None]:
        for unit in range(3):
            yield lambda _, unit=unit: done.append((name, unit))

    lanes.run([chain(0), chain(1)], lambda: None)
    assert done == [(name, unit) for name in (0, 1) for unit in range(3)]
    lanes.run([chain(2)], lambda: None)
    leave.set()
    lanes.close()
    assert len(done) == 9


def test_no_more_chains_are_under_way_than_there_are_lanes() -> None:
    lanes, begun, most = Lanes(3, RestlessGate(3, 5)), set[int](), [0]

    def chain(name: int) -> Chain[None]:
        begun.add(name)
        most[0] = max(most[0], len(begun))
        for _ in range(4):
            yield lambda _: None
        begun.remove(name)

    lanes.run([chain(n) for n in range(20)], lambda: None)
    lanes.close()
    assert not begun and most[0] <= 3


def test_a_loss_that_is_no_number_ends_training_and_names_the_remedy(base: Path) -> None:
    adapter = random_adapter(load_config(base))
    adapter.flat[0, 0] = float("nan")
    with pytest.raises(TrainingFailed, match=r"step 1: the loss is nan.*lower learning_rate"):
        make_trainer(base, DATA, adapter=adapter).train_step()


def test_the_update_is_adamw_s_with_the_gradient_clipped_to_1(base: Path) -> None:
    settings = replace(SETTINGS, weight_decay=0.1)
    config = load_config(base)
    adapter, copy = random_adapter(config, settings), random_adapter(config, settings)
    trainer = make_trainer(base, DATA, settings, adapter=adapter)
    parameter = torch.nn.Parameter(copy.flat.clone())
    reference = torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.1)
    for step in range(3):
        done = trainer.train_step()
        assert done.gradient_norm > 1
        parameter.grad = trainer.optimizer._sums.clone()
        assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-4)
        reference.param_groups[0]["lr"] = learning_rate(settings, step, trainer.steps)
        reference.step()
        torch.testing.assert_close(trainer.adapter.flat, parameter.detach(), atol=1e-6, rtol=1e-6)


def test_validation_is_the_mean_over_all_targets_without_dropout(base: Path) -> None:
    held_out = examples([13, 60, 7, 33, 21], seed=9)
    trainer = make_trainer(base, DATA, replace(SETTINGS, dropout=0.9), validation=held_out, lanes=2)
    found = trainer.validation_loss()
    whole = make_trainer(base, held_out, replace(SETTINGS, batch_size=5))
    assert found == pytest.approx(whole.train_step().loss, abs=1e-5)
    assert math.isnan(whole.validation_loss())


def test_each_epoch_has_every_example_once_in_an_order_of_its_own() -> None:
    settings = replace(SETTINGS, epochs=3, batch_size=4, seed=1)
    batches = Batches(10, settings)
    assert batches.steps == 9
    epochs = [[batches.at(3 * epoch + n) for n in range(3)] for epoch in range(3)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        assert sorted(example for batch in epoch for example in batch) == list(range(10))
    assert epochs[0] != epochs[1] != epochs[2]
    assert [Batches(10, settings).at(n) for n in (8, 0)] == [epochs[2][2], epochs[0][0]]
    assert Batches(10, replace(settings, seed=2)).at(0) != epochs[0][0]


def test_the_rate_rises_and_falls_linearly() -> None:
    rates = [learning_rate(replace(SETTINGS, learning_rate=1.0, warmup_ratio=0.25), step, 8) for step in range(8)]
    assert rates == [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6]
    assert learning_rate(replace(SETTINGS, learning_rate=1.0), 0, 4) == 1.0


def test_units_are_as_large_as_their_time_allows(base: Path) -> None:
    config, adapter = load_config(base), Adapter(load_config(base), SETTINGS)

    def found(limit_s: float, longest: int = 64) -> Partition:
        return unit_rows(config, adapter, 0.1, longest, AllLayers(base), OpenGate(), limit_s)

    assert found(0.0) == Partition(8, 8, 256)
    assert found(60.0) == Partition(64, 64, 256)
    assert found(60.0, longest=5) == Partition(8, 8, 256)
    assert head_rows(replace(config, vocab_size=128_000), 1024) == 64
    assert head_rows(replace(config, vocab_size=10**8), 1024) == 8
    with pytest.raises(Stopped):
        unit_rows(config, adapter, 0.0, 64, AllLayers(base), StoppingGate(4))


def test_what_a_trainer_holds_is_known_before(base: Path) -> None:
    held = [0]

    def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        held[0] += made.nbytes
        return made

    config, validation = load_config(base), examples([50, 3])
    adapter = Adapter(config, SETTINGS, empty)
    Trainer(config, SETTINGS, DATA, validation, AllLayers(base), OpenGate(), PARTITION, adapter, 2, empty).close()
    assert held[0] == trainer_bytes(config, SETTINGS, DATA, validation, PARTITION, 4, 2)
