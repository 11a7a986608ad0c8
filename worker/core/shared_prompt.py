"""Choices of one prompt (OpenAI's `n`): one computes the prompt, the others wait and use its KV."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.sequence import Sequence


def awaits_prompt(sequence: Sequence, others: Iterable[Sequence], chunk_tokens: int) -> bool:
    """Whether a waiting choice should keep waiting, because an earlier choice of its group is still computing the
    prompt's full chunks. The earliest choice never waits. Only meaningful with the cache on."""
    group = sequence.request.group
    shared = (sequence.prompt_tokens - 1) // chunk_tokens * chunk_tokens
    if not group or not shared:
        return False
    return any(o.request.group == group and o.arrival < sequence.arrival and o.computed < shared for o in others)
