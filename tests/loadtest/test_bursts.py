"""Generated arrivals are as bursty as they are told to be, and a trace's burstiness is found again."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from loadtest.bursts import Burstiness, ZipfLengths, answer_tokens, fit
from loadtest.generate_trace import generate, generated_requests
from loadtest.sessions import find_sessions


@pytest.mark.parametrize("shape", [0.2, 0.5, 1.0, 4.0])
def test_a_fit_finds_shape_and_rate_again(shape: float) -> None:
    rng, at_s, arrivals = random.Random(7), 0.0, []
    for _ in range(40_000):
        at_s += Burstiness(shape, 2.5).gap(rng)
        arrivals.append(at_s)
    found = fit(arrivals)
    assert found.shape == pytest.approx(shape, rel=0.08) and found.per_s == pytest.approx(2.5, rel=0.05)


def test_what_has_no_gaps_has_no_burstiness() -> None:
    for arrivals in ([], [1.0, 2.0], [3.0, 3.0, 3.0]):
        with pytest.raises(ValueError, match="three arrivals"):
            fit(arrivals)


def test_lengths_have_their_means_and_zipfs_are_mostly_short() -> None:
    rng = random.Random(1)
    prompts = [ZipfLengths(2000.0).draw(rng) for _ in range(4000)]
    assert fmean(prompts) == pytest.approx(2000, rel=0.1)
    assert sorted(prompts)[2000] < 400 and max(prompts) > 8000
    answers = [answer_tokens(rng, 270.0) for _ in range(20_000)]
    assert fmean(answers) == pytest.approx(270, rel=0.05) and min(answers) >= 2


def test_a_bursty_trace_is_burstier_than_a_poisson_one_and_follows_from_its_seed() -> None:
    def shape(burstiness: float) -> float:
        requests = generated_requests(800, 3, burstiness=burstiness, mean_prompt_tokens=20_000)
        return fit([s.turns[0].arrival_s for s in find_sessions(requests)][:760]).shape

    assert shape(0.2) < 0.5 < 0.7 < shape(1.0)
    assert generate(50, 4, burstiness=0.3, lengths="zipf") == generate(50, 4, burstiness=0.3, lengths="zipf")


def test_a_trace_can_be_made_like_another(tmp_path: Path) -> None:
    import typer

    from loadtest.generate_trace import main, write

    app = typer.Typer()
    app.command()(main)
    like, out = tmp_path / "like.jsonl", tmp_path / "out.jsonl"
    write(like, generate(600, 5, sessions_per_s=2.0, burstiness=0.3, mean_prompt_tokens=20_000))
    result = CliRunner().invoke(app, ["--out", str(out), "--like", str(like), "--sessions", "20"])
    assert result.exit_code == 0
    assert float(result.stdout.split("gamma shape ")[1].split()[0]) == pytest.approx(0.3, rel=0.25)
    assert float(result.stdout.split(": ")[1].split()[0]) == pytest.approx(2.0, rel=0.2)
    assert CliRunner().invoke(app, ["--out", str(out), "--lengths", "even"]).exit_code == 2
