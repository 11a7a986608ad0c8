"""Whoever computes touches no page that a sequence has passed in layers with a window: there may be none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.test_kernels import WAYS, bench_by
from tests.worker.test_models_against_transformers import Bench, prompt, reference
from worker.core.block import NO_PAGE
from worker.core.windowed import Windowed

PREFIX, END = 150, 203


def logits(bench: Bench, pages: np.ndarray, tokens: list[int]) -> list[torch.Tensor]:
    """Of what follows the prefix: a piece of a prompt, then single tokens, beside a short sequence."""
    other, beside = bench.pages(40), prompt(40, 1)
    found = [bench.step(bench.cut(other, beside, 0, 39), bench.cut(pages, tokens, PREFIX, 200))]
    for end in range(201, END + 1):
        found.append(bench.step(bench.cut(pages, tokens, end - 1, end), bench.cut(other, beside, 39, 40)))
    return found


def checked(bench: Bench) -> None:
    tokens, pages, windowed = prompt(END), bench.pages(END), Windowed.of(bench.model.shape)
    bench.step(bench.cut(pages, tokens, 0, PREFIX))
    expected = logits(bench, pages, tokens)
    passed = windowed.passed(PREFIX)
    assert passed > 2 and not windowed.layers.all()
    for page in pages[windowed.layers, :passed].ravel().tolist():
        bench.kv.page_bytes_view(page)[:] = 0xFF
    less = pages.copy()
    less[windowed.layers, :passed] = NO_PAGE
    for got, those in zip(logits(bench, less, tokens), expected, strict=True):
        assert torch.equal(got, those)
    less[windowed.layers, passed] = bench.pages(1)[0, 0]  # not written: NaN
    assert not torch.equal(logits(bench, less, tokens)[0], expected[0]), "the next page is read"


@pytest.mark.parametrize("way", WAYS)
def test_compiled_kernels_begin_at_the_window(way: str, tmp_path: Path) -> None:
    reference(tmp_path, "gemma3-wide")
    checked(bench_by(way, tmp_path))


def test_torch_begins_at_the_window(tmp_path: Path) -> None:
    reference(tmp_path, "gemma3")
    checked(Bench(tmp_path))
