"""LoRA adapters on the CUDA path: each row of a batch gets what the merged model gives, alone and beside others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.harness import DEVICE, HERE
from tests.gpu.test_runner import Bench
from tests.worker.lora import Lora, make_adapter, merged
from tests.worker.test_models_against_transformers import prompt, reference
from worker.kernels.cuda.low_rank import add_low_rank

pytestmark = HERE
KINDS = (Lora(rank=4), Lora(rank=3, targets=("q_proj", "v_proj", "down_proj"), rslora=True, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("segments", "rank", "inputs"), [((48, 16, 16), 5, 200), ((80, 80), 16, 96), ((96,), 1, 130)])
def test_each_row_gets_its_own_adapters_product_and_others_stay(
    segments: tuple[int, ...], rank: int, inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    outputs, numbers = sum(segments), [2, -1, 0, 2, 1, -1]
    x, base = (torch.randn(6, n, device=DEVICE).to(dtype) for n in (inputs, outputs))
    a = torch.randn(3, len(segments) * rank, inputs, device=DEVICE).to(dtype)
    b = torch.randn(3, outputs, rank, device=DEVICE).to(dtype)

    def computed(rows: list[int]) -> torch.Tensor:
        out = base[rows].clone()
        low = torch.full((len(rows) * a.shape[1],), float("nan"), device=DEVICE)
        which = torch.tensor([numbers[row] for row in rows], dtype=torch.int32, device=DEVICE)
        add_low_rank(x[rows].contiguous(), a, b, which, out, low, segments)
        return out

    got = computed(list(range(6)))
    for row, number in enumerate(numbers):
        assert torch.equal(computed([row])[0], got[row]), "whatever is beside it"
        expected = base[row].double()
        if number >= 0:
            lows = (a[number].double() @ x[row].double()).split(rank)
            parts = b[number].double().split(segments)
            expected = expected + torch.cat([part @ t for part, t in zip(parts, lows, strict=True)])
            torch.testing.assert_close(
                got[row].double(), expected, atol=1e-3, rtol=1e-2 if dtype.itemsize == 2 else 1e-5
            )
        else:
            assert torch.equal(got[row], base[row])


@pytest.mark.slow
@pytest.mark.sample
def test_base_and_adapters_in_one_batch_give_what_the_merged_models_give(tmp_path: Path) -> None:
    base = reference(tmp_path, "qwen3-biased", num_hidden_layers=2)
    paths = [make_adapter(tmp_path / f"a{n}", base, kind) for n, kind in enumerate(KINDS)]
    models = [base, *(merged(base, path, kind) for path, kind in zip(paths, KINDS, strict=True))]
    bench, tokens = Bench(tmp_path, adapters={path.name: path for path in paths}), prompt(12)
    with torch.no_grad():
        theirs = torch.stack([model(torch.tensor([tokens])).logits[0] for model in models])
    pages = [bench.pages(12) for _ in models]
    order = (1, 0, 2)
    for start, end in ((0, 8), (8, 9), (9, 10), (10, 11), (11, 12)):  # decodes: compiled, captured, replayed
        got = bench.step(*(bench.cut(pages[n], tokens, start, end, adapter=n - 1) for n in order))
        torch.testing.assert_close(got, theirs[list(order), end - 1], atol=2e-4, rtol=2e-4)
    again = bench.step(*(bench.cut(pages[n], tokens, 11, 12, adapter=n - 1) for n in (2, 1, 0)))
    torch.testing.assert_close(again, theirs[[2, 1, 0], 11], atol=2e-4, rtol=2e-4)
    for _ in range(3):
        plain = bench.step(bench.cut(pages[0], tokens, 11, 12))
        torch.testing.assert_close(plain[0], theirs[0, 11], atol=2e-4, rtol=2e-4)
    assert {adapted for _, _, adapted in bench.runner.graphs} == {True, False}


def test_batch_invariant_rows_have_the_same_bits_with_any_adapters_beside_them(
    tmp_path: Path, rows_multiplied_alone: None
) -> None:
    base = reference(tmp_path, "qwen3", num_hidden_layers=1)
    paths = {f"a{n}": make_adapter(tmp_path / f"a{n}", base, kind) for n, kind in enumerate(KINDS)}
    bench, tokens = Bench(tmp_path, batch_invariant=True, adapters=paths), prompt(7)
    alone = {n: bench.step(bench.cut(bench.pages(7), tokens, 0, 7, adapter=n))[0] for n in (-1, 0, 1)}
    pages = {n: bench.pages(7) for n in alone}
    bench.step(*(bench.cut(pages[n], tokens, 0, 6, adapter=n) for n in (1, -1, 0)))
    got = bench.step(*(bench.cut(pages[n], tokens, 6, 7, adapter=n) for n in (0, 1, -1)))
    for row, n in zip(got, (0, 1, -1), strict=True):
        assert torch.equal(row, alone[n])
