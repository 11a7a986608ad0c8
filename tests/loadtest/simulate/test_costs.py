"""Presets keep to the published measurements that they name, and a measured profile is followed."""

from dataclasses import replace

import pytest

from contracts.latency_profile import LoadRate, Profile, Subject, Surface
from loadtest.simulate.costs import Measured, Roofline
from loadtest.simulate.presets import (
    A100,
    H100,
    H200,
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_31_8B,
    LLAMA_31_70B,
    PRESETS,
    measured,
    node_kind,
    tensor_parallel,
)

#: lmdeploy's published table for one A100-80G: (model, prompt, seconds to the first token).
FIRST_TOKEN = [(LLAMA_2_13B, 2048, 0.243), (LLAMA_2_7B, 2048, 0.139)]
#: (model, batch, context of each, seconds a step).
DECODE = [
    (LLAMA_2_13B, 1, 64, 0.017),
    (LLAMA_2_7B, 1, 64, 0.0095),
    (LLAMA_2_13B, 16, 2112, 0.033),
    (LLAMA_2_7B, 32, 2112, 0.031),
]
#: TensorRT-LLM 0.5.0's published throughputs in FP8: (device, model, batch, tokens in, tokens out, tokens a second).
THROUGHPUT = [
    (H100, LLAMA_2_7B, 64, 128, 2048, 5367),
    (H100, LLAMA_2_7B, 32, 2048, 2048, 2230),
    (H100, LLAMA_2_7B, 64, 2048, 128, 2058),
    (H200, LLAMA_2_13B, 64, 2048, 128, 1349),
    (tensor_parallel(H100, 4), LLAMA_31_70B, 64, 2048, 128, 843),
]


def profile() -> Profile:
    step = Surface((1, 8), (64, 1024), ((0.010, 0.020), (0.017, 0.097)))
    prefill = Surface((64, 512), (0, 4096), ((0.064, 0.128), (0.512, 1.024)))
    subject = Subject("ab" * 32, "bfloat16", "cpu", 2, 2, "native")
    loads = {"dram": LoadRate(0.0, 4e9), "peer": LoadRate(0.0, 1e9), "ssd_cold": LoadRate(0.0, 5e8)}
    return Profile(subject, "tiny", 4, 4 * 2 * 2 * 128, step, step, prefill, prefill, loads, {})


@pytest.mark.parametrize(("model", "tokens", "seconds"), FIRST_TOKEN)
def test_prefill_is_as_published(model, tokens, seconds) -> None:
    assert Roofline(A100, model).prefill_s(tokens, 0) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(("model", "batch", "context", "seconds"), DECODE)
def test_decode_is_as_published(model, batch, context, seconds) -> None:
    assert Roofline(A100, model).decode(batch, batch * context)[0] == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(("device", "model", "batch", "before", "answer", "per_s"), THROUGHPUT)
def test_throughput_is_as_published(device, model, batch, before, answer, per_s) -> None:
    costs = Roofline(replace(device, flops=2 * device.flops), replace(model, type_bytes=1))
    seconds = batch * costs.prefill_s(before, 0) + sum(
        costs.decode(batch, batch * (before + n))[0] for n in range(1, answer)
    )
    assert batch * answer / seconds == pytest.approx(per_s, rel=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_room_for_several_conversations(name) -> None:
    kind = PRESETS[name]
    assert kind.name == name and kind.hbm_bytes > 40_000 * kind.shape.token_bytes


def test_a_step_is_what_is_read_or_what_is_computed_whichever_is_longer() -> None:
    roofline = Roofline(A100, LLAMA_31_8B)
    alone, slope = roofline.decode(1, 0)
    assert alone == pytest.approx(0.002 + 8.03e9 * 2 / (2039e9 * 0.87))
    assert slope == pytest.approx(32 * 8 * 2 * 128 * 2 / (2039e9 * 0.87))
    long = roofline.mixed_s(0, 0, [(1000, 0)])
    assert long == pytest.approx(0.002 + (1000 * 2 * 8.03e9 + 1000 * 500 * 4 * 32 * 32 * 128) / (312e12 * 0.7))
    assert roofline.mixed_s(4, 0, [(1000, 0)]) > long and roofline.prefill_s(0, 100) == 0.0


def test_a_measured_profile_is_followed_at_its_points_and_between() -> None:
    costs = Measured(profile())
    seconds, slope = costs.decode(8, 8 * 64)
    assert seconds == pytest.approx(0.017) and slope == pytest.approx((0.097 - 0.017) / (1024 - 64) / 8)
    assert costs.prefill_s(512, 0) == pytest.approx(0.512)
    assert costs.mixed_s(1, 64, [(64, 0)]) == pytest.approx(0.010 + 0.064)


def test_a_measured_node_has_the_rates_of_its_machine_and_the_bytes_of_its_model() -> None:
    kind = measured(profile(), hbm_gib=1.0, dram_gib=2.0)
    assert kind.shape.token_bytes == profile().token_bytes
    assert (kind.dram_bytes_per_s, kind.link_bytes_per_s, kind.ssd_bytes_per_s) == (4e9, 1e9, 5e8)


def test_a_preset_has_room_for_what_the_paper_serves_and_unknown_ones_are_named() -> None:
    assert PRESETS["a100-llama-3.1-8b"].shape.token_bytes == 131_072
    assert PRESETS["a100-llama-2-13b"].hbm_bytes > 40_000 * PRESETS["a100-llama-2-13b"].shape.token_bytes
    with pytest.raises(ValueError, match=r"unknown preset 'h100'.*a100-llama-3\.1-8b"):
        node_kind("h100")
