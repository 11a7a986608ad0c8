"""A worker's figures under vLLM's names: they are those of its requests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from contracts.models import ModelState
from tests.worker.engine_harness import CHUNK, Harness, tiny_model
from worker.core.request_figures import Distribution
from worker.service.vllm_names import VllmNames


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def shown(harness: Harness, state: ModelState = ModelState.ACTIVE) -> dict[str, float]:
    """Samples by name and label values, without model and engine."""
    registry = CollectorRegistry()
    registry.register(VllmNames([harness.engine], lambda name: state))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == harness.engine.model_name and sample.labels["engine"] == "0"
            more = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
            found[".".join([sample.name.removeprefix("vllm:"), *more])] = sample.value
    return found


def test_turns_are_counted_as_vllm_counts_them(model: Path) -> None:
    harness = Harness(model)
    try:
        prompt = list(range(3, 3 + 4 * CHUNK + 5))
        harness.run(prompt, 6)
        harness.settle()
        first = shown(harness)
        assert first["prompt_tokens_total"] == len(prompt) and first["generation_tokens_total"] == 6
        assert first["prefix_cache_hits_total"] == first["external_prefix_cache_hits_total"] == 0
        assert first["request_success_total.length"] == 1 and first["request_success_total.stop"] == 0
        assert first["time_to_first_token_seconds_count"] == first["e2e_request_latency_seconds_count"] == 1
        assert first["inter_token_latency_seconds_count"] == first["time_per_output_token_seconds_count"] == 5
        assert first["request_prompt_tokens_sum"] == len(prompt) and first["request_generation_tokens_sum"] == 6
        assert first["request_params_max_tokens_sum"] == 6
        whole_s = first["request_queue_time_seconds_sum"] + first["request_inference_time_seconds_sum"]
        assert first["e2e_request_latency_seconds_sum"] == pytest.approx(whole_s, abs=0.02)
        between_s = first["inter_token_latency_seconds_sum"]
        assert first["request_decode_time_seconds_sum"] == pytest.approx(between_s)
        assert first["request_time_per_output_token_seconds_sum"] == pytest.approx(between_s / 5)
        # The steps had all tokens of the prompt and those of the answer but the last.
        assert first["iteration_tokens_total_sum"] == len(prompt) + 5
        assert (first["num_requests_running"], first["num_requests_waiting"]) == (0, 0)

        harness.run(prompt, 1)  # its whole chunks are in HBM
        harness.purge()
        harness.run(prompt, 1)  # and now in the store only
        harness.settle()
        found = shown(harness)
        kept = 4 * CHUNK
        assert found["prefix_cache_hits_total"] == kept == found["external_prefix_cache_hits_total"]
        assert found["prefix_cache_queries_total"] == found["prompt_tokens_total"] == 3 * len(prompt)
        assert found["external_prefix_cache_queries_total"] == 3 * len(prompt) - kept
        assert found["prompt_tokens_cached_total"] == 2 * kept
        by_source = [found[f"prompt_tokens_by_source_total.{s}"] for s in ("local_cache_hit", "external_kv_transfer")]
        assert by_source == [kept, kept]
        assert found["prompt_tokens_by_source_total.local_compute"] == 3 * len(prompt) - 2 * kept
        assert found["request_prefill_kv_computed_tokens_sum"] == 3 * len(prompt) - 2 * kept
    finally:
        harness.close()


def test_a_running_request_holds_memory_and_one_that_is_cancelled_is_an_abort(model: Path) -> None:
    harness = Harness(model, step_ms=20)
    try:
        request = harness.submit(list(range(3, 40)), 400)
        while not (now := shown(harness))["num_requests_running"]:
            time.sleep(0.01)
        assert now["num_requests_running"] == 1 and 0 < now["kv_cache_usage_perc"] < 1
        harness.cancel(request)
        assert harness.wait(request)[0].finish == "cancelled"
        harness.settle()
        after = shown(harness)
        assert after["request_success_total.abort"] == 1 and after["e2e_request_latency_seconds_count"] == 0
        assert after["kv_cache_usage_perc"] == 0
    finally:
        harness.close()


def test_a_model_whose_weights_left_the_device_sleeps(model: Path) -> None:
    harness = Harness(model, store=False)
    try:
        assert shown(harness)["engine_sleep_state.awake"] == 1
        cold = shown(harness, ModelState.COLD)
        assert (cold["engine_sleep_state.awake"], cold["engine_sleep_state.weights_offloaded"]) == (0, 1)
    finally:
        harness.close()


def test_a_value_is_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    values = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        values.add(value)
    assert values.cumulated() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert values.total == 12.0
