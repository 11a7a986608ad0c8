"""Costs of a GPU that decodes and trains: a roofline, and memory that both share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulate.contention import DecodeWork, SharedGpu, TrainWork
from loadtest.simulate.presets import ADA_6000, LLAMA_3_8B

GPU = SharedGpu(ADA_6000, 0.1, 0.45, 0.4, 0.5, 25e9)
WORK, TRAIN = DecodeWork(LLAMA_3_8B), TrainWork(LLAMA_3_8B, 128_256)


def test_all_processors_reach_all_of_the_memory_and_fewer_more_than_their_share() -> None:
    assert GPU.reached(1.0) == pytest.approx(1.0)
    assert all(GPU.reached(part / 10) > part / 10 for part in range(1, 10))


@given(st.floats(0.1, 0.9), st.integers(1, 200), st.integers(0, 100_000))
def test_more_processors_are_never_slower_and_more_work_never_quicker(part: float, running: int, tokens: int) -> None:
    def step_s(part: float, running: int, tokens: int) -> float:
        return GPU.step_s(part, WORK.bytes_(tokens), WORK.flops(running, tokens))

    here = step_s(part, running, tokens)
    assert step_s(part + 0.1, running, tokens) <= here
    assert step_s(part, running + 1, tokens + 10) >= here


def test_a_step_of_few_sequences_reads_the_weights() -> None:
    read_s = LLAMA_3_8B.weight_bytes / GPU.bytes_per_s
    assert GPU.step_s(1.0, WORK.bytes_(0), WORK.flops(1, 0)) == pytest.approx(ADA_6000.overhead_s + read_s, rel=0.01)


def test_equation_5_divides_what_is_asked_by_what_there_is() -> None:
    rate = GPU.bytes_per_s
    assert GPU.slower(0.5 * rate, 0.4 * rate) == 1.0
    assert GPU.slower(0.9 * rate, 0.6 * rate) == pytest.approx(1.5)


def test_a_model_on_two_devices_asks_half_of_each() -> None:
    half = replace(WORK, devices=2)
    assert half.bytes_(1000) == WORK.bytes_(1000) / 2 and half.flops(8, 1000) == WORK.flops(8, 1000) / 2


def test_training_computes_a_layer_again_and_backward_in_twice_its_forward_time() -> None:
    assert TRAIN.unit_flops(False) == 2 * TRAIN.unit_flops(True)
    assert TRAIN.example_flops == pytest.approx(6 * LLAMA_3_8B.parameters * 1024, rel=0.15)
    assert TRAIN.layer_bytes * 32 == pytest.approx(LLAMA_3_8B.weight_bytes, rel=0.15)
    assert replace(TRAIN, examples=8).fixed_bytes > TRAIN.fixed_bytes
    assert GPU.train_s(1.0, TRAIN.unit_flops(False)) < 0.01, "a unit of the paper takes about 10 ms"
