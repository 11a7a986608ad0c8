"""Ranges joined to fewer ones move the same bytes."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.contiguous import joined

_RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 3)), max_size=8)


def _bytes(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(there + i, here + i) for there, here, length in ranges for i in range(length)]


@settings(deadline=None)
@given(_RANGES)
def test_the_same_bytes_are_moved_in_the_same_order(ranges: list[tuple[int, int, int]]) -> None:
    found = list(joined(ranges))
    assert _bytes(found) == _bytes(ranges)
    assert all(b[:2] != (a[0] + a[2], a[1] + a[2]) for a, b in itertools.pairwise(found)), "no two could be one"


def test_what_follows_in_one_memory_only_is_not_joined() -> None:
    assert list(joined([(0, 0, 4), (4, 8, 4), (8, 12, 4), (20, 16, 4)])) == [(0, 0, 4), (4, 8, 8), (20, 16, 4)]
    assert list(joined([])) == []
