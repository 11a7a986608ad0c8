"""The bundled model gets little memory, so that conversations push each other out; with a size that somebody says,
nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.demo_memory import CHUNK_TOKENS, KV_TOKENS, with_demo_chunks, with_demo_memory
from cli.settings import BUNDLED_MODEL, Flags, layout
from loadtest.random_model import SHAPES, make_random_model
from runtime.model_config import load_config
from runtime.sections import GIB, KvSection

PLENTY = (KvSection().hbm_gib, KvSection().dram_gib)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT__WORKER__DEVICE", "cpu")


def sizes(flags: Flags) -> tuple[float, float]:
    kv = with_demo_memory(layout(flags), flags).kv
    return kv.hbm_gib, kv.dram_gib


@pytest.mark.parametrize("flags", [Flags(), Flags(model=str(BUNDLED_MODEL)), Flags(nodes=3, port=9000)])
def test_the_bundled_model_has_room_for_one_long_conversation(flags: Flags) -> None:
    model = load_config(BUNDLED_MODEL)
    one = KV_TOKENS * model.layers * model.kv_heads * model.head_dim * 2 * 4 / GIB
    hbm, dram = sizes(flags)
    assert dram == pytest.approx(one)
    assert one < hbm < 2 * one + 0.05, "room for the weights, and for no second conversation"


def test_what_is_measured_has_the_same_chunks_and_plenty_of_memory() -> None:
    kv = with_demo_chunks(layout(Flags()), Flags()).kv
    assert (kv.chunk_tokens, kv.hbm_gib, kv.dram_gib) == (CHUNK_TOKENS, *PLENTY)


@pytest.mark.parametrize("flags", [Flags(hbm_gib=1.0), Flags(dram_gib=2.0)])
def test_a_size_that_a_flag_says_leaves_both_as_they_were(flags: Flags) -> None:
    assert sizes(flags) == PLENTY


def test_a_size_of_the_environment_or_of_the_file_leaves_both_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "upbeat.yaml"
    file.write_text("kv: {dram_gib: 2}\n")
    assert sizes(Flags(config=file)) == PLENTY
    file.write_text("kv: {cache: true}\n")
    assert sizes(Flags(config=file)) < PLENTY
    monkeypatch.setenv("UPBEAT__KV__HBM_GIB", "1")
    assert sizes(Flags()) == PLENTY


def test_another_model_and_a_gpu_have_plenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_random_model(tmp_path / "model", SHAPES["tiny"][0], 1, "float32")
    assert sizes(Flags(model=str(other))) == PLENTY
    monkeypatch.setenv("UPBEAT__WORKER__DEVICE", "cuda")
    assert sizes(Flags()) == PLENTY
