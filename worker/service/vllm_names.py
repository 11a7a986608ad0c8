"""A worker's figures under the names that vLLM's dashboards ask for (`worker.vllm_names`).

A worker is to them a vLLM server with one engine. What vLLM alone has (speculative decoding, LoRA slots, KV block
samples) is left out rather than shown as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.models import ModelState
from worker.core.request_figures import ENDS, Distribution, RequestFigures
from worker.engine.engine import NativeEngine

PREFIX = "vllm:"
#: The number of a worker's only engine.
_ENGINE = "0"
#: By name: help, and the distribution.
_HISTOGRAMS: dict[str, tuple[str, Callable[[RequestFigures], Distribution]]] = {
    "time_to_first_token_seconds": (
        "Time to first token, from when the engine has a request",
        lambda f: f.first_token_s,
    ),
    "inter_token_latency_seconds": ("Time between two tokens of an answer", lambda f: f.between_tokens_s),
    "time_per_output_token_seconds": (
        "As inter_token_latency_seconds, under vLLM's earlier name",
        lambda f: f.between_tokens_s,
    ),
    "request_time_per_output_token_seconds": ("Mean time of an answer's tokens after the first", lambda f: f.token_s),
    "e2e_request_latency_seconds": ("Time of a request in the engine", lambda f: f.request_s),
    "request_queue_time_seconds": ("Time that a request waited for its turn and for memory", lambda f: f.waited_s),
    "request_inference_time_seconds": ("Time of a request less its waiting", lambda f: f.inference_s),
    "request_prefill_time_seconds": ("Time from the end of waiting to the first token", lambda f: f.prefill_s),
    "request_decode_time_seconds": ("Time from the first token to the last", lambda f: f.decode_s),
    "request_prompt_tokens": ("Tokens of a request's prompt", lambda f: f.prompt_tokens),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt that no cache had", lambda f: f.computed_tokens),
    "request_generation_tokens": ("Tokens of an answer", lambda f: f.answer_tokens),
    "request_max_num_generation_tokens": (
        "As request_generation_tokens: each choice of a request counts on its own",
        lambda f: f.answer_tokens,
    ),
    "request_params_max_tokens": ("Tokens that an answer may have", lambda f: f.most_tokens),
    "iteration_tokens_total": ("Tokens of a step, of prompts and answers", lambda f: f.step_tokens),
}


class VllmNames(Collector):
    """Of these engines. state: of the named model. Collected on other threads."""

    def __init__(self, engines: Sequence[NativeEngine], state: Callable[[str], ModelState]) -> None:
        self._engines, self._state = tuple(engines), state

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._load()
        yield from self._tokens()
        ended = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Accepted requests by how they ended: stop, length, abort, error",
            labels=["model_name", "engine", "finished_reason"],
        )
        for engine in self._engines:
            for end in ENDS:
                ended.add_metric([engine.model_name, _ENGINE, end], engine.figures.ended[end])
        yield ended
        for name, (text, of) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name", "engine"])
            for engine in self._engines:
                values = of(engine.figures)
                family.add_metric([engine.model_name, _ENGINE], values.cumulated(), values.total)
            yield family

    def _load(self) -> Iterator[Metric]:
        running, waiting = (
            _gauge("num_requests_running", "Requests in steps"),
            _gauge("num_requests_waiting", "Requests that are in no step yet"),
        )
        reasons = _gauge(
            "num_requests_waiting_by_reason",
            "Requests that are in no step yet: for their turn or memory (capacity), or for their KV (deferred)",
            "reason",
        )
        used = _gauge("kv_cache_usage_perc", "Part of the KV memory that requests hold, from 0 to 1")
        asleep = _gauge(
            "engine_sleep_state",
            "1 for the state that the model is in: awake; weights_offloaded: in host memory only",
            "sleep_state",
        )
        for engine in self._engines:
            labels, now = [engine.model_name, _ENGINE], engine.counts
            running.add_metric(labels, now.running)
            waiting.add_metric(labels, now.waiting)
            reasons.add_metric([*labels, "capacity"], now.waiting - now.loading)
            reasons.add_metric([*labels, "deferred"], now.loading)
            used.add_metric(labels, (now.pages_total - now.pages_free) / now.pages_total if now.pages_total else 0.0)
            cold = self._state(engine.model_name) is ModelState.COLD
            asleep.add_metric([*labels, "awake"], not cold)
            asleep.add_metric([*labels, "weights_offloaded"], cold)
        yield from (running, waiting, reasons, used, asleep)

    def _tokens(self) -> Iterator[Metric]:
        prompt = _counter("prompt_tokens", "Tokens of prompts that have been answered")
        source = _counter(
            "prompt_tokens_by_source",
            "The same by where their KV was: local_compute (nowhere), local_cache_hit (HBM), external_kv_transfer "
            "(DRAM, SSD, other nodes, blob)",
            "source",
        )
        cached = _counter("prompt_tokens_cached", "Those of them that a cache had")
        asked = _counter("prefix_cache_queries", "Tokens of prompts that were looked for in HBM")
        hits = _counter("prefix_cache_hits", "Those of them that were there")
        asked_below = _counter("external_prefix_cache_queries", "Tokens of prompts that were looked for below HBM")
        hits_below = _counter("external_prefix_cache_hits", "Those of them that were loaded")
        answers = _counter("generation_tokens", "Tokens of answers")
        preempted = _counter("num_preemptions", "Requests that gave their place and pages to others")
        for engine in self._engines:
            labels, f = [engine.model_name, _ENGINE], engine.figures
            computed, in_hbm, brought = f.computed, f.in_hbm, f.brought
            prompt.add_metric(labels, computed + in_hbm + brought)
            source.add_metric([*labels, "local_compute"], computed)
            source.add_metric([*labels, "local_cache_hit"], in_hbm)
            source.add_metric([*labels, "external_kv_transfer"], brought)
            cached.add_metric(labels, in_hbm + brought)
            asked.add_metric(labels, computed + in_hbm + brought)
            hits.add_metric(labels, in_hbm)
            asked_below.add_metric(labels, computed + brought)
            hits_below.add_metric(labels, brought)
            answers.add_metric(labels, f.generated)
            preempted.add_metric(labels, engine.tallies().preemptions)
        yield from (prompt, source, cached, asked, hits, asked_below, hits_below, answers, preempted)


def _gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=["model_name", "engine", *more])


def _counter(name: str, text: str, *more: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=["model_name", "engine", *more])
