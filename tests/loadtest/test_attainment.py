"""SLO attainment is the share of a model's requests that keep to its objective."""

from __future__ import annotations

import pytest

from loadtest.attainment import attainment, by_model, scaled
from loadtest.client import Outcome
from loadtest.figures import Slo


def outcome(model: str, ttft_s: float, tpot_s: float = 0.01, tokens: int = 11, error: str | None = None) -> Outcome:
    end_s = ttft_s + tpot_s * (tokens - 1)
    return Outcome(
        "s", 0, 0.0, first_s=ttft_s, end_s=end_s, output_tokens=tokens, prompt_tokens=10, model=model, error=error
    )


SLOS = {"a": Slo(0.1, 0.02), "b": Slo(1.0, None)}


def test_each_request_is_held_to_its_models_objective() -> None:
    outcomes = [outcome("a", 0.05), outcome("a", 0.2), outcome("b", 0.2), outcome("b", 0.9, tpot_s=9.0)]
    assert attainment(outcomes, SLOS) == {"ttft": 0.75, "tpot": 1.0}  # b has no TPOT objective


def test_ttft_and_tpot_are_apart() -> None:
    outcomes = [outcome("a", 5.0), outcome("a", 0.05, tpot_s=0.5)]
    assert attainment(outcomes, SLOS) == {"ttft": 0.5, "tpot": 0.5}


def test_a_failed_request_keeps_nothing() -> None:
    assert attainment([outcome("a", 0.0, error="HTTP 503")], SLOS) == {"ttft": 0.0, "tpot": 0.0}


def test_an_answer_of_one_token_keeps_any_tpot() -> None:
    assert attainment([outcome("a", 0.05, tokens=1)], SLOS)["tpot"] == 1.0


@pytest.mark.parametrize("slos", [{}, {"a": Slo()}, {"other": Slo(1.0, 1.0)}])
def test_without_an_objective_there_is_no_share(slos: dict[str, Slo]) -> None:
    assert attainment([outcome("a", 0.05)], slos) == {"ttft": None, "tpot": None}


def test_scaled_objectives_keep_what_is_missing() -> None:
    assert scaled(SLOS, 2.0) == {"a": Slo(0.2, 0.04), "b": Slo(2.0, None)}


def test_models_are_listed_with_what_failed_and_without_requests() -> None:
    found = by_model([outcome("b", 0.2), outcome("b", 0.0, error="x")], SLOS)
    assert list(found) == ["a", "b"]
    assert (found["a"]["requests"], found["a"]["attainment"]["ttft"]) == (0, None)
    assert (found["b"]["requests"], found["b"]["failed"], found["b"]["ttft_s"]["count"]) == (2, 1, 1)
    assert found["b"]["attainment"] == {"ttft": 0.5, "tpot": None}
    assert found["b"]["slo"] == {"ttft_s": 1.0, "tpot_s": None}
