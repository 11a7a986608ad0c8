"""The CUDA runner with weights of few bits: logits of transformers with the same numbers, and rows whose bits are their
own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.harness import DEVICE, HERE
from tests.gpu.test_runner import Bench
from tests.worker.test_models_against_transformers import prompt
from tests.worker.test_quantised import quantised
from worker.kernels.cuda.quantised import quantised_product
from worker.models.quantised import QuantisedMatrix

pytestmark = HERE


@pytest.mark.parametrize(
    "name", ["gptq-4-act-order", *(pytest.param(n, marks=pytest.mark.slow) for n in ("awq", "gptq-8", "fp8-blocks"))]
)
def test_logits_equal_those_of_transformers_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    theirs_model = quantised(tmp_path, name, num_hidden_layers=2)
    bench, tokens = Bench(tmp_path), prompt(24)
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0]
    pages = bench.pages(24)
    for start, end in ((0, 21), (21, 22), (22, 23), (23, 24)):
        got = bench.step(bench.cut(pages, tokens, start, end))
        torch.testing.assert_close(got[0], theirs[end - 1], atol=2e-4, rtol=2e-4)
    assert bench.runner.graphs


def matrix(code: str, outputs: int, inputs: int, group: int, scattered: bool) -> QuantisedMatrix:
    """Random codes on the device."""
    torch.manual_seed(1)
    groups = -(-inputs // group)
    codes = torch.randint(0, 126, (outputs, inputs // 2 if code == "int4" else inputs), dtype=torch.uint8)
    codes += torch.randint(0, 2, codes.shape, dtype=torch.uint8) * 128
    scales = torch.rand(outputs, groups).half() / 100
    zeros = (
        None if code == "fp8" else torch.randint(0, 16 if code == "int4" else 256, (outputs, groups), dtype=torch.uint8)
    )
    group_of = torch.randint(0, groups, (inputs,), dtype=torch.int32) if scattered else None
    parts = [t if t is None else t.to(DEVICE) for t in (codes, scales, zeros, group_of)]
    return QuantisedMatrix(code, parts[0], parts[1], parts[2], parts[3], inputs, group)


@pytest.mark.parametrize("code", ["int4", "int8", "fp8"])
@pytest.mark.parametrize(
    ("inputs", "group", "scattered"), [(160, 160, False), (192, 64, False), (160, 32, False), (96, 32, True)]
)
def test_products_are_those_of_the_dequantised_matrix_and_a_rows_bits_are_its_own(
    code: str, inputs: int, group: int, scattered: bool
) -> None:
    w = matrix(code, 80, inputs, group, scattered)
    x, bias = torch.randn(20, inputs, device=DEVICE), torch.randn(80, device=DEVICE)
    out, alone = torch.empty(20, 80, device=DEVICE), torch.empty(1, 80, device=DEVICE)
    quantised_product(x, w, bias, out, batch_invariant=True)
    torch.testing.assert_close(out, x @ w.dequantised(torch.float32).T + bias, atol=1e-3, rtol=1e-3)
    beside, whole = torch.randn(64, inputs, device=DEVICE), torch.empty(64, 80, device=DEVICE)
    beside[7] = x[7]
    quantised_product(beside, w, bias, whole, batch_invariant=True)
    assert torch.equal(whole[7], out[7])
    quantised_product(x[7:8], w, bias, alone, batch_invariant=False)
    torch.testing.assert_close(alone[0], out[7], atol=1e-3, rtol=1e-3)
