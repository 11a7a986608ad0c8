"""Measures the parts of a returning turn that are not compute, and the cost of write-back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from ours import Ours

from contracts.kv import chunk_keys

REPETITIONS = 7
CONTEXT_TOKENS, ANSWER_TOKENS, PREFILL_TOKENS = 256, 193, 1500


def without_compute(ours: Ours, prompt: list[int]) -> dict[str, Any]:
    """Milliseconds of each part, medians."""
    executor, codec = ours.engine.executor, ours.engine.codec
    text = codec.decode(prompt)
    count = len(prompt) // executor.shape.chunk_tokens * executor.shape.layers
    size = executor.shape.piece_bytes
    pages = np.arange(min(count, executor.kv.pages_per_slab * len(executor.kv.mapped_slabs)), dtype=np.int64)
    target = np.zeros((len(pages) + 1) * size, np.uint8)
    return {
        "tokenising the prompt's text": _ms(lambda: codec.encode(text)),
        "chunk keys of the prompt": _ms(lambda: chunk_keys(b"s" * 32, executor.shape, prompt)),
        "copying as many pieces": _ms(lambda: executor.loader.copier.save(target, pages * size, pages)),
        "asking the store for a chunk nobody has": ours.question_ms(REPETITIONS),
    }


def write_back(ours: Ours, words: Callable[[int], list[int]], pairs: int) -> dict[str, Any]:
    """A decode step and a prefill without write-back (`kv.cache` off) and with it, in milliseconds, and ratios."""
    steps: dict[bool, list[float]] = {True: [], False: []}
    tails: dict[bool, list[float]] = {True: [], False: []}
    prefills: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for on in (True, False) if pair % 2 else (False, True):
            ours.settle()
            ours.switch(cache=on)
            _, turn = ours.ask(f"decode-{pair}-{on}", words(CONTEXT_TOKENS), ANSWER_TOKENS)
            gaps = sorted(1e3 * (b - a) for a, b in zip(turn.came_s, turn.came_s[1:], strict=False))
            steps[on].append(statistics.fmean(gaps))
            tails[on].append(gaps[int(0.98 * len(gaps))])
            prefills[on].append(1e3 * ours.ask(f"prefill-{pair}-{on}", words(PREFILL_TOKENS))[0])
            ours.switch(cache=True)
    return {
        f"{name}, write-back on / off (ms; median of ratios)": (
            round(statistics.median(found[True]), 2),
            round(statistics.median(found[False]), 2),
            round(statistics.median(a / b for a, b in zip(found[True], found[False], strict=True)), 3),
        )
        for name, found in (
            ("decode step, mean", steps),
            ("decode step, 98th percentile", tails),
            ("prefill of 1,500 tokens", prefills),
        )
    }


def _ms(doing: Callable[[], object]) -> float:
    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        doing()
        times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times), 3)
