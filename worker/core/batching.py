"""Who runs in the next step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.sequence import Sequence


def choose(running: Iterable[Sequence], max_batch: int, step_tokens: int) -> list[tuple[Sequence, int]]:
    """(sequence, tokens) of one step: decodes first, then prefills in order of priority while the budget lasts.

    A prefill is cut to what is left of the budget (chunked prefill, Sarathi-Serve), so that decodes go on beside it.
    """
    ordered = sorted(running, key=lambda s: (s.pending > 1, s.priority))
    chosen: list[tuple[Sequence, int]] = []
    left = step_tokens
    for sequence in ordered[:max_batch]:
        if left <= 0:
            break
        count = min(sequence.pending, left)
        chosen.append((sequence, count))
        left -= count
    return chosen


def victim(running: Iterable[Sequence]) -> Sequence:
    """The sequence that is preempted when pages run out: the least urgent, then the youngest."""
    return max(running, key=lambda s: s.priority)
