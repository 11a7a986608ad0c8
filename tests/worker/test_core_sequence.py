"""Sequences, batches, and when a load lets a sequence start."""

from __future__ import annotations

import pytest

from contracts.errors import IllegalTransition
from contracts.memory.layer_bands import layers_of
from contracts.request import GenerateRequest, Sampling
from storelink.core.load_plan import may_start
from worker.core.pace import Pace
from worker.core.prefetch import Offer, in_order
from worker.core.sequence import TRANSITIONS, Event, Sequence, State


def sequence(arrival: int, tokens: int, computed: int = 0, priority: int = 0, kept: int = 0) -> Sequence:
    request = GenerateRequest(f"r{arrival}", "t", "s", "m", Sampling(), priority=priority, kept_tokens=kept)
    s = Sequence(request, tokens, [1] * tokens, 10, arrival)
    s.computed, s.state = computed, State.RUNNING
    return s


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_only_the_transitions_of_the_table_happen(state: State, event: Event) -> None:
    s = sequence(0, 1)
    s.state = state
    if (state, event) in TRANSITIONS:
        s.on(event)
        assert s.state is TRANSITIONS[(state, event)]
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            s.on(event)


def test_a_sequence_starts_when_no_layer_would_be_waited_for() -> None:
    assert may_start(12, 12, 1.0, 0.0), "all is here"
    assert not may_start(0, 12, 0.001, 1.0), "layer 0 is wanted at once"
    assert may_start(1, 12, layer_load_s=1.0, layer_compute_s=1.0)
    assert not may_start(1, 12, layer_load_s=1.1, layer_compute_s=1.0)
    assert may_start(6, 12, layer_load_s=1.8, layer_compute_s=1.0)


def test_all_sessions_get_their_low_layers_before_any_gets_high_ones() -> None:
    from contracts.ids import SessionKey

    a, b = (Offer(SessionKey("t", n), [], 0, 0.0, arrival, 100) for n, arrival in (("a", 1.0), ("b", 2.0)))
    order = []
    for offer in in_order((a, b), 1.0, lambda offer: offer.band < 2):
        order.append((offer.session.session_id, offer.band))
        offer.band += 1
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [layer for band in range(4) for layer in layers_of(band, 10)] == list(range(10))


def test_pace_is_learned_from_steps_and_prices_what_is_left() -> None:
    pace = Pace()
    for _ in range(200):
        pace.stepped(0.08, prefill_tokens=0, decodes=4)
        pace.stepped(0.54, prefill_tokens=100, decodes=2)
    assert pace.decode_token_s == pytest.approx(0.02, rel=0.01) and pace.prefill_token_s == pytest.approx(
        0.005, rel=0.01
    )
    pace.decode_token_s, pace.prefill_token_s = 0.02, 0.005
    for _ in range(200):
        pace.ended(prefilled=100, generated=5)
    assert pace.request_s == pytest.approx(0.6) and pace.output_tokens == pytest.approx(5)
    fresh, cached, done = sequence(0, 101), sequence(1, 101), sequence(2, 101, computed=100)
    cached.found = 1
    assert sum(pace.outstanding_s([fresh], 64).values()) == pytest.approx(100 * 0.005 + 5 * 0.02)
    assert sum(pace.outstanding_s([cached], 64).values()) == pytest.approx(36 * 0.005 + 5 * 0.02)
    assert pace.outstanding_s([done], 64)[0] == pytest.approx(5 * 0.02)
    waiting = sequence(3, 101, kept=64)
    assert pace.outstanding_s([waiting], 64)[0] == pytest.approx(36 * 0.005 + 5 * 0.02), "before the caches were asked"
    waiting.found = 0
    assert pace.outstanding_s([waiting], 64)[0] == pytest.approx(100 * 0.005 + 5 * 0.02), "they had nothing of it"
    done.request.expected_tokens = 3
    assert pace.outstanding_s([done], 64)[0] == pytest.approx(3 * 0.02)
    done.request.expected_tokens = 10**9
    assert pace.outstanding_s([done], 64)[0] == pytest.approx(done.max_tokens * 0.02)


def test_when_steps_of_a_few_tokens_take_longer_all_estimates_follow_and_none_runs_away() -> None:
    pace = Pace(prefill_token_s=0.0001)
    pace.expect_decodes({1: 0.002, 8: 0.006})
    for step in range(3000):
        decodes, tokens = 1 + step % 5, 4 + step % 20
        pace.stepped(3 * (0.0014 + 0.0006 * decodes + 0.0001 * tokens), prefill_tokens=tokens, decodes=decodes)
    assert pace.prefill_token_s == pytest.approx(0.0003, rel=0.4)
    assert [pace.decode_s(n) for n in (1, 8)] == pytest.approx([0.006, 0.018], rel=0.25)


def test_what_a_sequence_takes_of_the_device_is_its_compute_and_its_share_of_hbm_for_as_long_as_it_stays() -> None:
    pace = Pace(prefill_token_s=0.005, output_tokens=5.0)
    s = sequence(0, 95)
    assert pace.device_s(s, 40, hbm_tokens=1000, step_s=0.1) == pytest.approx(40 * 0.005 + (95 + 5) / 1000 * 5 * 0.1)
    s.request.expected_tokens = 8
    assert pace.device_s(s, 40, hbm_tokens=1000, step_s=0.1) == pytest.approx(40 * 0.005 + 103 / 1000 * 8 * 0.1)
    s.tokens += [1] * 6
    assert pace.device_s(s, 1, hbm_tokens=1000, step_s=0.1) == pytest.approx(0.005 + 103 / 1000 * 2 * 0.1), (
        "two are still to come"
    )


def test_a_request_counts_with_what_it_adds_to_a_step_once_batches_have_varied() -> None:
    pace = Pace()
    for step in range(600):
        batch = 1 + step % 8
        pace.stepped(0.010 + 0.001 * batch, prefill_tokens=0, decodes=batch)
    assert pace.marginal_token_s == pytest.approx(0.001, rel=0.05), "reading the weights is no part of it"
    assert [pace.decode_s(n) for n in (0, 1, 8, 40)] == pytest.approx([0, 0.011, 0.018, 0.050], rel=0.05), (
        "nor paid by each of them"
    )
    expecting = Pace()
    expecting.expect_decodes({1: 0.011, 8: 0.018})
    assert [expecting.decode_s(n) for n in (1, 4, 8, 40)] == pytest.approx([0.011, 0.014, 0.018, 0.050])
    same = Pace()
    for _ in range(600):
        same.stepped(0.018, prefill_tokens=0, decodes=8)
    assert same.extra_token_s is None and same.marginal_token_s == pytest.approx(same.decode_token_s)
