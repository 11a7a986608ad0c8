"""The compiled kernels: when they are used, and that a row's bits depend on nothing but its own tokens."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import ConfigError
from tests.worker.test_models_against_transformers import CHUNK, SIZES, Bench, prompt, reference
from worker.kernels.build import NoKernels, library
from worker.kernels.choice import choose_kernels
from worker.models.config import ModelConfig, load_config

TYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    reference(made, "qwen3")
    return made


@pytest.fixture(scope="module", params=TYPES)
def native(request: pytest.FixtureRequest, directory: Path) -> Bench:
    Bench.computes = "native"
    try:
        return Bench(directory, dtype=request.param)
    finally:
        Bench.computes = "torch"


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(1, 99), max_size=6),
    others=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 1000)), max_size=5),
    place=st.integers(0, 5),
)
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_whatever_it_is_computed_beside(
    native: Bench, cuts: list[int], others: list[tuple[int, int]], place: int
) -> None:
    native.free = np.random.default_rng(1).permutation(native.kv.max_pages)
    tokens = prompt(100)
    alone = native.pages(100)
    whole = native.step(native.cut(alone, tokens, 0, 100))[0]
    pages = native.pages(100)
    edges = sorted({0, *cuts, 100})
    for start, end in itertools.pairwise(edges):
        beside = [(native.pages(length), prompt(length, seed)) for length, seed in others]
        slices = [native.cut(p, t, 0, len(t)) for p, t in beside]
        at = min(place, len(slices))
        slices.insert(at, native.cut(pages, tokens, start, end))
        logits = native.step(*slices)[at]
        native.free = np.concatenate((native.free, *(p.ravel() for p, _ in beside)))
    assert torch.equal(logits, whole)
    for layer in range(native.model.config.layers):
        for mine, theirs in zip(pages[layer][: 100 // CHUNK], alone[layer], strict=False):
            assert np.array_equal(native.kv.page_bytes_view(mine), native.kv.page_bytes_view(theirs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_types_stay_close_to_float32(directory: Path, dtype: str) -> None:
    Bench.computes = "native"
    narrow, wide = Bench(directory, dtype=dtype), Bench(directory)
    Bench.computes = "torch"
    tokens = prompt(60)
    expected = wide.step(wide.cut(wide.pages(60), tokens, 0, 60))
    got = narrow.step(narrow.cut(narrow.pages(60), tokens, 0, 60))
    assert torch.nn.functional.cosine_similarity(got, expected).item() > 0.99


def test_one_thread_and_three_give_the_same_bits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "computes", "native")
    tokens, results = prompt(90), []
    for threads in (1, 3):
        monkeypatch.setattr(Bench, "threads", threads)
        bench = Bench(directory)
        results.append(bench.step(bench.cut(bench.pages(90), tokens, 0, 90)))
    assert torch.equal(*results)


def test_gate_and_up_projections_are_packed_in_alternating_tiles(directory: Path) -> None:
    kernels = choose_kernels("native", load_config(directory), CHUNK, 1)
    assert kernels is not None
    gate, up = (torch.from_numpy(np.random.default_rng(n).standard_normal((32, 96)).astype("f4")) for n in (0, 1))
    out = torch.empty(64, 96)
    assert kernels.pack("gate_up", [gate, up], out)
    assert not kernels.pack("input_norm", [gate], out), "vectors stay plain"
    tiles = out.view(4, 96, 16)
    for n, rows in enumerate((gate[:16], up[:16], gate[16:], up[16:])):
        assert torch.equal(tiles[n].T, rows)
    kernels.close()


def _config(directory: Path, **changed: object) -> ModelConfig:
    config = load_config(directory)
    for name, value in changed.items():
        object.__setattr__(config, name, value)
    return config


def test_what_the_kernels_do_not_suit_is_computed_by_torch_or_refused_by_name(directory: Path) -> None:
    assert choose_kernels("torch", load_config(directory), CHUNK, 1) is None
    odd = _config(directory, head_dim=20)
    assert choose_kernels("auto", odd, CHUNK, 1) is None
    with pytest.raises(ConfigError, match=r"worker\.kernels = 'native'.*head_dim = 20.*auto"):
        choose_kernels("native", odd, CHUNK, 1)
    with pytest.raises(ConfigError, match=r"kv\.chunk_tokens = 20"):
        choose_kernels("native", load_config(directory), 20, 1)


def test_without_a_compiler_the_reason_and_the_remedy_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoKernels, match="no C\\+\\+ compiler; install one"):
        library()
    assert choose_kernels("auto", load_config(directory), CHUNK, 1) is None


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho it is broken >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NoKernels, match="it is broken"):
        library()
    assert [p.name for p in (tmp_path / "cache" / "upbeat" / "kernels").iterdir()] == ["lock"]


def test_processes_that_start_together_build_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counting = tmp_path / "c++"
    build = f'echo x >> {tmp_path}/builds; sleep 0.3; for o in "$@"; do :; done; touch "$o"'
    counting.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo 1;; *) {build};; esac\n')
    counting.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(counting))
    command = [sys.executable, "-m", "worker.kernels.build"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({p.communicate(timeout=60)[0] for p in running}) == 1
    assert (tmp_path / "builds").read_text() == "x\n"


def test_attention_agrees_with_a_float64_reference(directory: Path) -> None:
    """One layer's attention of one head, from the pages that the kernels wrote."""
    Bench.computes = "native"
    bench = Bench(directory)
    Bench.computes = "torch"
    c, seen = bench.model.config, []
    kernels = bench.runner._kernels
    original = kernels.finish

    def attend_only(layer, number, buffers, queries, rows, base) -> None:  # type: ignore[no-untyped-def]
        if number == 0:
            original(layer, number, buffers, queries, 0, base)  # no rows: attention, and no products after it
            width = c.heads * c.head_dim
            stride = width + 16
            attended = bench.runner._memory["a"].flatten()[: 45 * stride].view(45, stride)[:, :width]
            seen.append((bench.runner._memory["q"][:45].clone(), attended.clone()))
        original(layer, number, buffers, queries, rows, base)

    kernels.finish = attend_only  # type: ignore[method-assign]
    tokens, pages = prompt(45, random.Random(3).randrange(1000)), bench.pages(45)
    bench.step(bench.cut(pages, tokens, 0, 45))
    q, got = (t.double() for t in seen[0])
    kv = torch.from_numpy(np.stack([bench.kv.page_bytes_view(p).view("f4") for p in pages[0]])).double()
    kv = kv.view(-1, c.kv_heads, 2, CHUNK, c.head_dim).permute(1, 2, 0, 3, 4).reshape(c.kv_heads, 2, -1, c.head_dim)[:, :, :45]
    for head in range(c.heads):
        k, v = kv[head // (c.heads // c.kv_heads)]
        mine = slice(head * c.head_dim, (head + 1) * c.head_dim)
        scores = q[:, mine] @ k.T / c.head_dim**0.5 + torch.full((45, 45), float("-inf"), dtype=torch.float64).triu(1)
        torch.testing.assert_close(got[:, mine], scores.softmax(-1) @ v, atol=2e-6, rtol=2e-5)
    assert SIZES["num_hidden_layers"] == c.layers
