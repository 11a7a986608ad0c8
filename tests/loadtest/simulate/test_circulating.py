"""Steps of a model whose layers take turns: they wait for copies where equations (4) and (5) of MIRAGE do not hold, and
only there."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.simulate.circulating import CirculatingCosts, periodic_step_s
from worker.core.lending import circulating


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, int, float, float]:
    layers, slots = draw(st.integers(3, 80)), draw(st.integers(1, 2))
    lent = draw(st.integers(1, layers - slots))
    ratio = draw(st.floats(0.05, 12.0))
    return layers, lent, slots, 1e-3, ratio * 1e-3


def copied(lent: int, slots: int) -> int:
    """Copies of a step: a slot of one layer keeps it."""
    return 2 if (lent, slots) == (1, 2) else lent + slots


def step_s(layers: int, lent: int, slots: int, layer_s: float, transfer_s: float) -> float:
    return periodic_step_s(layers, circulating(layers, lent, slots), slots, layer_s, transfer_s)


@given(pipelines())
def test_with_one_slot_each_gap_takes_the_longer_of_its_layers_and_its_copy(
    at: tuple[int, int, int, float, float],
) -> None:
    layers, lent, _, layer_s, transfer_s = at
    chosen = circulating(layers, lent, 1)
    gaps = [b - a for a, b in itertools.pairwise([*chosen, chosen[0] + layers])]
    exact_s = sum(layer_s + max((gap - 1) * layer_s, transfer_s) for gap in gaps)
    assert step_s(layers, lent, 1, layer_s, transfer_s) == pytest.approx(exact_s)


@given(pipelines())
def test_a_step_is_bounded_by_computing_copying_and_both_in_turn(at: tuple[int, int, int, float, float]) -> None:
    layers, lent, slots, layer_s, transfer_s = at
    copies = copied(lent, slots)
    found_s = step_s(*at)
    assert found_s >= max(layers * layer_s, copies * transfer_s) * (1 - 1e-9)
    assert found_s <= (layers * layer_s + copies * transfer_s) * (1 + 1e-9)


@given(pipelines())
def test_one_slot_stalls_by_less_than_a_layer_a_gap_where_equation_4_holds_and_stalls_where_it_does_not(
    at: tuple[int, int, int, float, float],
) -> None:
    layers, lent, _, layer_s, transfer_s = at
    stall_s = step_s(layers, lent, 1, layer_s, transfer_s) - layers * layer_s
    if transfer_s * (lent + 1) <= layer_s * (layers - lent - 1):
        assert stall_s <= (lent + 1) * layer_s, "gaps are whole layers"
    else:
        assert stall_s >= transfer_s * (lent + 1) - layer_s * (layers - lent - 1) - 1e-12


@example((39, 2, 2, 1e-3, 0.00978125))  # copies that take 0.3 % longer than a step
@example((34, 25, 2, 1e-3, 0.00125))  # copies that take 0.7 % less: rounded gaps add up to three copies
@given(pipelines())
def test_two_slots_stall_by_less_than_a_copy_and_the_rounding_of_gaps_where_equation_5_has_a_fifth_to_spare(
    at: tuple[int, int, int, float, float],
) -> None:
    layers, lent, _, layer_s, transfer_s = at
    if lent + 2 > layers:
        return
    stall_s = step_s(layers, lent, 2, layer_s, transfer_s) - layers * layer_s
    if transfer_s * (lent + 2) <= 0.8 * layer_s * layers:
        assert stall_s <= transfer_s + 2 * layer_s
    elif transfer_s * (lent + 2) > layer_s * layers:
        assert stall_s >= transfer_s * copied(lent, 2) - layer_s * layers - 1e-12


@given(pipelines())
def test_two_slots_are_no_slower_than_one_for_as_much_memory_within_a_copy(
    at: tuple[int, int, int, float, float],
) -> None:
    layers, lent, _, layer_s, transfer_s = at
    if lent + 2 > layers:
        return
    one, two = (step_s(layers, lent, slots, layer_s, transfer_s) for slots in (1, 2))
    assert two <= one + transfer_s + 2 * layer_s


class Flat:
    """Every step takes a second."""

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        return 1.0 + 0.001 * context_tokens, 0.001

    def mixed_s(self, batch: int, context_tokens: float, prefills: object) -> float:
        return 1.0

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        return 1.0


def test_costs_are_the_model_s_own_until_it_lends_and_then_follow_its_copies() -> None:
    costs = CirculatingCosts(Flat(), 40, transfer_s=0.5)
    assert costs.decode(2, 0.0) == (1.0, 0.001) and costs.mixed_s(0, 0.0, []) == 1.0
    costs.chosen, costs.slots = circulating(40, 8, 2), 2
    first_s, slope_s = costs.decode(2, 0.0)
    assert first_s == pytest.approx(5.0, rel=0.05) and slope_s < 0.0005, "ten copies of half a second, one at a time"
    assert costs.mixed_s(0, 0.0, []) == pytest.approx(first_s)
    costs.chosen, costs.slots = (), 0
    assert costs.prefill_s(1, 0) == 1.0
