"""Spans of a request in the worker, and what its store is told."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.trace_context import TraceContext, from_wire
from contracts.turn_times import Phase
from runtime.spans import Kind
from storelink.core.load_plan import Source
from tests.traced import SPAN_ID, TRACE_ID, Recorder, is_below, recording
from tests.worker.engine_harness import Harness, random_prompt, tiny_model
from worker.core.turn_times import MOST_STAYS, TurnTimes
from worker.engine.turn_traces import _joined

ABOVE = TraceContext(TRACE_ID, SPAN_ID, state="a=1")
PROMPT = random_prompt(random.Random(2), 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def spans() -> Iterator[Recorder]:
    with recording() as made:
        yield made


@pytest.fixture
def harness(model: Path, spans: Recorder) -> Iterator[Harness]:
    made = Harness(model)
    yield made
    made.settle()
    made.close()


def traced(harness: Harness, max_tokens: int = 4) -> None:
    harness.run(PROMPT, max_tokens, trace=ABOVE.to_wire())
    harness.settle()


def test_a_cold_turn_waits_computes_decodes_and_saves(harness: Harness, spans: Recorder) -> None:
    traced(harness)
    whole = spans.one("worker.generate")
    assert is_below(whole, ABOVE) and whole.context.state == "a=1" and whole.kind is Kind.SERVER
    parts = {span.name for span in spans.spans if is_below(span, whole)}
    assert {"prefill", "decode", "kv save"} <= parts <= {"queue", "kv load", "prefill", "decode", "kv save"}
    prefill, decode = spans.one("prefill"), spans.one("decode")
    assert whole.began_s <= prefill.began_s < prefill.ended_s == decode.began_s < decode.ended_s == whole.ended_s
    assert prefill.attributes["upbeat.computed_tokens"] == 100
    assert decode.attributes["gen_ai.usage.output_tokens"] == whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert whole.attributes["gen_ai.usage.input_tokens"] == 100
    saved = [save.attributes["upbeat.kv.copied_tokens"] for save in spans.named("kv save")]
    assert sum(saved) == 96, "the chunks that are full"  # type: ignore[arg-type]
    assert harness.engine.traces is not None and not harness.engine.traces.live and not harness.engine.traces._saves


@pytest.mark.parametrize("source", [Source.SSD, Source.BLOB])
def test_a_load_says_from_where_its_tokens_came(harness: Harness, spans: Recorder, source: Source) -> None:
    harness.run(PROMPT, 4)
    harness.purge()
    assert not spans.spans, "that turn is not traced"
    assert harness.store is not None
    harness.store.source = source
    traced(harness)
    load, whole = spans.one("kv load"), spans.one("worker.generate")
    assert is_below(load, whole) and load.ended_s > load.began_s
    assert load.attributes[f"upbeat.kv.{source.name.lower()}_tokens"] == 96
    assert (load.attributes["upbeat.kv.hbm_tokens"], load.attributes["upbeat.kv.loaded_tokens"]) == (0, 96)
    assert spans.one("prefill").attributes["upbeat.computed_tokens"] == 4
    asked = harness.store.asked[-1]
    assert asked.request_id == whole.attributes["upbeat.request_id"] and from_wire(asked.trace) == whole.context


def test_ids_go_to_the_store_whether_or_not_a_turn_is_traced(model: Path) -> None:
    made = Harness(model)
    made.run(PROMPT, 4)
    made.purge()
    made.run(PROMPT, 4)
    made.settle()
    assert made.store is not None
    assert made.store.asked[-1].request_id == "r2" and not made.store.asked[-1].trace
    assert {save.request_id for save in made.store.offered} == {"r1"} and made.engine.traces is None
    assert not any(save.trace for save in made.store.offered)
    made.close()


def test_a_cancelled_turn_ends_its_span(harness: Harness, spans: Recorder) -> None:
    request = harness.submit(PROMPT, 400, trace=ABOVE.to_wire())
    harness.cancel(request)
    harness.wait(request)
    harness.settle()
    whole = spans.one("worker.generate")
    assert whole.attributes["error.type"] == "cancelled" and not whole.error
    assert harness.engine.traces is not None and not harness.engine.traces.live


@pytest.mark.parametrize("bad", ["x", "00-" + "0" * 32 + "-" + SPAN_ID + "-01", "y" * 100_000])
def test_a_bad_trace_of_a_gateway_is_none(harness: Harness, spans: Recorder, bad: str) -> None:
    assert harness.run(PROMPT, 4, trace=bad).finish == "length" and not spans.spans


def test_no_tokens_are_in_any_span(harness: Harness, spans: Recorder) -> None:
    traced(harness)
    told = json.dumps([[s.name, s.attributes, s.error] for s in spans.spans])
    assert str(PROMPT[3:8])[1:-1] not in told
    assert all(value == ["length"] for s in spans.spans for value in s.attributes.values() if isinstance(value, list))


def test_tokens_are_the_same_with_and_without_traces(model: Path, harness: Harness) -> None:
    other = Harness(model)
    assert harness.run(PROMPT, 12, trace=ABOVE.to_wire()).tokens == other.run(PROMPT, 12).tokens
    other.close()


# ---- stays ---------------------------------------------------------------------------------------------------------
def test_neighbouring_stays_of_one_kind_are_one_span_and_a_restart_is_another() -> None:
    times = TurnTimes(0.0)
    times.stays = []
    times.enter(Phase.MEMORY, 1.0)
    times.enter(Phase.LOCATE, 2.0)
    times.load(Source.SSD, 2.5)
    times.enter(Phase.COMPUTE, 3.0)
    times.stepped(4.0, None, 0.25, 0.25)
    times.enter(Phase.COMPUTE, 4.5)
    times.stepped(5.0, None, 0.0, 0.0)
    times.enter(Phase.QUEUE, 5.5)
    times.enter(Phase.COMPUTE, 6.0)
    times.stepped(7.0, None, 0.0, 0.0)
    spent = times.take(7.0, Phase.DECODE)
    assert _joined(times.stays) == [
        ("queue", 0.0, 2.0),
        ("kv load", 2.0, 3.0),
        ("prefill", 3.0, 5.5),
        ("queue", 5.5, 6.0),
        ("prefill", 6.0, 7.0),
    ]
    assert sum(spent.values()) == 7.0


def test_stays_are_bounded() -> None:
    times = TurnTimes(0.0)
    times.stays = []
    for step in range(10_000):
        times.enter(Phase.QUEUE if step % 2 else Phase.COMPUTE, step + 1.0)
    assert len(times.stays) == MOST_STAYS
