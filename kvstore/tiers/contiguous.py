"""Merges ranges to transfer, because a transfer's overhead grows with their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def joined(ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Each (offset there, offset here, length), with ranges that are adjacent in both memories merged."""
    there = here = length = 0
    for next_there, next_here, more in ranges:
        if length and there + length == next_there and here + length == next_here:
            length += more
            continue
        if length:
            yield there, here, length
        there, here, length = next_there, next_here, more
    if length:
        yield there, here, length
