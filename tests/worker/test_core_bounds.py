"""What reaches the engine has its type and its range, whatever a gateway sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import ranges
from contracts.errors import InvalidRequest
from contracts.request import GenerateRequest, Sampling
from worker.core.bounds import check_request
from worker.sampling.sampler import SamplingState, adjust

PLAIN = GenerateRequest("r", "t", "s", "m", Sampling(), prompt="Hello")
NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", NAN), ("temperature", "1"), ("temperature", True), ("top_p", 1.5),
        ("min_p", -0.1),
        ("top_k", -1), ("top_k", 1.0), ("repetition_penalty", 1e-300), ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 1e300), ("frequency_penalty", NAN), ("seed", 1 << 63), ("max_tokens", 0), ("logprobs", 21),
        ("min_tokens", None), ("stop", "END"), ("stop", [b"x"]), ("stop", ["a" * 1025]), ("stop", ["a"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(65))), ("logit_bias", {1: NAN}), ("logit_bias", {"1": 1.0}), ("logit_bias",
        {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(4097), 1.0)), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_a_sampling_field_that_is_not_what_it_should_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(replace(PLAIN, sampling=replace(Sampling(), **{field: value})))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", 7), ("request_id", "r" * 513), ("tenant", None), ("session_id", "a/b"), ("session_id", "\ud800"),
        ("priority", 1 << 40), ("priority", "0"), ("weight", 0.0), ("weight", NAN), ("weight", 1e9), ("kept_tokens",
        -1),
        ("expected_tokens", 1e400), ("resume_tokens", [1.0]), ("resume_tokens", None), ("source_nodes", ["n"] * 1025),
        ("group", 3),
        ("choice", -1),
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_it_should_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(replace(PLAIN, **{field: value}))
    assert refused.value.param == field


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8),
    st.floats(*ranges.REPETITION_PENALTY),
    st.floats(*ranges.PENALTY),
    st.floats(*ranges.PENALTY),
    st.floats(*ranges.BIAS),
    st.integers(0, 5000),
)
def test_within_the_ranges_every_row_of_a_model_stays_finite(
    logits: list[float], repetition: float, presence: float, frequency: float, bias: float, times: int
) -> None:
    sampling = Sampling(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias={1: bias}
    )
    check_request(replace(PLAIN, sampling=sampling))
    state = SamplingState.start(sampling, [0, 1, 2], [3] * times)
    assert np.isfinite(adjust(np.array(logits, np.float32), state)).all()
