"""Layers with a sliding window: which chunks of a prefix later tokens do not read in them.

A token sees the last `window` tokens, itself included. So after `tokens` tokens, chunks that end before the window of
the next one are read no more in such a layer. They are *passed*.
"""

from __future__ import annotations

from collections.abc import Sequence


def longest_window(windows: Sequence[int]) -> int:
    """The longest of the layers' windows, which counts for all that have one; 0: no layer has. windows: of each layer;
    0: none. At least 2, as a window of one token would leave nothing of a prefix to read."""
    longest = max(windows, default=0)
    return max(longest, 2) if longest else 0


def passed(tokens: int, window: int, chunk_tokens: int) -> int:
    """Number of leading chunks that are passed after `tokens` tokens. window: see `longest_window`."""
    return max(tokens - window + 1, 0) // chunk_tokens if window else 0
