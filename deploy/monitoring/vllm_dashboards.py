"""What vLLM's own dashboards ask (vllm-project/vllm, examples/observability): `make dashboards` checks that Upbeat has
an answer to each. Variables are filled in as for our own."""

from __future__ import annotations

_OF = '{model_name="$model_name"}'
_FOR = '{model_name=~"$Deployment_id"}'
_OVER = '{job=~"$job", model_name=~"$model_name", instance=~"$instance"}'
_ENGINE = '{job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"}'


def _quantiles(metric: str, of: str, *quantiles: str, by: str = "le", over: str = "$__rate_interval") -> list[str]:
    return [f"histogram_quantile({q}, sum by({by}) (rate(vllm:{metric}_bucket{of}[{over}])))" for q in quantiles]


def _mean(metric: str, of: str) -> str:
    return f"rate(vllm:{metric}_sum{of}[$__rate_interval]) / rate(vllm:{metric}_count{of}[$__rate_interval])"


_MAIN = [
    expr
    for metric in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
    for expr in (*_quantiles(metric, _OF, "0.99", "0.95", "0.9", "0.5"), _mean(metric, _OF))
]
_MAIN += [
    f"rate(vllm:{metric}{_OF}[$__rate_interval])" for metric in ("prompt_tokens_total", "generation_tokens_total")
]
_MAIN += [f"vllm:{metric}{_OF}" for metric in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
_MAIN += [
    f"sum by(le) (increase(vllm:{metric}_bucket{_OF}[$__rate_interval]))"
    for metric in ("request_prompt_tokens", "request_generation_tokens")
]
_MAIN += [f"sum by(finished_reason) (increase(vllm:request_success_total{_OF}[$__rate_interval]))"]
_MAIN += [
    f"rate(vllm:{metric}_sum{_OF}[$__rate_interval])"
    for metric in (
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_max_num_generation_tokens",
    )
]

_QUERY_STATISTICS = [
    f"sum by (model_name) (rate(vllm:request_success_total{_FOR}[$__rate_interval]))",
    f"sum(rate(vllm:request_success_total{_FOR}[$__rate_interval]))",
    *_quantiles("e2e_request_latency_seconds", _FOR, "0.50", "0.90", "0.99", by="le, model_name"),
    f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{_FOR}[$__rate_interval]))",
    *_quantiles("request_prompt_tokens", _FOR, "0.50", "0.90", "0.99", by="le, model_name"),
    f"sum(rate(vllm:prompt_tokens_total{_FOR}[$__rate_interval]))"
    f" / sum(rate(vllm:request_success_total{_FOR}[$__rate_interval]))",
    f"sum by (model_name) (rate(vllm:prompt_tokens_total{_FOR}[$__rate_interval]))",
    f"sum by (model_name) (rate(vllm:generation_tokens_total{_FOR}[$__rate_interval]))",
    f"sum(rate(vllm:prompt_tokens_total{_FOR}[$__rate_interval]))",
    f"sum(rate(vllm:generation_tokens_total{_FOR}[$__rate_interval]))",
]

_PERFORMANCE = [
    expr
    for metric in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
    for expr in (
        _mean(metric, ""),
        *_quantiles(metric, "", "0.99", "0.90", "0.50", over="$__range"),
        f"(sum(increase(vllm:{metric}_sum[$__range])) / sum(increase(vllm:{metric}_count[$__range])))",
    )
]
_PERFORMANCE += _quantiles("inter_token_latency_seconds", "", "0.50", "0.90", "0.99")
_PERFORMANCE += [
    f"rate(vllm:{metric}[$__rate_interval])"
    for metric in ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_count")
]

_ANY = f"count(vllm:num_requests_running{_OVER})"
_ENDED = f"sum(rate(vllm:request_success_total{_OVER}[$__range]))"
_ERRORS = _OVER.replace("}", ', finished_reason="error"}')
_STATUS = [
    "(2 - (max(vllm:engine_sleep_state" + _OVER.replace("}", ', sleep_state="awake"}') + ") == bool 0)) or vector(0)",
    f"({_quantiles('time_to_first_token_seconds', _OVER, '0.5', over='$__range')[0]}) and on () {_ANY}",
    f"(sum(rate(vllm:generation_tokens_total{_OVER}[$__range]))"
    f" / (sum(avg_over_time(vllm:num_requests_running{_OVER}[$__range])) > 0)) and on () {_ANY}",
    f"(1 - (sum(rate(vllm:request_success_total{_ERRORS}[$__range])) / ({_ENDED} > 0))) and on () {_ANY}",
    f"(60 * {_ENDED}) and on () {_ANY}",
]

#: The parts of these that are about an engine: load, latencies, cache. What is about vLLM's HTTP server, speculative
#: decoding, block samples and its connectors has no counterpart.
_NEWER = [
    f"sum(rate(vllm:request_success_total{_OVER}[$__rate_interval]))",
    f"sum(rate(vllm:prompt_tokens_total{_OVER}[$__rate_interval]))",
    *_quantiles("time_to_first_token_seconds", _OVER, "0.95"),
    *_quantiles("inter_token_latency_seconds", _OVER, "0.95"),
    *_quantiles("e2e_request_latency_seconds", _OVER, "0.95"),
    'count(up{job=~"$job"} == 0) or vector(0)',
    _ANY,
    f"sum by (instance, engine) (vllm:num_requests_running{_ENGINE})",
    f"sum by (instance, engine) (vllm:num_requests_waiting{_ENGINE})",
    f"max by (model_name, instance) (vllm:kv_cache_usage_perc{_ENGINE})",
    f"sum by (model_name, instance) (rate(vllm:num_preemptions_total{_ENGINE}[$__rate_interval]))",
    'max by (model_name, instance) ((time() - process_start_time_seconds{job=~"$job", instance=~"$instance"})'
    " * on (job, instance) group_left (model_name)"
    f" group by (job, instance, model_name) (vllm:num_requests_running{_ENGINE}))",
    f"sum(rate(vllm:prefix_cache_hits_total{_ENGINE}[$__rate_interval]))"
    f" / (sum(rate(vllm:prefix_cache_queries_total{_ENGINE}[$__rate_interval])) > 0)",
    f"sum(rate(vllm:prompt_tokens_cached_total{_ENGINE}[$__rate_interval]))"
    f" / (sum(rate(vllm:prompt_tokens_total{_ENGINE}[$__rate_interval])) > 0)",
    "sum(vllm:num_requests_waiting_by_reason" + _ENGINE.replace("}", ', reason="capacity"}') + ")",
    "sum(vllm:num_requests_waiting_by_reason" + _ENGINE.replace("}", ', reason="deferred"}') + ")",
]

#: By dashboard.
QUERIES: dict[str, list[str]] = {
    "prometheus_grafana/grafana.json": _MAIN,
    "dashboards/grafana/query_statistics.json": _QUERY_STATISTICS,
    "dashboards/grafana/performance_statistics.json": _PERFORMANCE,
    "dashboards/grafana/vllm_service_status.json": _STATUS,
    "dashboards/grafana/vllm_overview.json, vllm_instances.json, vllm_kv_cache.json": _NEWER,
}
