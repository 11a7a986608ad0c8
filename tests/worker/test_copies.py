"""Runs of pieces arrive byte for byte, whoever copies and however they are aligned; bytes beside them stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kernels.build import library
from worker.memory.copies import SOURCE, Copy, copy_one_by_one, fastest_copy, native_copy

COPIES = {"native": native_copy(library(SOURCE)), "one by one": copy_one_by_one}


@pytest.mark.parametrize("name", COPIES)
@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 1500), st.integers(0, 70), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_every_piece_arrives_and_nothing_else_changes(
    name: str, count: int, size: int, skew_to: int, skew_from: int, seed: int
) -> None:
    copy: Copy = COPIES[name]
    rng = np.random.default_rng(seed)
    stride = size + 100
    source = rng.integers(0, 256, (count + 1) * stride, np.uint8)
    target = rng.integers(0, 256, (count + 1) * stride, np.uint8)
    wanted, order = target.copy(), rng.permutation(count)
    starts = np.arange(count, dtype=np.int64) * stride
    for to, out in zip(starts + skew_to, starts[order] + skew_from, strict=True):
        wanted[to : to + size] = source[out : out + size]
    copy(target.ctypes.data + starts + skew_to, source.ctypes.data + starts[order] + skew_from, size)
    assert (target == wanted).all()


def test_runs_that_do_not_match_are_refused() -> None:
    three, two = np.zeros(3, np.int64), np.zeros(2, np.int64)
    for copy in (*COPIES.values(), fastest_copy()):
        with pytest.raises(ValueError, match=r"3|shorter"):
            copy(three, two, 0)
