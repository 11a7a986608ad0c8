"""The next token: greedy or drawn, limited as asked, and the same whatever shares the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.request import Sampling
from worker.sampling.drawing import allowed, draw
from worker.sampling.sampler import Choice, SamplingState, choose

VOCAB = 50


def state(generated: tuple[int, ...] = (), **settings: object) -> SamplingState:
    return SamplingState.start(Sampling(**{"seed": 1} | settings), [1, 2, 3], list(generated))


def choose_all(logits: torch.Tensor, states: list[SamplingState]) -> list[Choice]:
    return [choose(row, state) for row, state in zip(logits.numpy(), states, strict=True)]


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def pick(logits: list[float], chosen: SamplingState) -> int:
    return choose_all(torch.tensor([logits]), [chosen])[0].token


def drawn(logits: list[float], **settings: object) -> set[int]:
    """Every token that 300 seeds draw."""
    row = torch.tensor(logits)
    states = [state(seed=seed, **settings) for seed in range(300)]
    return {c.token for c in choose_all(row.expand(300, -1), states)}


def test_temperature_zero_takes_the_best_and_the_lowest_id_among_equals() -> None:
    assert pick([0.0, 3.0, 1.0, 3.0], state(temperature=0)) == 1
    many = torch.zeros(4, 100_003)
    many[:, [70, 5000, 99_999]] = 9.0
    assert [c.token for c in choose_all(many, [state(temperature=0)] * 4)] == [70] * 4


def test_temperature_zero_ignores_the_limits_and_heeds_bias_and_penalties() -> None:
    assert pick([1.0, 2.0, 0.0], state(temperature=0, top_k=1, top_p=0.1, min_p=0.9)) == 1
    assert pick([1.0, 2.0, 0.0], state(temperature=0, logit_bias={2: 5.0})) == 2
    assert pick([1.0, 2.0, 0.0], state((1,), temperature=0, presence_penalty=1.5)) == 0
    assert pick([1.0, 2.0, 0.0], state((1, 1), temperature=0, frequency_penalty=0.4)) == 1
    assert pick([1.0, 2.0, 0.0], state((1, 1, 1), temperature=0, frequency_penalty=0.4)) == 0


def test_penalties_count_generated_tokens_and_not_the_prompt() -> None:
    chosen = state(temperature=0, presence_penalty=2.0)
    assert pick([0.0, 2.0, 1.5, 1.0], chosen) == 1  # token 1 is in the prompt
    chosen.took(1)
    assert pick([0.0, 2.0, 1.5, 1.0], chosen) == 2


def test_a_bias_outside_the_vocabulary_is_harmless() -> None:
    assert pick([1.0, 2.0], state(temperature=0, logit_bias={7: 100.0})) == 1


def test_limits_cut_what_can_be_drawn() -> None:
    even = [0.0, 0.1, 0.2, 0.3, 0.4]
    assert drawn(even) == {0, 1, 2, 3, 4}
    assert drawn(even, top_k=2) == {3, 4}
    assert drawn(even, top_k=99) == {0, 1, 2, 3, 4}
    logs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert drawn(logs, top_p=0.5) == {0}
    assert drawn(logs, top_p=0.79) == {0, 1}
    assert drawn(logs, top_p=1e-9) == {0}
    assert drawn(logs, min_p=0.25) == {0, 1, 2}
    assert drawn(logs, min_p=1.0) == {0}
    assert drawn(logs, logit_bias={1: -100.0}) == {0, 2, 3}


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=30), st.integers(0, 40), st.floats(0.01, 1.0), st.floats(0.0, 1.0)
)
def test_limits_keep_a_best_token_and_never_a_worse_one_before_a_better(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.tensor(logits, dtype=torch.float64)
    kept = torch.from_numpy(allowed(row.numpy(), Sampling(top_k=top_k, top_p=top_p, min_p=min_p)))
    assert kept.any()
    if not kept.all():
        assert row[kept].min() >= row[~kept].max()
    if top_k:
        assert kept.sum() <= top_k
    probabilities = row.softmax(0)
    if not top_k and not min_p:
        assert probabilities[kept].sum() >= top_p - 1e-9


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    states = [state(seed=n) for n in range(4000)]
    tokens = torch.tensor([c.token for c in choose_all(logits.expand(4000, -1), states)])
    shares = torch.bincount(tokens, minlength=3) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.6, 0.3, 0.1]), atol=0.03, rtol=0)


def test_temperature_sharpens_and_the_smallest_one_is_still_a_number() -> None:
    assert drawn([0.0, 1.0, 0.5], temperature=0.01) == {1}
    assert drawn([0.0, 1.0, 0.5], temperature=1e-300) == {1}


def test_a_row_is_drawn_alike_alone_in_a_batch_and_after_resuming() -> None:
    logits = rows(12)
    together = [state(seed=100 + i, temperature=0.9, top_p=0.95) for i in range(12)]
    batch = [c.token for c in choose_all(logits, together)]
    alone = [
        choose_all(logits[i : i + 1], [state(seed=100 + i, temperature=0.9, top_p=0.95)])[0].token
        for i in reversed(range(12))
    ]
    assert batch == alone[::-1]

    first = state(seed=5)
    tokens = []
    for row in logits:
        tokens.append(choose_all(row[None], [first])[0].token)
        first.took(tokens[-1])
    resumed = state(tuple(tokens[:7]), seed=5)
    for row, expected in zip(logits[7:], tokens[7:], strict=True):
        assert choose_all(row[None], [resumed])[0].token == expected
        resumed.took(expected)
    assert len(set(tokens)) > 3


def test_rounding_noise_in_the_logits_does_not_change_a_draw() -> None:
    logits = rows(200)
    noisy = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(9)) * 1e-6
    states = [state(seed=n) for n in range(200)]
    assert [c.token for c in choose_all(logits, states)] == [c.token for c in choose_all(noisy, states)]


def test_without_a_seed_one_is_drawn() -> None:
    assert len({state(seed=None).seed for _ in range(5)}) == 5


def test_seeds_of_any_size_work() -> None:
    for seed in (-1, 0, 2**63, -(2**63)):
        assert 0 <= state(seed=seed).uniform() < 1


def test_log_probabilities_are_the_models_own() -> None:
    logits = rows(3)
    before = logits.clone()
    states = [
        state(temperature=0, logprobs=3, logit_bias={4: 99.0}),
        state(temperature=0),
        state(logprobs=0, temperature=2.0),
    ]
    first, second, third = choose_all(logits, states)
    expected = before.log_softmax(-1)
    assert first.token == 4 and first.logprob == pytest.approx(float(expected[0, 4]))
    assert first.top is not None and [i for i, _ in first.top] == before[0].topk(3).indices.tolist()
    assert [p for _, p in first.top] == pytest.approx(expected[0].topk(3).values.tolist())
    assert second.logprob is None and second.top is None
    assert third.top == [] and third.logprob == pytest.approx(float(expected[2, third.token]))
    assert torch.equal(logits, before)


def test_a_repetition_penalty_counts_prompt_and_answer_whatever_the_sign() -> None:
    chosen = state(temperature=0, repetition_penalty=2.0)
    assert pick([0.0, 3.0, 1.0, 0.5, 2.0], chosen) == 4  # token 1 is in the prompt: 3 / 2 < 2
    chosen.took(4)
    assert pick([0.0, 3.0, 1.0, 0.5, 2.0], chosen) == 1
    assert pick([-3.0, -1.0, -9.0, -9.0], state(temperature=0, repetition_penalty=4.0)) == 0  # -1 * 4 < -3
    assert pick([0.0, 3.0, 1.0], state(temperature=0, repetition_penalty=1.0)) == 1
    resumed = state((4,), temperature=0, repetition_penalty=2.0)
    assert pick([0.0, 3.0, 1.0, 0.5, 2.0], resumed) == 1


def test_no_end_is_chosen_before_min_tokens() -> None:
    chosen = SamplingState.start(Sampling(temperature=0, min_tokens=2, stop_token_ids=[1]), [9], [], frozenset({0}))
    for expected in (2, 2, 0):
        assert pick([3.0, 2.0, 1.0], chosen) == expected
        chosen.took(expected)
    drawing = SamplingState.start(Sampling(seed=3, min_tokens=1), [9], [], frozenset({0, 1}))
    assert pick([50.0, 50.0, 1.0], drawing) == 2


class Only:
    """Allows these tokens, and those that were taken no more."""

    def __init__(self, *tokens: int) -> None:
        self.left = set(tokens)

    def allowed(self) -> np.ndarray:
        return np.array([t in self.left for t in range(VOCAB)])

    def took(self, token: int) -> None:
        self.left.discard(token)


def test_a_constraint_limits_its_own_row_and_no_other() -> None:
    logits = rows(3)
    guided = SamplingState.start(Sampling(temperature=0, logprobs=0), [1], constraint=Only(7, 8))
    drawn_ = SamplingState.start(
        Sampling(temperature=1.0, seed=2, top_k=1, logit_bias={3: 100.0}), [1], constraint=Only(7, 8)
    )
    plain = state(temperature=0)
    chosen = choose_all(logits, [guided, drawn_, plain])
    assert [c.token for c in chosen][:2] == [7 + int(logits[0, 8] > logits[0, 7]), 7 + int(logits[1, 8] > logits[1, 7])]
    assert chosen[2].token == int(logits[2].argmax())
    assert chosen[0].logprob == pytest.approx(float(logits.log_softmax(-1)[0, chosen[0].token]))
    guided.took(chosen[0].token)
    assert choose_all(logits[:1], [guided])[0].token == 15 - chosen[0].token


@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.sampled_from([0, 1, 7, 200]),
    st.sampled_from([1.0, 0.99, 0.6]),
    st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=200, deadline=None)
def test_limits_are_those_of_a_sorted_vocabulary(
    seed: int, vocabulary: int, top_k: int, top_p: float, min_p: float
) -> None:
    """As a sort in double precision says, with ties between low-precision values, and rows where much is forbidden."""
    rng = np.random.default_rng(seed)
    row = np.round(rng.normal(0, 2, vocabulary), 1).astype(np.float32)
    row[rng.random(vocabulary) < 0.3] = -np.inf
    row[rng.integers(vocabulary)] = 1.0
    s = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    order = np.lexsort((np.arange(vocabulary), -row))
    count = int((row.astype(np.float64) >= float(row.max()) + np.log(min_p)).sum()) if min_p else vocabulary
    count = min(count, top_k or vocabulary)
    weights = np.exp(row[order[:count]].astype(np.float64) - float(row.max()))
    reached = weights.cumsum() / weights.sum()
    kept = np.flatnonzero(allowed(row - row.max(), s))
    exact = min(int((reached < top_p).sum()) + 1, count) if top_p < 1 else count
    off = abs(len(kept) - exact)
    if off:  # only where rounding decides
        assert off <= 1 and (abs(reached[min(exact, len(kept)) - 1] - top_p) < 1e-5 or min_p)
    assert set(kept) == set(order[: len(kept)])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=2000), st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_a_walk_ends_where_the_weights_say_and_never_at_one_without(given_: list[float], uniform: float) -> None:
    weights = np.array([*given_, 0.5, 0.0], np.float32)
    with np.errstate(divide="ignore"):
        token = draw(np.log(weights), Sampling(), uniform)
    upto = weights.astype(np.float64).cumsum() / weights.astype(np.float64).sum()
    assert weights[token] > 0
    assert upto[token] >= uniform - 1e-5 and (token == 0 or upto[token - 1] <= uniform + 1e-5)
