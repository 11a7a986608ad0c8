"""Layers that share slots under the CUDA runner: the bits of prompts and of replayed graphs stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.harness import CUDA, DEVICE, HERE
from tests.gpu.test_runner import Bench
from tests.worker.layers_that_take_turns import LAYERS, change_at_random, image, nine_layers
from worker.memory.cuda_driver import CudaDriver
from worker.memory.cuda_streams import CudaMark
from worker.memory.cuda_weights import WeightCopies
from worker.models.circulating import Circulation, no_mark
from worker.models.filling import host_copy

pytestmark = HERE


@pytest.mark.parametrize("decodes", [pytest.param(False, marks=[pytest.mark.slow, pytest.mark.sample]), True])
def test_lent_returning_and_loaded_layers_give_the_same_bits(tmp_path: Path, decodes: bool) -> None:
    bench = Bench(nine_layers(tmp_path / "nine"))
    host = image(tmp_path, bench.model)
    pages = np.arange(LAYERS * 2, dtype=np.int64).reshape(LAYERS, 2)
    tokens = list(range(3, 20 if CUDA else 8))  # the interpreter takes a second for each token of a prompt
    prompt = bench.cut(pages, tokens, 0, len(tokens) - 1)
    last = bench.cut(pages, tokens, len(tokens) - 1, len(tokens))
    bench.step(prompt)
    fails = [-1]

    def fail(layer: int) -> None:
        fails[0] = layer

    def before(layer: int) -> None:
        if layer == fails[0]:
            fails[0] = -1
            raise InterruptedError

    def step() -> torch.Tensor:
        return bench.runner.step([last if decodes else prompt], before, lambda layer: None)

    copy, mark = host_copy, no_mark
    if CUDA:
        copy = WeightCopies(CudaDriver(), DEVICE).copy
        mark = lambda: CudaMark(bench.queue.stream).wait  # noqa: E731
    rounds = 25 if CUDA else 2 + 4 * decodes  # the interpreter takes seconds for a step
    circulation = Circulation(bench.model, host, copy, mark)
    change_at_random(bench.model, bench.pool, circulation, host, step, fail, seed=decodes, rounds=rounds, copy=copy)
    if decodes:
        places = {layer: 0 for layer, _ in bench.runner.graphs[1, 1, False] or {}}
        for layer, _ in bench.runner.graphs[1, 1, False] or {}:
            places[layer] += 1
        assert max(places.values()) <= 3, "a layer has a graph for its own place and for each slot, made once"
    host.close()
