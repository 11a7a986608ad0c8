"""bench/prism: the loads are what they are said to be, models are spread over devices that hold them, and what does not
end keeps to no target."""

from __future__ import annotations

import itertools

import pytest

from bench.prism.arms import ARMS, Target, alone, attainment, run, spread
from bench.prism.figures import EIGHT, EIGHTEEN, FIFTY_FOUR, REQUEST_S, Bench, figure_10
from bench.prism.loads import API, CHAT, described, trace
from loadtest.simulate.many import Answered, ModelRequest
from loadtest.simulate.presets import H100, LLAMA_31_8B, LLAMA_32_1B
from loadtest.simulate.shared_kind import shared_kind

NAMES = [f"m{n}" for n in range(8)]
PAIR = shared_kind(H100, [LLAMA_31_8B, LLAMA_32_1B], request_s=REQUEST_S)


@pytest.mark.parametrize("seed", [1, 2])
def test_traces_are_as_the_paper_describes_its_own(seed: int) -> None:
    found = described(trace(NAMES, CHAT, 16.0, 3600.0, seed), NAMES, 3600.0)
    assert found["requests"] == pytest.approx(16.0 * 3600, rel=0.05)
    assert 0.23 <= found["active_share_10_s"] <= 0.6 and 40 <= found["idle_intervals_an_hour"] <= 100
    assert found["switches_an_hour"] >= 54 / 16 * len(NAMES) * 0.8, "the paper's 54 are of 16 models"
    assert found["mean_input_tokens"] == pytest.approx(CHAT.input_tokens, rel=0.05)
    assert found["mean_output_tokens"] == pytest.approx(CHAT.output_tokens, rel=0.05)


def test_more_requests_keep_the_pattern() -> None:
    few, many = (trace(NAMES, API, rate, 600.0, 3) for rate in (4.0, 40.0))
    assert few == trace(NAMES, API, 4.0, 600.0, 3)
    for name in NAMES:
        times = [asked.time_s for asked in many if asked.model == name]
        for asked in few:
            if asked.model == name:
                assert min(abs(asked.time_s - at) for at in times) < 10.0, "requests come only in a model's bursts"


def test_mixes_have_as_many_models_as_the_paper_s() -> None:
    assert (len(EIGHT), len(EIGHTEEN), len(FIFTY_FOUR)) == (8, 18, 54)
    billions = [shape.parameters / 1e9 for shape in FIFTY_FOUR]
    assert [sum(low <= b < high for b in billions) for low, high in ((1, 4), (4, 9), (9, 31))] == [43, 8, 3]


def test_models_go_where_least_is_to_do_and_never_where_their_weights_do_not_fit() -> None:
    kind = shared_kind(H100, EIGHT)
    targets = {model.name: Target(0.1, 0.01, 10.0 - n) for n, model in enumerate(kind.models)}
    where = spread(kind, targets, 2)
    assert where is not None and sorted(itertools.chain(*where)) == sorted(targets)
    for names in where:
        assert sum(model.granules for model in kind.models if model.name in names) <= 0.9 * kind.granules
    assert spread(kind, targets, 1) is None
    assert spread(kind, targets, 1, together=False) == [list(targets)]


def test_a_request_without_an_end_keeps_to_no_target() -> None:
    asked = ModelRequest(1.0, "m", 10, 11)
    answers = [Answered(asked, 1.1, 1.3, "d"), Answered(asked, 1.4, -1.0, "d"), Answered(asked, -1.0, -1.0, "d")]
    found = attainment(answers, {"m": Target(0.1001, 0.0201, 1.0)})
    assert found["ttft"]["1"] == pytest.approx(1 / 3, abs=1e-3) and found["ttft"]["5"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["tpot"]["12"] == pytest.approx(1 / 3, abs=1e-3)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_serves_everybody_where_there_is_room(arm: str) -> None:
    asked = trace([model.name for model in PAIR.models], CHAT, 2.0, 15.0, 1)
    targets = alone(PAIR, asked)
    assert all(0.04 <= target.ttft_s <= 0.13 for target in targets.values()), "as the paper's"
    row = run(PAIR, 2, arm, asked, targets)
    assert row["held"] and row["unfinished"] == 0 and row["attainment"]["ttft"]["30"] > 0.5


def test_an_arm_that_cannot_hold_the_models_says_so() -> None:
    kind = shared_kind(H100, EIGHT)
    targets = {model.name: Target(0.1, 0.01, 1.0) for model in kind.models}
    asked = [ModelRequest(0.0, kind.models[0].name, 10, 2)]
    assert not run(kind, 1, "static", asked, targets)["held"] and run(kind, 1, "prism", asked, targets)["held"]


def test_larger_models_take_longer_to_come() -> None:
    rows = figure_10(Bench(True, 1, lambda cells: [cell() for cell in cells]))["rows"]
    assert [row["weights_s"] for row in rows] == sorted(row["weights_s"] for row in rows)
    for row in rows:
        assert row["weights_s"] < row["first_token_cold_s"] < row["weights_s"] + 0.3 and row["weights_s"] < 2.5
        assert row["first_token_active_s"] < 0.1
