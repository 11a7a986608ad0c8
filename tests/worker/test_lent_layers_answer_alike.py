"""Models whose layers come and go at random while they compute give the answers of models that keep theirs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from contracts.models import ModelState
from tests.worker.engine_harness import tiny_model
from tests.worker.test_models_in_turns import MODELS, Running, running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def answers(run: Running, dice: random.Random, count: int) -> list[list[int]]:
    """Of requests to both models, some at a time."""
    found: list[list[int]] = []
    while len(found) < count:
        names = [
            run.submit(
                dice.choice(MODELS), dice.randint(1, 30), [dice.randrange(5, 90) for _ in range(dice.randint(1, 60))]
            )
            for _ in range(dice.randint(1, 4))
        ]
        found += [run.answers.wait(name) for name in names]
    return found


class Restless:
    """Instead of `Remap.round`: lends and takes back as the dice say."""

    def __init__(self, run: Running, seed: int) -> None:
        self._remap, self._dice, self.changes = run.residency.remap, random.Random(seed), 0

    def round(self, now: float) -> None:
        self._remap._moved = False
        for resident in self._remap.residents():
            lending = resident.lending
            if lending is None or resident.state is not ModelState.ACTIVE or self._dice.random() < 0.5:
                continue
            slots = self._dice.randint(1, 2)
            lent = self._dice.randint(0, lending.layers - slots)
            back = (lending.lent - lent) * lending.granules
            if back <= 0 or self._remap.balloon.collect(back, now):
                self._remap._change(resident, lent, slots if lent else 0, now)
                self.changes += 1


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_is_lent_and_taken_back_meanwhile_every_answer_is_the_same(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, seed: int
) -> None:
    with running(directory, tmp_path / "still", hbm_mib=6.0, kernels=kernels) as run:
        expected = answers(run, random.Random(seed), 30)
    with running(directory, tmp_path / "restless", hbm_mib=6.0, kernels=kernels, remap="auto", remap_cap=1.0) as run:
        restless = Restless(run, seed)
        monkeypatch.setattr(type(run.residency.remap), "round", lambda self, now: restless.round(now))
        assert answers(run, random.Random(seed), 30) == expected
        assert restless.changes > 50
        assert sum(each.copies for each in run.placing.circulations.values()) > 200
