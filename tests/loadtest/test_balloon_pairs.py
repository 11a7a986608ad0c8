"""bench/balloon sends both arms the same steady load, and says yes or no only when the pairs do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.balloon import granules
from bench.balloon.pairs import BOUND, LEAST, constant_load, fills, interval, within
from bench.many_models.setting import TIME_SCALE, token_bytes

TOKENS = (256, 32)


def test_each_model_gets_its_rate_steadily_and_no_prompt_twice() -> None:
    for seed in (1, 2):
        load = constant_load(2, 2.0, 100.0, TOKENS, seed)
        assert load == constant_load(2, 2.0, 100.0, TOKENS, seed)
        assert len({r.block_ids for r in load}) == len(load)
        assert [r.arrival_s for r in load] == sorted(r.arrival_s for r in load)
        for model in ("m00", "m01"):
            at_s = [r.arrival_s * TIME_SCALE for r in load if r.model == model]
            gaps = np.diff(at_s)
            assert len(at_s) == pytest.approx(200, rel=0.15) and at_s[0] >= 0 and at_s[-1] < 100
            assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.3), "steadier than Poisson"
        assert all((r.input_tokens, r.output_tokens) == TOKENS for r in load)
    assert [r.model for r in sorted(constant_load(2, 0.01, 1.0, TOKENS, 1), key=lambda r: r.model)] == ["m00", "m01"]
    assert constant_load(2, 2.0, 100.0, TOKENS, 1) != constant_load(2, 2.0, 100.0, TOKENS, 2)


def test_as_many_requests_as_fill_the_memory() -> None:
    one = sum(TOKENS) * token_bytes("131m")
    assert fills("131m", 10 * one, TOKENS) == 10 and fills("131m", 10 * one + 1, TOKENS) == 11


@pytest.mark.parametrize(("middle", "expected"), [(1.0, True), (1.2, False)])
def test_a_clear_ratio_is_decided_by_few_pairs(middle: float, expected: bool) -> None:
    dice = random.Random(1)
    ratios = [dice.gauss(middle, 0.02) for _ in range(LEAST)]
    assert within(ratios[:-1]) is None, "too few pairs for any verdict"
    assert within(ratios) is expected
    found, low, high = interval(ratios)
    assert low <= found <= high and high - low < 0.1


def test_a_noisy_ratio_at_the_bound_stays_open() -> None:
    ratios = [BOUND - 0.2, BOUND + 0.2] * LEAST
    assert within(ratios) is None


def test_no_change_is_rarely_called_a_loss_though_one_looks_after_every_pair() -> None:
    dice = random.Random(2)
    for _ in range(20):
        ratios = [dice.gauss(1.0, 0.1) for _ in range(30)]
        assert all(within(ratios[:count]) is not False for count in range(1, 31))


def test_a_granule_is_timed_in_every_way() -> None:
    found = granules.measure(1)
    assert set(found) == {
        "map, fresh", "unmap", "map, warm", "hand over", "unmap, back to the system", "prepare in idle time",
        "map, prepared",
    }  # fmt: skip
    assert all(len(of) == 1 and 0 < of[0] < 1e6 for of in found.values())
