"""A request that raises, or for which the model gives no number, fails alone: the engine goes on, and what others read
is what they read without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from contracts.request import Failed, Output, Sampling
from tests.worker.engine_harness import VOCAB, Harness, random_prompt, tiny_model
from worker.devices.runner import Slice, Steps
from worker.sampling.output import Guide

HONEST = random_prompt(random.Random(5), 40)


class Faulty:
    """A runner with a fault: `raises` is asked for each step's slices; `spoil` may change its logits."""

    def __init__(self, runner: Steps) -> None:
        self.runner = runner
        self.raises: Callable[[list[Slice]], bool] = lambda slices: False
        self.spoil: Callable[[list[Slice], torch.Tensor], None] = lambda slices, logits: None
        self.after_layers = 0

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        def after(layer: int) -> None:
            after_layer(layer)
            if layer == self.after_layers and self.raises(slices):
                raise FloatingPointError("this step cannot be computed")

        logits = self.runner.step(slices, before_layer, after)
        self.spoil([s for s in slices if s.want_logits], logits)
        return logits


class FaultyHouse(Harness):
    """Notes what fails instead of raising."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.failed: dict[str, list[Any]] = {}
        #: What honest requests are answered in a quiet engine; empty until they have been asked.
        self.alone: list[list[int]] = []
        super().__init__(*args, **more)
        self.faulty = Faulty(self.engine.stepping.runner)
        self.engine.stepping.runner = self.faulty

    def _fail(self, failed: Failed) -> None:
        self.failed[failed.request_id] = failed.error
        self._take(Output(failed.request_id, "", [], 0, None, "cancelled"))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyHouse]:
    made = FaultyHouse(tiny_model(tmp_path_factory.mktemp("tiny")))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _mend(harness: FaultyHouse) -> Iterator[None]:
    yield
    harness.faulty.raises = lambda slices: False
    harness.faulty.spoil = lambda slices, logits: None
    harness.failed.clear()
    harness.settle()


def beside(harness: FaultyHouse, bad: Callable[[], str], param: str | None = None) -> list[Any]:
    """The error of a bad request that runs beside honest ones, whose answers are those of a quiet engine."""
    prompts = [HONEST[:length] for length in (7, 19, 40)]
    if not harness.alone:
        harness.alone = [harness.run(p, 24, session=f"h{len(p)}").tokens for p in prompts]
    running = [harness.submit(p, 24, session=f"h{len(p)}") for p in prompts]
    name = bad()
    harness.wait(name)
    assert [r.tokens for r in harness.wait(*running)] == harness.alone
    status, message, given, code = harness.failed[name]
    assert (status, code, given) == (400, "generation_failed", param), message
    return harness.failed[name]


# ---- parameters ------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", float("nan")),
        ("frequency_penalty", -1e300),
        ("logit_bias", {7: float("nan")}),
    ],
)
def test_parameters_that_leave_no_finite_logit_fail_their_request_and_name_the_field(
    harness: FaultyHouse, param: str, value: Any, temperature: float
) -> None:
    def bad() -> str:
        return harness.submit(HONEST, 24, session="bad", temperature=temperature, **{param: value})

    assert param in beside(harness, bad, param)[1]


# ---- what raises -----------------------------------------------------------------------------------------------
class Broken:
    """A constraint that raises where it is told to; what Rust libraries raise when they panic is no Exception."""

    class Panic(BaseException):
        pass

    error = ""
    complete = False

    def __init__(self, where: str) -> None:
        self._where = where

    def allowed(self) -> Any:
        if self._where == "allowed":
            raise self.Panic("a library panics")
        return np.ones(VOCAB, bool)

    def took(self, token: int) -> None:
        if self._where == "took":
            raise self.Panic("a library panics")


class BrokenReader:
    """A reader of calls that raises."""

    def push(self, text: str, last: bool = False) -> Any:
        raise IndexError("a reader fails")


@pytest.mark.parametrize("where", ["allowed", "took", "reader", "decoder", "prompt", "stop"])
def test_whatever_raises_for_one_request_fails_that_request(harness: FaultyHouse, where: str) -> None:
    def bad() -> str:
        if where == "prompt":
            return harness.submit([*HONEST, -1], 24, session="bad")
        if where == "stop":
            return harness.submit(HONEST, 24, session="bad", stop=[7])
        guide = Guide(Broken(where), BrokenReader() if where == "reader" else None)  # type: ignore[arg-type]
        harness.guide = lambda request: guide
        try:
            name = harness.submit(HONEST, 24, session="bad", skip_special_tokens=where != "decoder")
        finally:
            del harness.guide
        return name

    if where == "decoder":
        harness.codec.spelling = _fails  # type: ignore[method-assign]
    try:
        beside(harness, bad)
    finally:
        harness.codec.__dict__.pop("spelling", None)


def _fails(token: int) -> bytes:
    raise UnicodeError("no such spelling")


def test_a_second_request_with_an_id_that_is_taken_is_refused_and_the_first_goes_on(harness: FaultyHouse) -> None:
    first = harness.submit(HONEST, 40)
    harness._count -= 1
    results = harness._results[first]
    assert harness.submit(HONEST, 40) == first
    harness._results[first] = results
    harness.wait(first)
    assert harness.failed[first][2] == "request_id"
    results.finish = None
    harness.wait(first)
    assert len(results.tokens) == 40


# ---- steps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", [0, 3])
def test_of_a_step_that_raises_only_the_sequence_at_fault_fails(harness: FaultyHouse, layer: int) -> None:
    poison = 1990 + layer  # else its KV is cached
    harness.faulty.after_layers = layer
    harness.faulty.raises = lambda slices: any(poison in s.tokens for s in slices)
    error = beside(harness, lambda: harness.submit([*HONEST[::-1], poison, *HONEST], 24, session="bad"))
    assert "FloatingPointError" in error[1]
    harness.faulty.raises = lambda slices: False
    again = harness.run([*HONEST[::-1], poison, *HONEST], 24, session="bad")
    fresh = harness.run([*HONEST[::-1], poison, *HONEST], 24, session="bad", stop=["\x00never"])
    assert again.tokens == fresh.tokens, "what the failed one left in the cache is right, or not there"


def test_a_step_that_raises_on_everything_is_the_devices_fault_and_ends_the_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = FaultyHouse(tiny_model(tmp_path_factory.mktemp("tiny")), store=False)
    made.faulty.raises = lambda slices: True
    made.submit(HONEST, 4)
    made.loop._thread.join(timeout=30)
    assert [type(e) for e in made.crashes] == [FloatingPointError]
    made.crashes.clear()
    made.close()


# ---- the model's own numbers -----------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_number_fails_its_request_only(harness: FaultyHouse, number: float) -> None:
    poison = {"nan": 1980, "inf": 1981, "-inf": 1982}[str(number)]

    def spoil(slices: list[Slice], logits: torch.Tensor) -> None:
        for row, s in zip(logits, slices, strict=True):
            if poison in s.tokens:
                row[:] = number

    harness.faulty.spoil = spoil
    beside(harness, lambda: harness.submit([*HONEST, poison], 24, session="bad"))


def test_cached_kv_that_gives_no_number_is_forgotten_and_computed_again(harness: FaultyHouse) -> None:
    prompt = random_prompt(random.Random(11), 70)
    right = harness.run(prompt, 8, session="faulty").tokens
    harness.settle()
    index = harness.cache.index
    before = set(index)
    keys = [key for key, block in index.items() if any(s.session_id == "faulty" for s in block.sessions)]
    for key in keys:
        for page in index[key].pages:
            harness.kv.page_bytes_view(int(page))[:] = 0xFF  # float32: not a number
    result = harness.run(prompt, 8, session="faulty")
    assert result.tokens == right and not result.cached and not harness.failed
    harness.settle()
    assert set(index) == before and harness.run(prompt, 8, session="faulty").tokens == right


def test_sampling_defaults_are_within_their_ranges() -> None:
    from worker.core.bounds import check_sampling

    check_sampling(Sampling())
