"""A model's token rate forgets what is long past."""

from __future__ import annotations

import pytest

from worker.core.token_rate import WINDOW_S, TokenRate


def test_a_steady_rate_is_found_and_an_old_burst_is_forgotten() -> None:
    rate = TokenRate()
    assert rate.at(5.0) == 0.0
    for second in range(600):
        rate.add(100, float(second))
    assert rate.at(600.0) == pytest.approx(100.0, rel=0.05)
    assert rate.at(600.0 + 5 * WINDOW_S) < 1.0
