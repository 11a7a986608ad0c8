"""The compiled kernels: when they are used, that they compute what they should, and that a row's bits depend on nothing
but its own tokens. What needs instructions that this processor may lack is computed by the same code with those
instructions emulated."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from contracts.errors import ConfigError
from runtime.model_config import ModelConfig, load_config
from runtime.native import abilities
from tests.worker.test_models_against_transformers import CHUNK, GRANULE, Bench, prompt, reference
from worker.core.kernel_speed import complaint, widest_registers
from worker.kernels.build import AVX2_ONLY, KERNELS, NoKernels, library
from worker.kernels.choice import choose_kernels
from worker.kernels.cpu_kernels import CpuKernels

#: Types, and for bfloat16 the ways to multiply it: pairs and tiles emulated, and as this processor does it where it
#: does.
WAYS = [
    "float32",
    "float16",
    "bfloat16-portable",
    "bfloat16-pairs",
    "bfloat16-tiles",
    "bfloat16-pairs-here",
    "bfloat16-tiles-here",
]
#: The same compiled for a processor with AVX2 only, where this one has more.
NARROWER = ["float32@avx2", "float16@avx2", "bfloat16-portable@avx2"] if "avx512f" in abilities() else []
WAYS += NARROWER
#: Of the sequence that is cut: more than two of the stripes that attention by tiles goes through.
LONG = 270
EMULATED = ("-DUPBEAT_EMULATE", "-O1")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    reference(made, "qwen3")
    return made


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every size suits tiles."""
    made = tmp_path_factory.mktemp("wide")
    reference(made, "qwen3-wide")
    return made


def bench_by(way: str, directory: Path, threads: int = 2, adapters: dict[str, Path] | None = None) -> Bench:
    """A bench of this type that multiplies this way and no other; its chunks suit tiles."""
    way, _, registers = way.partition("@")
    dtype, _, products = way.partition("-")
    products, _, here = products.partition("-")
    built = library(
        KERNELS, EMULATED if products in ("pairs", "tiles") and not here else AVX2_ONLY if registers else ()
    )
    kernels = CpuKernels(built, threads, [products or "portable"])
    if here and not kernels.products:
        kernels.close()
        pytest.skip(f"this processor does not multiply by {products}")
    assert kernels.products == [products or "portable"]
    bench = Bench(directory, dtype=dtype, granule=4 * GRANULE, chunk=2 * CHUNK, kernels=kernels, adapters=adapters)
    assert bench.runner._kernels._type == {"tiles": 4, "pairs": 3}.get(products, bench.runner._kernels._type)
    return bench


@pytest.fixture(scope="module", params=WAYS)
def native(request: pytest.FixtureRequest, wide: Path) -> Bench:
    return bench_by(request.param, wide)


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(1, LONG - 1), max_size=6),
    others=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 1000)), max_size=5),
    place=st.integers(0, 5),
)
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_whatever_it_is_computed_beside(
    native: Bench, cuts: list[int], others: list[tuple[int, int]], place: int
) -> None:
    native.free = np.random.default_rng(1).permutation(native.kv.max_pages)
    tokens = prompt(LONG)
    alone = native.pages(LONG)
    whole = native.step(native.cut(alone, tokens, 0, LONG))[0]
    pages = native.pages(LONG)
    edges = sorted({0, *cuts, LONG})
    for start, end in itertools.pairwise(edges):
        beside = [(native.pages(length), prompt(length, seed)) for length, seed in others]
        slices = [native.cut(p, t, 0, len(t)) for p, t in beside]
        at = min(place, len(slices))
        slices.insert(at, native.cut(pages, tokens, start, end))
        logits = native.step(*slices)[at]
        native.free = np.concatenate((native.free, *(p.ravel() for p, _ in beside)))
    assert torch.equal(logits, whole)
    for layer in range(native.model.config.layers):
        for mine, theirs in zip(pages[layer][: LONG // native.kv.shape.chunk_tokens], alone[layer], strict=False):
            assert np.array_equal(native.kv.page_bytes_view(mine), native.kv.page_bytes_view(theirs))


@pytest.mark.parametrize("way", WAYS[1:])
def test_sixteen_bit_types_stay_close_to_float32(wide: Path, way: str) -> None:
    narrow, reference_bench = bench_by(way, wide), bench_by("float32", wide)
    tokens = prompt(60)
    expected = reference_bench.step(reference_bench.cut(reference_bench.pages(60), tokens, 0, 60))
    got = narrow.step(narrow.cut(narrow.pages(60), tokens, 0, 60))
    assert torch.nn.functional.cosine_similarity(got, expected).item() > 0.99


def test_all_ways_to_multiply_bfloat16_agree_but_for_the_order_of_sums(wide: Path) -> None:
    tokens, results = prompt(60), []
    for way in WAYS[2:5]:
        bench = bench_by(way, wide)
        results.append(bench.step(bench.cut(bench.pages(60), tokens, 0, 60)))
    portable, pairs, tiles = results
    for other in (pairs, tiles):
        assert torch.nn.functional.cosine_similarity(other, portable).item() > 0.999


@pytest.mark.skipif(not NARROWER, reason="this processor has no wider registers than AVX2")
@pytest.mark.parametrize("narrower", NARROWER)
def test_portable_kernels_give_the_same_bits_whatever_the_width_of_registers(wide: Path, narrower: str) -> None:
    tokens, results = prompt(150), []
    for way in (narrower, narrower.partition("@")[0]):
        bench = bench_by(way, wide)
        results.append(bench.step(bench.cut(bench.pages(150), tokens, 0, 150)))
    assert torch.equal(*results)


def test_the_kernels_measure_what_they_reach_beside_what_the_processor_could() -> None:
    kernels = CpuKernels(library(), 1)
    speed = kernels.speed()
    kernels.close()
    assert speed.registers == widest_registers(abilities()), "the compiler knows this processor"
    assert speed.products == kernels.products[0]
    assert 0.1 < speed.share < 40 and speed.peak_gflops > 1


def test_the_log_names_the_kernels_and_what_they_reach(directory: Path) -> None:
    with capture_logs() as logs:
        kernels = choose_kernels("portable", load_config(directory), CHUNK, 1)
    assert kernels is not None
    kernels.close()
    (said,) = (line for line in logs if line["event"] == "compiled kernels compute")
    assert (said["registers"], said["bfloat16_products"]) == (widest_registers(abilities()), "portable")
    assert said["gflops_a_thread"] > 0 and said["share_of_peak"] > 0


@pytest.mark.skipif(not NARROWER, reason="this processor has no wider registers than AVX2")
def test_kernels_that_were_built_for_narrower_registers_are_complained_of() -> None:
    kernels = CpuKernels(library(more=AVX2_ONLY), 1)
    assert "built for avx2 registers and this processor has avx512" in complaint(kernels.speed(), abilities())
    kernels.close()


def test_a_way_to_multiply_that_the_library_or_the_processor_lacks_is_not_used() -> None:
    emulating, plain = CpuKernels(library(KERNELS, EMULATED), 1), CpuKernels(library(), 1)
    assert emulating.products == ["tiles", "pairs", "portable"]
    able = {"tiles": {"amx_tile", "amx_bf16"}, "pairs": {"avx512_bf16"}, "portable": set()}
    assert plain.products[-1] == "portable"
    assert all(able[way] <= abilities() for way in plain.products)
    for kernels in (emulating, plain):
        kernels.close()


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("emulated", [(), ("-DUPBEAT_EMULATE",)])
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cooperlake", "sapphirerapids"])
def test_the_kernels_compile_for_processors_with_fewer_and_more_instructions_than_this_one(
    processor: str, emulated: tuple[str, ...]
) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    flags = ("-std=c++17", "-fsyntax-only", "-Wno-psabi", f"-march={processor}", *emulated)
    found = subprocess.run([compiler, *flags, str(KERNELS)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_one_thread_and_three_give_the_same_bits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "computes", "native")
    tokens, results = prompt(90), []
    for threads in (1, 3):
        monkeypatch.setattr(Bench, "threads", threads)
        bench = Bench(directory)
        results.append(bench.step(bench.cut(bench.pages(90), tokens, 0, 90)))
    assert torch.equal(*results)


def test_a_team_computes_at_any_width_and_who_is_beyond_it_sleeps(directory: Path) -> None:
    before = set(os.listdir("/proc/self/task"))
    kernels = CpuKernels(library(), 3)
    team = set(os.listdir("/proc/self/task")) - before
    bench = Bench(directory, kernels=kernels)
    tokens, pages, results = prompt(90), bench.pages(90), []
    for width in (3, 1, 2, 3, 1):
        kernels.use(width)
        spent = {task: _processor_ticks(task) for task in team}
        results += [bench.step(bench.cut(pages, tokens, 0, 90)) for _ in range(40 if width == 1 else 2)]
        if width == 1:
            assert {task: _processor_ticks(task) for task in team} == pytest.approx(spent, abs=1), (
                "but for one that fell asleep just now"
            )
    assert all(torch.equal(result, results[0]) for result in results)
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=f"width must be 1 to 3, got {wrong}"):
            kernels.use(wrong)
    kernels.close()


def _processor_ticks(task: str) -> int:
    """Of a thread of this process."""
    words = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


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
    with pytest.raises(ConfigError, match=r"worker\.kernels = 'portable' is impossible here"):
        choose_kernels("portable", odd, CHUNK, 1)
    with pytest.raises(ConfigError, match=r"kv\.chunk_tokens = 20"):
        choose_kernels("native", load_config(directory), 20, 1)


def test_without_a_compiler_the_reason_and_the_remedy_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path
) -> None:
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


def test_portable_kernels_multiply_without_the_processors_bfloat16(directory: Path) -> None:
    kernels = choose_kernels("portable", load_config(directory), CHUNK, 1)
    assert kernels is not None and kernels.products == ["portable"]
    kernels.close()
