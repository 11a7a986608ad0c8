"""Penalties as array operations: what they do to a row is what counting and going through the tokens one by one
does."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.request import Sampling
from worker.core.token_counts import DENSE, Repetition, TokenCounts
from worker.sampling.sampler import SamplingState, adjust

tokens = st.lists(st.integers(0, 30), max_size=40)


@given(tokens, tokens)
def test_counts_are_those_of_a_counter(first: list[int], later: list[int]) -> None:
    counts = TokenCounts(first)
    assert [counts.add(token) for token in later] == [
        token not in (*first, *later[:n]) for n, token in enumerate(later)
    ]
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == Counter([*first, *later])


@pytest.mark.parametrize("penalty", [0.01, 0.7, 1.3, 10.0])
def test_with_many_tokens_seen_a_row_is_the_same_to_the_bit_as_with_few(penalty: float) -> None:
    row = np.random.default_rng(1).normal(size=20_000).astype(np.float32) * 10
    row[5] = -np.inf
    seen = list(range(0, 2 * DENSE, 2))
    many = Repetition(penalty, [*seen, 1])
    for generated in (3, 19_999, 3):
        many.add(generated)
    expected, given_ = row.copy(), row.copy()
    ids = np.array([*seen, 1, 3, 19_999])
    expected[ids] = np.where(
        expected[ids] > 0, expected[ids] / np.float32(penalty), expected[ids] * np.float32(penalty)
    )
    many.apply(given_)
    many.add(7)
    assert np.array_equal(given_, expected)
    many.apply(again := row.copy())
    assert again[7] != row[7] and np.array_equal(np.delete(again, 7), np.delete(expected, 7))


def test_what_a_request_can_ask_of_a_row_costs_less_than_a_millisecond() -> None:
    vocabulary, rng = 128_256, np.random.default_rng(2)
    row = rng.normal(size=vocabulary).astype(np.float32)
    prompt = rng.permutation(vocabulary).tolist()
    sampling = Sampling(
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias=dict.fromkeys(range(4096), 1.0),
        seed=1,
    )
    state = SamplingState.start(sampling, prompt, prompt[:20_000])
    took = []
    for token in range(20):
        begun = time.thread_time()
        adjust(row, state)
        state.took(token)
        took.append(time.thread_time() - begun)
    assert min(took) < 1e-3, "one loop over the biases took half of that"
