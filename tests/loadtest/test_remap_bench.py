"""When a peak is over, as bench/remap counts it."""

from __future__ import annotations

from bench.remap.setting import fits_from_s
from loadtest.client import Outcome


def running(first_s: float, end_s: float, prompt: int) -> Outcome:
    gap_s = (end_s - first_s) / 10
    return Outcome("s", 0, 0.0, first_s=first_s, gaps_s=[gap_s] * 9, end_s=end_s, prompt_tokens=prompt)


def test_a_peak_is_over_when_what_runs_would_fit_and_nobody_waits() -> None:
    long, short = running(1.0, 20.0, 200), running(2.0, 10.0, 200)  # four chunks each, and a fifth
    assert fits_from_s([long, short], 1_000) == 2.0, "it always fits; the last first token"
    over_s = fits_from_s([long, short], 400)
    assert 9.0 < over_s <= 10.0, "until the last token of the shorter one"
    assert fits_from_s([long, running(15.0, 16.0, 10)], 450) == 15.0, "nobody may wait"


def test_chunks_that_answers_fill_count() -> None:
    growing = running(1.0, 11.0, 60)  # with five tokens more it holds a second chunk, and needs a third
    assert fits_from_s([growing], 128) > 4.0 and fits_from_s([growing], 192) == 1.0
