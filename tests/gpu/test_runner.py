"""The CUDA runner: logits of transformers whatever is batched, graphs that follow slots, tables that upload what
changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.harness import CUDA, DEVICE, HERE, pool, queue
from tests.worker.owners import KV
from tests.worker.test_models_against_transformers import CHUNK, GRANULE, prompt, reference
from tests.worker.test_models_against_transformers import Bench as HostBench
from tests.worker.test_windows_on_runners import checked
from worker.devices.cuda.runner import CudaRunner
from worker.devices.runner import Slice
from worker.memory.copier import HostFence
from worker.memory.paged_kv import PagedKv
from worker.models.load import load_model
from worker.models.weights import LayerWeights

pytestmark = HERE
Alone = Callable[[list[int]], torch.Tensor]


class Bench:
    """A model on the device of these tests, and sequences whose pages are drawn at random; unwritten memory is NaN."""

    def __init__(
        self, directory: Path, dtype: str = "float32", batch_invariant: bool = False,
        adapters: dict[str, Path] | None = None,
    ) -> None:  # fmt: skip
        self.pool, device = pool(GRANULE * 512, GRANULE), "cuda" if CUDA else "cpu"
        self.model = load_model(directory, self.pool, dtype, device, CHUNK, None, adapters=adapters)
        self.kv = PagedKv.reserve(self.pool, self.model.shape, 300, KV)
        for slab in range(self.kv.slab_count):
            self.kv.map_slab(slab)
        self.kv.view.fill_(float("nan"))
        self.queue, self.fence = queue(), Fence()
        self.runner = CudaRunner(self.model, self.kv, self.queue, self.fence, 48, 4, batch_invariant)
        self.free = np.random.default_rng(1).permutation(self.kv.max_pages)
        self.calls: list[tuple[str, int]] = []

    def pages(self, tokens: int) -> np.ndarray:
        layers, count = self.model.config.layers, -(-tokens // CHUNK)
        mine, self.free = self.free[: layers * count], self.free[layers * count :]
        return mine.astype(np.int64).reshape(layers, count)

    def step(self, *slices: Slice) -> torch.Tensor:
        self.calls = []
        return self.runner.step(
            list(slices), lambda n: self.calls.append(("before", n)), lambda n: self.calls.append(("after", n))
        )

    def cut(
        self, pages: np.ndarray, tokens: list[int], start: int, end: int, want: bool = True, adapter: int = -1
    ) -> Slice:
        return Slice(tokens[start:end], start, pages[:, : -(-end // CHUNK)], want, adapter)


class Fence(HostFence):
    """Remembers the pages that compute was ordered behind."""

    def __init__(self) -> None:
        self.pending = False
        self.asked: list[list[int]] = []
        self.marks = 0

    def wait_for(self, pages: np.ndarray) -> None:
        self.asked.append(sorted(pages.ravel().tolist()))

    def written(self) -> None:
        self.marks += 1


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("llama", "qwen2", "mistral-window", "qwen3-biased")),
        "qwen3-some-windows",
        pytest.param("qwen3moe-some-dense", marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param("gemma3", marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param("gemma3-two-ropes", marks=pytest.mark.slow),
        pytest.param("qwen3moe-plain-weights", marks=pytest.mark.slow),
    ],
)
def test_logits_equal_those_of_transformers_in_chunks_and_token_by_token(case: str, tmp_path: Path) -> None:
    theirs_model = reference(tmp_path, case)
    bench, tokens = Bench(tmp_path), prompt(40)
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0]
    pages = bench.pages(40)
    for start, end in ((0, 29), (29, 30), (30, 37)):
        got = bench.step(bench.cut(pages, tokens, start, end))
        torch.testing.assert_close(got[0], theirs[end - 1], atol=2e-4, rtol=2e-4)
    layers = bench.model.config.layers
    assert bench.calls == [(when, layer) for layer in range(layers) for when in ("before", "after")]
    for at in range(37, 40):
        got = bench.step(bench.cut(pages, tokens, at, at + 1))
        torch.testing.assert_close(got[0], theirs[at], atol=2e-4, rtol=2e-4)
    assert bench.runner.graphs


def test_layers_that_come_for_their_use_only_compute_the_same_prompts_and_graphs(tmp_path: Path) -> None:
    reference(tmp_path, "qwen3")
    bench, tokens = Bench(tmp_path), prompt(9)
    pages, again = bench.pages(9), bench.pages(9)
    cuts = [(0, 6), (6, 7), (7, 8), (8, 9)]
    expected = [bench.step(bench.cut(pages, tokens, start, end)) for start, end in cuts]
    model, used = bench.model, list[tuple[str, int]]()
    bench.queue.finish()
    for layer in range(model.config.layers):
        model.unload_layer(layer)

    def come(layer: int) -> None:
        used.append(("before", layer))
        model.load_layer(layer)

    def go(layer: int) -> None:
        used.append(("after", layer))
        bench.queue.finish()
        model.unload_layer(layer)

    model.layers.before_use, model.layers.after_use = come, go
    got = [bench.step(bench.cut(again, tokens, start, end)) for start, end in cuts]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    assert used == [(when, layer) for _ in cuts for layer in range(model.config.layers) for when in ("before", "after")]


@pytest.mark.slow
def test_what_a_runner_takes_beside_granules_is_counted(tmp_path: Path) -> None:
    reference(tmp_path, "qwen3")
    bench, tokens = Bench(tmp_path), prompt(24)
    pages, runner = bench.pages(24), bench.runner
    before = runner.activation_bytes(), runner.table_bytes()
    assert min(before) > 0 and runner.graph_bytes() == 0
    for start, end in [(0, 20), (20, 21), (21, 22)]:
        bench.step(bench.cut(pages, tokens, start, end))
    assert runner.graph_bytes() > 0 or CUDA, "what a graph takes may be nothing that the driver tells"
    bench.step(*(bench.cut(bench.pages(20), prompt(20), 0, 20) for _ in range(5)))
    assert runner.activation_bytes() > before[0] and runner.table_bytes() > before[1], (
        "more tokens and sequences than it was made for"
    )
    assert runner.graph_bytes() == 0, "and they drop the graphs"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    reference(made, "qwen3")
    return made


@pytest.fixture(scope="module")
def bench(directory: Path) -> Bench:
    return Bench(directory)


@pytest.fixture(scope="module")
def alone(directory: Path) -> Callable[[list[int]], torch.Tensor]:
    """Logits of the last of some tokens, in one step of their own, by torch on the CPU."""
    host = HostBench(directory)
    every = host.free

    def run(tokens: list[int]) -> torch.Tensor:
        host.free = every
        return host.step(host.cut(host.pages(len(tokens)), tokens, 0, len(tokens)))[0]

    return run


def test_prefills_and_decodes_of_one_step_do_not_disturb_each_other(bench: Bench, alone: Alone) -> None:
    prompts = [prompt(n, n) for n in (6, 4, 18)]
    expected = [alone(p) for p in prompts]
    pages = [bench.pages(len(p)) for p in prompts]
    bench.step(bench.cut(pages[0], prompts[0], 0, 5, want=False), bench.cut(pages[2], prompts[2], 0, 10))
    got = bench.step(
        bench.cut(pages[0], prompts[0], 5, 6),
        bench.cut(pages[1], prompts[1], 0, 4),
        bench.cut(pages[2], prompts[2], 10, 15, want=False),
    )
    torch.testing.assert_close(got, torch.stack(expected[:2]), atol=1e-4, rtol=1e-4)
    got = bench.step(bench.cut(pages[2], prompts[2], 15, 18))
    torch.testing.assert_close(got[0], expected[2], atol=1e-4, rtol=1e-4)


def test_decodes_replay_a_graph_a_layer_and_padding_rows_disturb_nothing(bench: Bench, alone: Alone) -> None:
    prompts = [prompt(n, n) for n in (12, 6, 9)]
    expected = [[alone(p[:end]) for end in range(len(p) - 2, len(p) + 1)] for p in prompts]
    pages = [bench.pages(len(p)) for p in prompts]
    for p, its in zip(prompts, pages, strict=True):
        bench.step(bench.cut(its, p, 0, len(p) - 3, want=False))
    bench.runner.graphs.clear()
    for back in (3, 2, 1):
        got = bench.step(
            *(bench.cut(its, p, len(p) - back, len(p) - back + 1) for p, its in zip(prompts, pages, strict=True))
        )
        torch.testing.assert_close(got, torch.stack([e[3 - back] for e in expected]), atol=1e-4, rtol=1e-4)
    [(shape, graphs)] = bench.runner.graphs.items()
    assert shape == (4, 1, False) and graphs is not None
    assert [layer for layer, _ in graphs] == list(range(bench.model.config.layers))


@pytest.mark.slow
def test_a_graph_is_captured_again_for_the_layer_whose_weights_moved_and_only_for_it(
    directory: Path, alone: Alone
) -> None:
    bench, tokens = Bench(directory), prompt(30)
    pages = bench.pages(30)
    bench.step(bench.cut(pages, tokens, 0, 26))

    def decode(at: int) -> torch.Tensor:
        return bench.step(bench.cut(pages, tokens, at, at + 1))[0]

    decode(26), decode(27)
    before = dict(bench.runner.graphs[1, 1, False] or {})
    torch.testing.assert_close(decode(28), alone(tokens[:29]), atol=1e-4, rtol=1e-4)
    # A span that lent its granules and has them back shows its weights where they were.
    bench.model.unload_layer(0)
    bench.model.load_layer(0)
    decode(28)
    assert bench.runner.graphs[1, 1, False] == before
    # A layer that is read in another place has another graph there.
    moved = {
        f.name: None if (t := getattr(bench.model.layers[1], f.name)) is None else t.clone()
        for f in dataclasses.fields(LayerWeights)
    }
    bench.model.layers._slots[1] = LayerWeights(**moved)
    torch.testing.assert_close(decode(29), alone(tokens), atol=1e-4, rtol=1e-4)
    after = bench.runner.graphs[1, 1, False] or {}
    assert [layer for layer, place in after if (layer, place) not in before] == [1]


@pytest.mark.slow
def test_memory_that_grows_drops_the_graphs_that_hold_its_addresses(directory: Path, alone: Alone) -> None:
    bench, tokens = Bench(directory), prompt(20)
    pages = bench.pages(20)
    bench.step(bench.cut(pages, tokens, 0, 15))
    for at in (15, 16):
        bench.step(bench.cut(pages, tokens, at, at + 1))
    assert bench.runner.graphs[1, 1, False]
    many = [prompt(20, seed) for seed in range(7)]
    # more tokens and sequences than were announced
    got = bench.step(*(bench.cut(bench.pages(8), p[:8], 0, 8) for p in many))
    assert not bench.runner.graphs
    torch.testing.assert_close(got[6], alone(many[6][:8]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        bench.step(bench.cut(pages, tokens, 17, 18))[0], alone(tokens[:18]), atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
def test_tables_upload_only_what_a_row_did_not_show(bench: Bench) -> None:
    tokens, pages = prompt(CHUNK + 4), bench.pages(CHUNK + 4)
    tables = bench.runner._tables
    bench.step(bench.cut(pages, tokens, 0, CHUNK - 1))
    before = tables.uploaded
    bench.step(bench.cut(pages, tokens, CHUNK - 1, CHUNK))
    assert tables.uploaded == before, "the same pages as before"
    bench.step(bench.cut(pages, tokens, CHUNK, CHUNK + 1))
    assert tables.uploaded == before + 1, "one chunk more"
    shown = tables.on_device[:, 0, :2].cpu().numpy()
    assert np.array_equal(shown, bench.kv.offsets(pages) + bench.kv.span.address)


def test_compute_is_ordered_behind_copies_only_while_some_are_under_way(bench: Bench) -> None:
    tokens, pages = prompt(5), bench.pages(5)
    bench.fence.asked, bench.fence.marks = [], 0
    bench.step(bench.cut(pages, tokens, 0, 4))
    assert bench.fence.asked == [] and bench.fence.marks == bench.model.config.layers
    bench.fence.pending = True
    bench.step(bench.cut(pages, tokens, 4, 5))
    bench.fence.pending = False
    assert bench.fence.asked == [sorted(layer.tolist()) for layer in pages]


def test_a_hook_that_raises_ends_the_step_and_the_same_slices_can_run_again(bench: Bench, alone: Alone) -> None:
    tokens, pages = prompt(5), bench.pages(5)

    def fail(layer: int) -> None:
        if layer == 1:
            raise RuntimeError("no layer")

    with pytest.raises(RuntimeError, match="no layer"):
        bench.runner.step([bench.cut(pages, tokens, 0, 5)], fail, lambda layer: None)
    torch.testing.assert_close(bench.step(bench.cut(pages, tokens, 0, 5))[0], alone(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("rows_multiplied_alone")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_batch_invariant_rows_have_the_same_bits_however_they_are_cut_and_batched(directory: Path, dtype: str) -> None:
    bench, tokens = Bench(directory, dtype, batch_invariant=True), prompt(18)
    whole = bench.step(bench.cut(bench.pages(18), tokens, 0, 18))[0]
    pages, other, beside = bench.pages(18), bench.pages(8), prompt(8, 1)
    bench.step(bench.cut(pages, tokens, 0, 1), bench.cut(other, beside, 0, 2))
    bench.step(bench.cut(other, beside, 2, 5, want=False), bench.cut(pages, tokens, 1, 16))
    bench.step(bench.cut(pages, tokens, 16, 17), bench.cut(other, beside, 5, 6))
    got = bench.step(bench.cut(other, beside, 6, 7), bench.cut(pages, tokens, 17, 18))
    assert torch.equal(got[1], whole)


def test_logits_come_to_the_host_from_weights_on_the_device(bench: Bench) -> None:
    got = bench.step(bench.cut(bench.pages(5), prompt(5), 0, 5))
    assert got.device.type == "cpu" and got.dtype == torch.float32
    assert bench.model.layers[0].qkv.device.type == DEVICE.type


@pytest.mark.slow
@pytest.mark.sample
def test_no_page_is_touched_that_lies_before_a_window(tmp_path: Path) -> None:
    reference(tmp_path, "gemma3")
    checked(Bench(tmp_path), prefix=60, count=66)
