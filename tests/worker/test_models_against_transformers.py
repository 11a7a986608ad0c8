"""Our logits are those of transformers, and do not depend on how a prompt is cut into steps or batched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from runtime.model_config import load_config
from tests.worker.owners import KV
from worker.devices.cpu.native_runner import NativeRunner
from worker.devices.runner import Runner, Slice
from worker.kernels.choice import choose_kernels
from worker.kernels.cpu_kernels import CpuKernels
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv
from worker.models.load import Model, load_model

GRANULE = 64 << 10
CHUNK = 16
SIZES = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
#: Half of a layer's experts are taken by some token of most steps, none by all.
EXPERTS = {"head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-scales": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False}},
    ),
    "qwen2-yarn-given-scale": (
        "Qwen2",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama-every-head-its-own": ("Llama", {"num_key_value_heads": 6}),
    "llama-other-head-dim": ("Llama", {"head_dim": 32, "num_key_value_heads": 6}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "mistral-other-head-dim": ("Mistral", {"head_dim": 32, "sliding_window": 33, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-some-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-some-windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-biased": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-wide": ("Qwen3", {"head_dim": 32, "intermediate_size": 96}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3-two-ropes": (
        "Gemma3",
        GEMMA | {"query_pre_attn_scalar": 40, "rope_parameters": TWO_ROPES, "num_key_value_heads": 6},
    ),
    "gemma3-untied": ("Gemma3", GEMMA | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3-wide": ("Gemma3", GEMMA | {"head_dim": 32, "intermediate_size": 96}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3moe-plain-weights": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3moe-some-dense": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3moe-every-second": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3moe-window": ("Qwen3Moe", EXPERTS | {"use_sliding_window": True, "sliding_window": 24}),
    "qwen3moe-all-experts": ("Qwen3Moe", EXPERTS | {"num_experts_per_tok": 7, "moe_intermediate_size": 16}),
    "qwen3moe-wide": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "num_experts": 40, "moe_intermediate_size": 64}),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Such small matrices lose more by waiting for a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(
    directory: Path, case: str, dtype: torch.dtype = torch.float32, **sizes: int | None
) -> transformers.PreTrainedModel:
    """A random model of this case, saved to `directory`; norms and biases are random too, so that none can be
    forgotten."""
    name, extra = CASES[case]
    extra = extra | sizes
    torch.manual_seed(sorted(CASES).index(case))
    config = transformers.Gemma3TextConfig if name == "Gemma3" else getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**SIZES | extra)).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.2)
            assert torch.isfinite(value).all(), key
    model = model.to(dtype)
    model.save_pretrained(directory)
    return model


class Bench:
    """A loaded model with a KV cache, and sequences whose pages are drawn at random."""

    #: What computes; set for every test, once with each.
    computes = "torch"
    threads = 2

    def __init__(
        self,
        directory: Path,
        dtype: str = "float32",
        granule: int = GRANULE,
        chunk: int = CHUNK,
        kernels: CpuKernels | None = None,
        adapters: dict[str, Path] | None = None,
    ) -> None:
        self.pool = host_memory(granule * 512, granule)
        kernels = kernels or choose_kernels(self.computes, load_config(directory), chunk, self.threads)
        pack = kernels and kernels.pack
        self.model: Model = load_model(directory, self.pool, dtype, "cpu", chunk, None, pack, "", adapters)
        self.kv = PagedKv.reserve(self.pool, self.model.shape, 700, KV)
        for slab in range(self.kv.slab_count):
            self.kv.map_slab(slab)
            for page in range(slab * self.kv.pages_per_slab, (slab + 1) * self.kv.pages_per_slab):
                self.kv.page_bytes_view(page)[:] = 0xFF  # NaN everywhere: what is not written must not be read
        self.runner = NativeRunner(self.model, self.kv, kernels) if kernels else Runner(self.model, self.kv)
        self.free = np.random.default_rng(1).permutation(self.kv.max_pages)
        self.calls: list[tuple[str, int]] = []

    def pages(self, tokens: int) -> np.ndarray:
        layers, count = self.model.config.layers, -(-tokens // self.model.shape.chunk_tokens)
        mine, self.free = self.free[: layers * count], self.free[layers * count :]
        assert len(mine) == layers * count, "the test's cache is too small"
        return mine.astype(np.int64).reshape(layers, count)

    def step(self, *slices: Slice) -> torch.Tensor:
        self.calls = []
        return self.runner.step(
            list(slices), lambda n: self.calls.append(("before", n)), lambda n: self.calls.append(("after", n))
        )

    def cut(
        self, pages: np.ndarray, tokens: list[int], start: int, end: int, want: bool = True, adapter: int = -1
    ) -> Slice:
        return Slice(tokens[start:end], start, pages[:, : -(-end // self.model.shape.chunk_tokens)], want, adapter)


@pytest.fixture(params=["torch", "native"], autouse=True)
def computes(request: pytest.FixtureRequest) -> Iterator[str]:
    Bench.computes = request.param
    yield request.param
    Bench.computes = "torch"


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], length).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_in_one_step_in_chunks_and_token_by_token(case: str, tmp_path: Path) -> None:
    theirs_model = reference(tmp_path, case)
    bench = Bench(tmp_path)
    tokens = prompt(100)
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0]

    pages = bench.pages(100)
    whole = bench.step(bench.cut(pages, tokens, 0, 100))
    torch.testing.assert_close(whole[0], theirs[99], atol=1e-4, rtol=1e-4)
    assert bench.calls == [(when, layer) for layer in range(3) for when in ("before", "after")]

    pages = bench.pages(100)
    for start, end in ((0, 37), (37, 38), (38, 80), (80, 96)):
        got = bench.step(bench.cut(pages, tokens, start, end))
        torch.testing.assert_close(got[0], theirs[end - 1], atol=1e-4, rtol=1e-4)
    for at in range(96, 100):
        got = bench.step(bench.cut(pages, tokens, at, at + 1))
        torch.testing.assert_close(got[0], theirs[at], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen3", "qwen2-some-windows", "qwen3moe", "gemma3"])
def test_a_mixed_batch_of_prefill_and_decode_gives_each_sequence_what_it_gets_alone(case: str, tmp_path: Path) -> None:
    theirs_model = reference(tmp_path, case)
    bench = Bench(tmp_path)
    lengths = [3, 17, 33, 64, 90, 7, 40, 1]
    prompts = [prompt(n + 1, seed=n) for n in lengths]
    pages = [bench.pages(n + 1) for n in lengths]
    first = [bench.cut(p, t, 0, n // 2, want=False) for p, t, n in zip(pages, prompts, lengths, strict=True) if n // 2]
    assert bench.step(*first).shape == (0, SIZES["vocab_size"])
    rest = [bench.cut(p, t, n // 2, n, want=n != 33) for p, t, n in zip(pages, prompts, lengths, strict=True)]
    prefilled = bench.step(*rest)
    decoded = bench.step(*(bench.cut(p, t, n, n + 1) for p, t, n in zip(pages, prompts, lengths, strict=True)))
    with torch.no_grad():
        theirs = [theirs_model(torch.tensor([t])).logits[0] for t in prompts]
    expected = torch.stack([t[n - 1] for t, n in zip(theirs, lengths, strict=True) if n != 33])
    torch.testing.assert_close(prefilled, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        decoded, torch.stack([t[n] for t, n in zip(theirs, lengths, strict=True)]), atol=1e-4, rtol=1e-4
    )


def test_pages_that_do_not_fill_their_slab_evenly_compute_the_same(tmp_path: Path) -> None:
    reference(tmp_path, "llama")
    even, uneven = Bench(tmp_path, granule=96 << 10, chunk=48), Bench(tmp_path, granule=200 << 10, chunk=48)
    assert even.kv.slab_bytes == even.kv.pages_per_slab * even.kv.page_bytes
    assert uneven.kv.slab_bytes > uneven.kv.pages_per_slab * uneven.kv.page_bytes
    tokens = prompt(61)
    outputs = []
    for bench in (even, uneven):
        pages = bench.pages(61)
        bench.step(bench.cut(pages, tokens, 0, 50, want=False))
        bench.step(bench.cut(pages, tokens, 50, 60, want=False))
        outputs.append(bench.step(bench.cut(pages, tokens, 60, 61)))
    torch.testing.assert_close(outputs[0], outputs[1], atol=0, rtol=0)


def test_pages_copied_byte_for_byte_continue_exactly_like_the_original(tmp_path: Path) -> None:
    reference(tmp_path, "qwen3")
    bench = Bench(tmp_path)
    tokens = prompt(60)
    pages, copies = bench.pages(60), bench.pages(60)
    bench.step(bench.cut(pages, tokens, 0, 48, want=False))
    for layer in range(3):
        for chunk in range(3):
            bench.kv.page_bytes_view(copies[layer, chunk])[:] = bench.kv.page_bytes_view(pages[layer, chunk])
    original, copy = (bench.step(bench.cut(p, tokens, 48, 60)) for p in (pages, copies))
    torch.testing.assert_close(original, copy, atol=0, rtol=0)


def test_a_page_is_laid_out_as_heads_then_k_and_v_then_tokens(tmp_path: Path) -> None:
    theirs_model = reference(tmp_path, "llama")
    bench = Bench(tmp_path)
    tokens = prompt(40)
    pages = bench.pages(40)
    bench.step(bench.cut(pages, tokens, 0, 40))
    with torch.no_grad():
        cache = theirs_model(torch.tensor([tokens]), use_cache=True).past_key_values
    for layer in range(3):
        piece = (
            torch.from_numpy(bench.kv.page_bytes_view(pages[layer, 1]).copy()).view(torch.float32).view(2, 2, CHUNK, 16)
        )
        torch.testing.assert_close(piece[:, 0], cache.layers[layer].keys[0][:, CHUNK : 2 * CHUNK], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            piece[:, 1], cache.layers[layer].values[0][:, CHUNK : 2 * CHUNK], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama", "llama-yarn-rope", "mistral-window", "qwen2", "qwen3", "qwen3moe", "gemma3"])
def test_short_types_stay_close_to_transformers(case: str, dtype: str, tmp_path: Path) -> None:
    theirs_model = reference(tmp_path, case, getattr(torch, dtype))
    bench = Bench(tmp_path, dtype=dtype)
    tokens = prompt(70)
    pages = bench.pages(70)
    bench.step(bench.cut(pages, tokens, 0, 64, want=False))
    got = bench.step(bench.cut(pages, tokens, 64, 70))[0]
    with torch.no_grad():
        theirs = theirs_model(torch.tensor([tokens])).logits[0, -1].float()
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, theirs, dim=0) > 0.99


def test_a_step_that_fails_between_layers_can_be_run_again(tmp_path: Path) -> None:
    reference(tmp_path, "llama")
    bench = Bench(tmp_path)
    tokens = prompt(30)
    pages = bench.pages(30)
    expected = bench.step(bench.cut(pages, tokens, 0, 30))

    def lost(layer: int) -> None:
        if layer == 1:
            raise RuntimeError("piece lost")

    again = bench.pages(30)
    with pytest.raises(RuntimeError, match="piece lost"):
        bench.runner.step([bench.cut(again, tokens, 0, 30)], lost, lambda _: None)
    torch.testing.assert_close(bench.step(bench.cut(again, tokens, 0, 30)), expected, atol=0, rtol=0)


def test_a_layer_that_lent_its_granules_computes_the_same_after_it_is_loaded_again(tmp_path: Path) -> None:
    reference(tmp_path, "qwen2")
    bench = Bench(tmp_path)
    tokens = prompt(20)
    expected = bench.step(bench.cut(bench.pages(20), tokens, 0, 20))
    free = bench.pool.free
    given = bench.model.unload_layer(1)
    assert given > 0 and bench.pool.free == free + given
    with pytest.raises(Exception, match="layer 1 has lent its granules"):
        bench.step(bench.cut(bench.pages(20), tokens, 0, 20))
    lent = bench.pool.take(bench.pool.free, KV)  # somebody else uses that memory meanwhile
    other = bench.pool.reserve(len(lent) * GRANULE, KV)
    other.map(0, lent)
    other.close()
    bench.model.load_layer(1)
    torch.testing.assert_close(bench.step(bench.cut(bench.pages(20), tokens, 0, 20)), expected, atol=0, rtol=0)


def test_every_layer_s_weights_are_acquired_before_their_use_and_may_come_only_then(tmp_path: Path) -> None:
    reference(tmp_path, "qwen2")
    bench = Bench(tmp_path)
    tokens = prompt(20)
    expected = bench.step(bench.cut(bench.pages(20), tokens, 0, 20))
    layers, model = bench.model.config.layers, bench.model
    for layer in range(layers):
        model.unload_layer(layer)
    used: list[tuple[str, int]] = []

    def come(layer: int) -> None:
        used.append(("before", layer))
        model.load_layer(layer)

    def go(layer: int) -> None:
        used.append(("after", layer))
        model.unload_layer(layer)

    model.layers.before_use, model.layers.after_use = come, go
    torch.testing.assert_close(bench.step(bench.cut(bench.pages(20), tokens, 0, 20)), expected, atol=0, rtol=0)
    assert used == [(when, layer) for layer in range(layers) for when in ("before", "after")]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": []}, "0 tokens"),
        ({"tokens": [1] * 600}, "does not fit a model of 512"),
        ({"tokens": [211]}, "outside the vocabulary"),
        ({"tokens": [-1]}, "outside the vocabulary"),
        ({"start": 20}, "do not cover"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused_before_anything_is_written(
    wrong: dict, message: str, tmp_path: Path
) -> None:
    reference(tmp_path, "llama")
    bench = Bench(tmp_path)
    pages = bench.pages(4)
    with pytest.raises(ValueError, match=message):
        bench.step(Slice(**{"tokens": [1, 2], "start": 0, "pages": pages, "want_logits": True} | wrong))
    assert bench.calls == []
