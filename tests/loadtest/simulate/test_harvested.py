"""A GPU that decodes and trains in virtual time: what each gets, whose memory is whose, and units that run on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.simulate.contention import DecodeWork, SharedGpu, TrainWork
from loadtest.simulate.events import Events
from loadtest.simulate.harvested import HarvestedGpu, HarvestedKind, StepSeen
from loadtest.simulate.presets import ADA_6000, LLAMA_3_8B
from loadtest.simulate.request import Request
from loadtest.simulate.training import Training
from worker.core.harvest import Split
from worker.core.window import Window

GPU = SharedGpu(ADA_6000, 0.1, 0.45, 0.4, 0.5, 25e9)
TRAIN = TrainWork(LLAMA_3_8B, 128_256)
KIND = HarvestedKind(GPU, DecodeWork(LLAMA_3_8B), 20e9, noise=0.0)
LAYER = -(-int(TRAIN.layer_bytes) // (2 << 20))
COPY_S = TRAIN.layer_bytes / 25e9
TRAINED_ALONE = TRAIN.rows / GPU.train_s(1.0, TRAIN.example_flops)


class Scripted:
    """Splits as they are given, step by step; the last one goes on."""

    def __init__(self, *splits: Split, rest: Split | None = None) -> None:
        self.splits, self._rest = list(splits), rest or splits[-1]
        self.was_starved: list[bool] = []
        self.measured: list[float] = []

    def plan(self, now: float, batch: int, tokens: int, prefill_tokens: int, target_s: float) -> Split:
        return self.splits.pop(0) if len(self.splits) > 1 else self.splits[0]

    def stepped(self, now: float, seconds: float) -> None:
        self.measured.append(seconds)

    def rest(self, now: float) -> Split:
        return self._rest

    def starved(self, now: float, starved: bool) -> None:
        self.was_starved.append(starved)


def all_here() -> Training:
    return Training(TRAIN, None, 0.0)


def windowed() -> Training:
    return Training(TRAIN, Window(32, LAYER), COPY_S)


def request(name: str, prompt: int, answer: int) -> Request:
    return Request(name, SessionKey(DEFAULT_TENANT, name), 0, prompt, 0, answer, 0.0, lambda request: None)


def decode(
    splitting: Scripted, training: Training | None, answer: int = 50, count: int = 1, kind: HarvestedKind = KIND
) -> tuple[HarvestedGpu, list[StepSeen]]:
    """So many requests at once, to their end."""
    events, steps = Events(), list[StepSeen]()
    gpu = HarvestedGpu(kind, events, splitting, training, 1, steps.append)
    for number in range(count):
        gpu.submit(request(f"r{number}", 1000, answer))
    events.run(lambda: gpu.answered == count)
    gpu.core.validate()
    return gpu, steps


def test_alone_a_step_takes_what_the_roofline_says() -> None:
    gpu, steps = decode(Scripted(Split(10, 0)), None)
    work = KIND.decodes
    assert len(steps) == 50 and steps[-1].tokens == 1049
    assert steps[-1].seconds == pytest.approx(GPU.step_s(1.0, work.bytes_(1049), work.flops(1, 1049)))
    assert gpu.gaps.counts.tolist() == [1] * 49, "the first token has no gap"


def test_an_idle_device_trains_as_quickly_as_the_share_allows() -> None:
    training = all_here()
    gpu = HarvestedGpu(KIND, Events(), Scripted(Split(10, 0), rest=Split(1, 9)), training)
    gpu.idle_until(5.0)
    assert training.tokens == pytest.approx(5.0 * 0.9 * TRAINED_ALONE, rel=0.02)


def test_beside_each_other_both_are_slower_than_alone_where_memory_is_short_and_level_where_it_is_not() -> None:
    _, alone = decode(Scripted(Split(5, 0)), None)
    for training_share, slower in ((1, False), (5, True)):
        training = all_here()
        _, steps = decode(Scripted(Split(5, training_share)), training)
        assert (steps[-1].seconds > 1.02 * alone[-1].seconds) is slower
        rate = training.tokens / sum(s.seconds for s in steps)
        assert rate <= training_share / 10 * TRAINED_ALONE * 1.001
        if not slower:
            assert rate == pytest.approx(training_share / 10 * TRAINED_ALONE, rel=0.02)


def test_a_unit_that_runs_ends_with_its_part_of_the_gpu_though_training_is_paused() -> None:
    training = all_here()
    _, steps = decode(Scripted(Split(2, 8), Split(2, 8), Split(10, 0)), training, answer=6)
    whole_s = decode(Scripted(Split(10, 0)), None, answer=6)[1][-1].seconds
    third, fourth = steps[2], steps[3]
    assert not third.steady and third.seconds > 1.01 * whole_s
    assert fourth.steady and fourth.seconds == pytest.approx(whole_s, rel=0.01)


def test_training_waits_for_layers_that_its_window_lacks() -> None:
    """Few layers fit: each pass over the layers copies the others."""
    kind = replace(KIND, kv_bytes=6.5 * TRAIN.layer_bytes)
    splitting, training = Scripted(Split(2, 8)), windowed()
    _, steps = decode(splitting, training, answer=800, kind=kind)
    assert {s.window for s in steps} <= {4, 5, 6} and True in splitting.was_starved
    seconds = sum(s.seconds for s in steps)
    assert training.tokens / seconds < 0.6 * TRAINED_ALONE
    assert training.copies == pytest.approx(seconds / COPY_S, rel=0.15), "copies are what it waits for"
    training_here = all_here()
    decode(Scripted(Split(2, 8)), training_here, answer=800)
    assert training_here.tokens / seconds > 1.2 * training.tokens / seconds


def test_more_examples_a_layer_wait_less() -> None:
    kind, found = replace(KIND, kv_bytes=6.5 * TRAIN.layer_bytes), []
    for examples in (2, 8):
        training = Training(replace(TRAIN, examples=examples), Window(32, LAYER), COPY_S)
        decode(Scripted(Split(2, 8)), training, answer=400, kind=kind)
        found.append(training.tokens)
    assert found[1] > 1.2 * found[0]


def test_kv_takes_the_memory_of_layers_at_once_and_gives_it_back() -> None:
    kind = replace(KIND, kv_bytes=20 * TRAIN.layer_bytes, kept_granules=10)
    training = windowed()
    gpu, steps = decode(Scripted(Split(2, 8)), training, answer=300, count=30, kind=kind)
    least = min(s.window for s in steps)
    assert least < 12 and all(
        s.window * TRAIN.layer_bytes + s.used_bytes <= kind.kv_bytes * 1.001 for s in steps if s.window
    )
    gpu.idle_until(gpu._events.now + 1.0)
    assert training.window is not None and training.window.size == 19, (
        "one less than there is room for: KV has a reserve"
    )
    training.window.validate()


def test_equal_seeds_give_equal_runs_and_steps_are_reported_to_what_decides() -> None:
    kind = replace(KIND, noise=0.02)
    runs = []
    for _ in range(2):
        splitting = Scripted(Split(3, 7))
        _, steps = decode(splitting, windowed(), kind=kind)
        assert splitting.measured == [s.seconds for s in steps]
        runs.append(steps)
    assert runs[0] == runs[1]


def test_a_request_that_never_fits_is_refused() -> None:
    gpu = HarvestedGpu(replace(KIND, kv_bytes=1e9), Events(), Scripted(Split(10, 0)), None)
    with pytest.raises(ValueError, match="does not fit"):
        gpu.submit(request("long", 20_000, 10))
