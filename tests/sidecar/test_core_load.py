"""What is reported of a vLLM server: its load, its pace, its memory, and whether it gets on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.kv import KvShape
from sidecar.core.flights import Flight, Flights, pages
from sidecar.core.pace import Pace
from sidecar.core.samples import Sample, read
from sidecar.core.server_state import SILENT_S, STILL_S, STILL_TIMES, ServerState
from sidecar.core.shape import kv_shape

SHAPE = KvShape.of_heads(b"f" * 32, 4, 2, 16, 64, "bfloat16")
TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 640.0
vllm:generation_tokens_total{engine="0",model_name="m"} 64.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 1.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 3.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 0.75
vllm:cache_config_info{block_size="64",kv_cache_memory_bytes="1000",mamba_block_size="None",num_cpu_blocks="7",\
num_gpu_blocks="100",num_gpu_blocks_override="None"} 1.0
"""


# ---- figures ---------------------------------------------------------------------------------------------------------
def test_figures_are_read_by_name_and_not_by_prefix() -> None:
    sample = read(TEXT)
    assert sample is not None
    assert (sample.running, sample.waiting, sample.used) == (2, 1, 0.25)
    assert (sample.prompt_tokens, sample.external_hits, sample.cache_queries) == (640, 64, 100)
    assert (sample.ended, sample.ended_prefill_s) == (3, 0.75)
    assert (sample.blocks, sample.block_tokens) == (100, 64)


def test_engines_side_by_side_are_added() -> None:
    both = read(TEXT + TEXT.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75"))
    assert both is not None
    assert (both.running, both.used, both.blocks, both.prompt_tokens) == (4, 0.5, 200, 1280)


@pytest.mark.parametrize("text", ["", "vllm:", "vllm:x", "python_info 1.0\n", "vllm:num_requests_running{} much\n"])
def test_a_server_without_figures_has_none(text: str) -> None:
    assert read(text) is None


@given(st.text(max_size=200))
def test_any_text_is_read_or_passed_over(text: str) -> None:
    sample = read("vllm:num_requests_running 1.0\nvllm:" + text)
    assert sample is not None and 0 <= sample.used <= 1 and sample.running >= 0


@pytest.mark.parametrize("value", ["NaN", "-1.0", "+Inf"])
def test_a_figure_that_is_none_counts_as_unknown(value: str) -> None:
    sample = read(f"vllm:num_requests_running 1.0\nvllm:prompt_tokens_total {value}\n")
    assert sample is not None and sample.prompt_tokens == 0


# ---- pace ------------------------------------------------------------------------------------------------------------
def ended(
    sample: Sample, *, prompt: float, answer: float, prefill_s: float, decode_s: float, running: float = 1
) -> Sample:
    """One more request has ended."""
    return replace(
        sample,
        running=running,
        ended=sample.ended + 1,
        ended_computed_tokens=sample.ended_computed_tokens + prompt,
        ended_generated_tokens=sample.ended_generated_tokens + answer,
        ended_prefill_s=sample.ended_prefill_s + prefill_s,
        ended_decode_s=sample.ended_decode_s + decode_s,
    )


def test_pace_is_learnt_from_requests_that_have_ended() -> None:
    pace, sample = Pace(), Sample()
    pace.seen(sample)
    assert (pace.prefill_token_s, pace.request_s) == (0, 0), "nothing is claimed before"
    for _ in range(200):
        sample = ended(sample, prompt=1000, answer=100, prefill_s=0.5, decode_s=2.0)
        pace.seen(sample)
    assert pace.prefill_token_s == pytest.approx(0.0005)
    assert pace.token_s == pytest.approx(0.02)
    assert pace.answer_tokens == pytest.approx(100)
    assert pace.request_s == pytest.approx(0.5 + 100 * 0.02)
    assert pace.work_s(1000, 50) == pytest.approx(0.5 + 50 * 0.02)


def test_pace_follows_when_requests_change() -> None:
    pace, sample = Pace(), Sample()
    for n in range(400):
        sample = ended(sample, prompt=1000, answer=10, prefill_s=0.1 if n < 200 else 1.0, decode_s=0.1)
        pace.seen(sample)
    assert pace.prefill_token_s == pytest.approx(0.001, rel=0.05)


def test_a_step_is_shared_by_its_batch() -> None:
    pace, sample = Pace(), Sample()
    for _ in range(200):
        sample = ended(sample, prompt=1000, answer=100, prefill_s=0.1, decode_s=2.0, running=8)
        pace.seen(sample)
    assert pace.token_s == pytest.approx(0.02 / 8, rel=0.01)


def test_a_few_cached_tokens_do_not_make_prompts_look_expensive() -> None:
    pace, sample = Pace(), Sample()
    pace.seen(sample)
    sample = ended(sample, prompt=1, answer=1, prefill_s=0.05, decode_s=0.0)
    pace.seen(sample)
    assert pace.prefill_token_s == 0
    for _ in range(5):
        sample = ended(sample, prompt=2000, answer=10, prefill_s=1.0, decode_s=0.1)
        pace.seen(sample)
    assert pace.prefill_token_s == pytest.approx(0.0005, rel=0.02)


def test_a_server_that_starts_anew_is_not_a_request_that_took_negative_time() -> None:
    pace, sample = Pace(), Sample()
    for _ in range(50):
        sample = ended(sample, prompt=1000, answer=10, prefill_s=1.0, decode_s=1.0)
        pace.seen(sample)
    before = pace.prefill_token_s
    pace.seen(Sample())
    pace.seen(ended(Sample(), prompt=1000, answer=10, prefill_s=1.0, decode_s=1.0))
    assert pace.prefill_token_s == pytest.approx(before)


# ---- load ------------------------------------------------------------------------------------------------------------
def flight(name: str, *, priority: int = 0, prompt: int = 100, expected: int = 50, began_s: float = 0.0) -> Flight:
    return Flight(name, priority, prompt, expected, began_s, sent=True)


def test_a_load_counts_what_is_left_of_each_request_by_priority() -> None:
    flights, pace = Flights(), Pace()
    first, second = flight("a"), flight("b", priority=-1)
    flights.begin(first)
    flights.begin(second)
    load = flights.load(pace, Sample(running=1, waiting=1), SHAPE)
    assert (load.running, load.waiting, load.outstanding_tokens) == (1, 1, 300)
    assert load.outstanding_s == {0: pytest.approx(0.1 + 0.5), -1: pytest.approx(0.6)}
    first.answering, first.produced = True, 40
    assert flights.load(pace, Sample(running=2), SHAPE).outstanding_s[0] == pytest.approx(0.1)
    first.produced = 400
    assert flights.load(pace, Sample(running=2), SHAPE).outstanding_s[0] > 0, "it goes on"
    flights.end(first)
    flights.end(second)
    idle = flights.load(pace, Sample(), SHAPE)
    assert (idle.running, idle.waiting, idle.outstanding_tokens, idle.outstanding_s) == (0, 0, 0, {})


def test_requests_that_the_figures_do_not_show_yet_count_as_running() -> None:
    flights = Flights()
    flights.begin(flight("a"))
    assert flights.load(Pace(), Sample(), SHAPE).running == 1
    assert flights.load(Pace(), None, SHAPE).running == 1
    assert flights.load(Pace(), Sample(running=9), SHAPE).running == 1, "never more than there are"


def test_an_id_that_is_there_twice_is_reported_once() -> None:
    flights = Flights()
    twice = [flight("a"), flight("a")]
    for each in twice:
        flights.begin(each)
    assert flights.load(Pace(), None, SHAPE).in_flight == ("a",)
    flights.end(twice[0])
    assert flights.load(Pace(), None, SHAPE).in_flight == ("a",)


def test_a_request_is_alone_only_if_no_other_was_there_when_the_server_died() -> None:
    flights = Flights()
    alone = flight("a")
    flights.begin(alone)
    assert flights.lost(alone)
    flights.end(alone)
    pair = [flight("b"), flight("c")]
    for each in pair:
        flights.begin(each)
    assert not flights.lost(pair[0])
    flights.end(pair[0])
    assert not flights.lost(pair[1]), "though it is the last one that is told"


def test_a_request_that_the_server_does_not_have_is_no_company() -> None:
    flights = Flights()
    first, unsent = flight("a"), replace(flight("b"), sent=False)
    flights.begin(first)
    flights.begin(unsent)
    assert flights.lost(first)


def test_memory_is_counted_in_pages_of_a_layer_of_a_chunk() -> None:
    sample = Sample(used=0.25, blocks=100, block_tokens=64, prompt_tokens=6400)
    assert pages(sample, SHAPE) == (400, 300, 300)
    assert pages(replace(sample, prompt_tokens=40 * 64), SHAPE) == (400, 300, 60)
    assert pages(replace(sample, block_tokens=16), SHAPE)[0] == 100, "four blocks a chunk"
    assert pages(replace(sample, used=1.0), SHAPE) == (400, 0, 0)
    assert pages(None, SHAPE) == pages(Sample(), SHAPE) == (0, 0, 0)


# ---- the server ------------------------------------------------------------------------------------------------------
def test_a_server_is_down_until_it_rises_and_a_server_that_is_down_does_not_stall() -> None:
    state = ServerState()
    assert not state.up
    state.asks(0.0)
    assert state.stalled_s(100.0, 1.0, 0.0) == 0
    state.rises(100.0)
    assert state.up and state.stalled_s(100.0, 1.0, 0.0) == 0
    state.falls()
    assert not state.up and state.stalled_s(500.0, 1.0, 0.0) == 0


def test_a_server_that_answers_nothing_stalls_from_the_first_question_on() -> None:
    state = ServerState()
    state.rises(0.0)
    state.asks(10.0)
    state.asks(13.0)
    assert state.stalled_s(10.0 + SILENT_S, None, 0.0) == 0
    assert state.stalled_s(20.0 + SILENT_S, None, 0.0) == 10.0
    state.answered(30.0)
    assert state.stalled_s(40.0, None, 0.0) == 0


def test_an_engine_stalls_when_it_does_nothing_for_its_requests_for_longer_than_their_prompts_take() -> None:
    state = ServerState()
    state.rises(0.0)
    state.moved(100.0)
    due_s = 100.0 + STILL_S + STILL_TIMES * 2.0
    assert state.stalled_s(due_s, 50.0, 2.0) == 0
    assert state.stalled_s(due_s + 7.0, 50.0, 2.0) == pytest.approx(7.0)
    assert state.stalled_s(due_s + 7.0, None, 2.0) == 0, "without a request it need not move"
    assert state.stalled_s(due_s + 7.0, due_s, 2.0) == 0, "the request has only just come"


# ---- sizes -----------------------------------------------------------------------------------------------------------
LLAMA = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


def test_a_models_kv_is_sized_by_its_config() -> None:
    shape = kv_shape(LLAMA | {"dtype": "float32"}, "m", 64, "float32")
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (12, 2, 64, "float32")
    assert shape.piece_bytes == 2 * 2 * 64 * 64 * 4
    assert kv_shape(LLAMA | {"head_dim": 128}, "m", 64).head_dim == 128
    assert kv_shape({"text_config": LLAMA, "num_hidden_layers": 99}, "m", 64).layers == 12, "a model with images"


@pytest.mark.parametrize(
    ("stored", "served", "expected"),
    [("float32", "auto", "bfloat16"), ("float16", "auto", "float16"), ("bfloat16", "float32", "float32"),
     (None, "auto", "bfloat16")],
)  # fmt: skip
def test_the_type_is_the_one_that_vllm_serves(stored: str | None, served: str, expected: str) -> None:
    assert kv_shape(LLAMA | {"torch_dtype": stored}, "m", 64, served).dtype == expected


def test_a_latent_is_one_vector_a_token() -> None:
    shape = kv_shape(LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "m", 64)
    assert shape.piece_bytes == 64 * 576 * 2 and shape.kv_heads == 1


@pytest.mark.parametrize(
    "config", [None, {}, {"num_hidden_layers": "12"}, {"num_hidden_layers": True}, {"num_hidden_layers": 1 << 20}]
)
def test_a_config_without_sizes_is_taken_for_a_common_model(config: Any) -> None:
    assert kv_shape(config, "m", 64).layers == 32


def test_a_shape_is_named_alike_on_every_node_and_differs_by_model() -> None:
    assert kv_shape(LLAMA, "m", 64) == kv_shape(dict(LLAMA), "m", 64)
    assert kv_shape(LLAMA, "m", 64).fingerprint != kv_shape(LLAMA, "n", 64).fingerprint
