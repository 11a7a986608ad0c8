"""When a choice of a prompt waits for another one to compute what both need (OpenAI's `n`)."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.sequence import Sequence


def awaits_prompt(sequence: Sequence, others: Iterable[Sequence], chunk_tokens: int) -> bool:
    """Whether a waiting choice should stay so, because an earlier one of its group is still computing the prompt's full chunks, which
    it can use then. The earliest never waits, so that one of them always goes on. Means nothing without a cache."""
    group = sequence.request.group
    shared = (sequence.prompt_tokens - 1) // chunk_tokens * chunk_tokens
    if not group or not shared:
        return False
    return any(o.request.group == group and o.arrival < sequence.arrival and o.computed < shared for o in others)
