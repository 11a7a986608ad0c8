"""Whoever computes touches no page that a sequence has passed in layers with a window: there may be none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.test_kernels import WAYS, bench_by
from tests.worker.test_models_against_transformers import Bench, prompt, reference
from worker.core.block import NO_PAGE
from worker.core.windowed import Windowed


def logits(bench: Any, pages: np.ndarray, tokens: list[int], prefix: int) -> list[torch.Tensor]:
    """Of what follows the prefix: a piece of a prompt, then single tokens, beside a short sequence."""
    other, beside, end = bench.pages(20), prompt(20, 1), len(tokens) - 2
    found = [bench.step(bench.cut(other, beside, 0, 19), bench.cut(pages, tokens, prefix, end))]
    for at in range(end, len(tokens)):
        found.append(bench.step(bench.cut(pages, tokens, at, at + 1), bench.cut(other, beside, 19, 20)))
    return found


def checked(bench: Any, prefix: int = 150, count: int = 203) -> None:
    """bench: a `Bench`, of whatever device, with a window of 24 tokens."""
    tokens, pages, windowed = prompt(count), bench.pages(count), Windowed.of(bench.model.shape)
    bench.step(bench.cut(pages, tokens, 0, prefix))
    expected = logits(bench, pages, tokens, prefix)
    passed = windowed.passed(prefix)
    assert passed and not windowed.layers.all()
    gone = torch.from_numpy(pages[windowed.layers, :passed].ravel()).to(bench.kv.memory.device)
    bench.kv.clear(gone)
    less = pages.copy()
    less[windowed.layers, :passed] = NO_PAGE
    for got, those in zip(logits(bench, less, tokens, prefix), expected, strict=True):
        assert torch.equal(got, those)
    less[windowed.layers, passed] = bench.pages(1)[0, 0]  # not written: NaN
    assert not torch.equal(logits(bench, less, tokens, prefix)[0], expected[0]), "the next page is read"


@pytest.mark.parametrize("way", WAYS)
def test_compiled_kernels_begin_at_the_window(way: str, tmp_path: Path) -> None:
    reference(tmp_path, "gemma3-wide")
    checked(bench_by(way, tmp_path))


def test_torch_begins_at_the_window(tmp_path: Path) -> None:
    reference(tmp_path, "gemma3")
    checked(Bench(tmp_path))
