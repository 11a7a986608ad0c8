"""The window of frozen layers: its size, which layer leaves, which comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker.core.window import Window, coming, leaving, order_of_use, reserve_bytes, window_layers


@pytest.mark.parametrize(
    ("free", "layers"), [(0, 0), (100, 0), (129, 0), (130, 2), (159, 2), (160, 3), (370, 10), (10_000, 10)]
)
def test_the_window_is_what_is_free_beyond_the_reserve(free: int, layers: int) -> None:
    assert window_layers(free, 70, 30, 10) == layers


def test_a_model_of_one_layer_needs_one() -> None:
    assert window_layers(100, 70, 30, 1) == 1 and window_layers(99, 70, 30, 1) == 0


def test_the_reserve_is_the_papers() -> None:
    assert reserve_bytes(0.025, 64, 131_072) == 64 * 131_072 // 2
    assert reserve_bytes(0.0, 64, 131_072) == 0


def test_layers_are_used_forward_and_then_backward() -> None:
    assert order_of_use(1, True, 4) == [1, 2, 3, 0]
    assert order_of_use(1, False, 4) == [1, 0, 2, 3]
    assert order_of_use(3, True, 4) == order_of_use(3, False, 4) == [3, 2, 1, 0]
    assert order_of_use(0, False, 4) == [0, 1, 2, 3]


def test_the_layer_used_latest_leaves_first_and_the_computed_one_stays() -> None:
    assert leaving([0, 1, 2, 3], 1, True, 6) == [0, 3, 2]
    assert leaving([0, 1, 5], 5, False, 6) == [0, 1]
    assert leaving([2], 2, True, 6) == []


def test_the_next_layers_come_in_the_order_of_use() -> None:
    assert coming([2], 2, True, 6, 3) == [3, 4]
    assert coming([4, 5], 5, True, 6, 4) == [3, 2]
    assert coming([0, 1, 2], 1, False, 6, 3) == []


@given(st.integers(1, 40), st.data())
def test_what_leaves_is_used_no_earlier_than_what_stays(layers: int, data: st.DataObject) -> None:
    at, forward = data.draw(st.integers(0, layers - 1)), data.draw(st.booleans())
    here = data.draw(st.sets(st.integers(0, layers - 1)))
    start = at if forward else 2 * layers - 1 - at

    def until(layer: int) -> int:
        return min((place - start) % (2 * layers) for place in (layer, 2 * layers - 1 - layer))

    left = leaving(here, at, forward, layers)
    assert sorted(left) == sorted(here - {at})
    assert [until(layer) for layer in left] == sorted((until(layer) for layer in left), reverse=True)
    window = data.draw(st.integers(0, layers))
    come = coming(here, at, forward, layers, window)
    assert not here & set(come) and [until(layer) for layer in come] == sorted(until(layer) for layer in come)


@given(st.integers(0, 10_000), st.integers(0, 1000), st.integers(1, 300), st.integers(1, 100))
def test_a_window_fits_and_is_none_of_one_layer(free: int, reserve: int, granules: int, layers: int) -> None:
    window = window_layers(free, reserve, granules, layers)
    assert window == 0 or (min(2, layers) <= window <= layers and window * granules <= free - reserve)


def test_a_layer_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 4"):
        order_of_use(4, True, 4)


def passes(window: Window, layers: int, times: int) -> list[int]:
    """Compute forward and backward, each layer as soon as it is here. Returns the copies."""
    copies = []
    for _ in range(times):
        for layer, forward in [(n, True) for n in range(layers)] + [(n, False) for n in reversed(range(layers))]:
            window.compute(layer, forward)
            while True:
                _, copied = window.copy_next()
                if copied is not None:
                    copies.append(copied)
                window.validate()
                if window.ready and copied is None:
                    break
                window.came()
    return copies


def test_a_window_of_all_layers_copies_each_once() -> None:
    window = Window(6, 10)
    assert window.resize(60, 0) == [] and window.size == 6
    assert sorted(passes(window, 6, 3)) == list(range(6)) and window.granules == 60


def test_a_smaller_window_copies_what_does_not_fit_once_a_pass() -> None:
    window = Window(6, 10)
    window.resize(40, 0)
    passes(window, 6, 1)
    assert len(passes(window, 6, 5)) == 5 * 2 * (6 - 4), "at each turn, four layers are here"


def test_inference_gets_its_memory_at_once_and_the_layer_used_latest_leaves_first() -> None:
    window = Window(6, 10)
    window.resize(60, 0)
    passes(window, 6, 1)
    window.compute(2, True)
    assert window.resize(45, 10) == [0, 1, 5] and window.size == 3
    assert window.resize(25, 10) == [4, 3, 2], "not even two fit" and window.size == 0
    assert window.copy_next() == ([], None) and not window.ready
    assert window.resize(30, 10) == [] and window.copy_next() == ([], 2)
    assert window.resize(10, 10) == [2], "a copy under way too"
    window.came()
    assert not window.here
    window.validate()


def test_a_copy_that_is_needed_next_goes_on_while_a_layer_used_later_leaves() -> None:
    window = Window(7, 10)
    window.resize(30, 0)
    for _ in range(2):
        window.copy_next()
        window.came()
    window.compute(2, True)
    assert window.copy_next() == ([], 2)
    assert window.resize(20, 0) == [0] and window.coming == 2 and window.here == {1}


class Machine(RuleBasedStateMachine):
    """Memory comes and goes while layers are computed and copied."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.at = Window(7, 3), 0

    @rule(free=st.integers(0, 30), reserve=st.integers(0, 5))
    def resize(self, free: int, reserve: int) -> None:
        before = set(self.window.here)
        coming_before = self.window.coming
        left = self.window.resize(free, reserve)
        assert self.window.granules <= max(free - reserve, 0) or self.window.granules == 0
        assert set(left) == (before - self.window.here) | ({coming_before} - {self.window.coming} - {None})
        assert self.window.at not in left or not self.window.granules, "what is computed leaves last"

    @rule()
    def goes_on(self) -> None:
        if self.window.ready:
            self.at = (self.at + 1) % 14
            self.window.compute(min(self.at, 13 - self.at), self.at < 7)

    @rule()
    def copies(self) -> None:
        was_ready = self.window.ready
        left, copied = self.window.copy_next()
        assert self.window.at not in left and self.window.ready == was_ready
        assert copied is not None or not left
        if not was_ready and copied is not None:
            assert copied == self.window.at, "the layer that is needed comes first"

    @rule()
    def came(self) -> None:
        self.window.came()

    @invariant()
    def holds(self) -> None:
        self.window.validate()


TestMachine = Machine.TestCase
