"""The gateway's metrics. Names are `upbeat_gateway_*`; times are in seconds."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from runtime.telemetry import REGISTRY, from_zero

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)
_TURN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)

REQUESTS = Counter("upbeat_gateway_requests", "Answers by route and status", ["route", "status"], registry=REGISTRY)
TTFT = Histogram(
    "upbeat_gateway_ttft_seconds",
    "Arrival to first token",
    ["route", "model"],
    buckets=_TTFT_BUCKETS,
    registry=REGISTRY,
)
TPOT = Histogram(
    "upbeat_gateway_tpot_seconds",
    "Time a token after the first",
    ["route", "model"],
    buckets=_TPOT_BUCKETS,
    registry=REGISTRY,
)
SLO_TURNS = Counter(
    "upbeat_gateway_slo_turns",
    "Answers that a model's target (target: ttft, tpot) counts for: not refused ones (4xx), nor those whose caller "
    "left in time. TPOT: answers of several tokens; for models on vLLM: streams",
    ["model", "target"],
    registry=REGISTRY,
)
SLO_ATTAINED = Counter(
    "upbeat_gateway_slo_attained",
    "Answers that kept to their model's target; a failed one keeps none",
    ["model", "target"],
    registry=REGISTRY,
)
TURN = Histogram(
    "upbeat_gateway_turn_seconds",
    "Where the time of a turn went, by phase (docs/api.md); those before decode end with the first token",
    ["model", "phase"],
    buckets=_TURN_BUCKETS,
    registry=REGISTRY,
)
TURN_RECORDS = Counter(
    "upbeat_gateway_turn_records",
    "Records of phases for schedulers: told; lost, as none answered; dropped, as too many waited",
    ["outcome"],
    registry=REGISTRY,
)
ACTIVE = Gauge("upbeat_gateway_active_generations", "Choices that are being generated", registry=REGISTRY)
TOKENS = Counter(
    "upbeat_gateway_tokens", "Tokens, kind: prompt, cached, completion", ["kind", "model"], registry=REGISTRY
)
HINTS = Counter(
    "upbeat_gateway_hints",
    "Hints, kind: advisory, invalidation; outcome: told to a scheduler, lost, dropped, limited",
    ["kind", "outcome"],
    registry=REGISTRY,
)
RETRIES = Counter(
    "upbeat_gateway_retries",
    "Attempts after the first, cause: no node, unreachable, worker lost, worker failed, late",
    ["cause"],
    registry=REGISTRY,
)
POISONOUS = Counter(
    "upbeat_gateway_poisonous",
    "Requests that an engine died of, what: found, refused (later ones of the same content)",
    ["what"],
    registry=REGISTRY,
)
PLACED = Counter(
    "upbeat_gateway_placed",
    "Attempts by who chose the node: hint, scheduler, standby, direct",
    ["by"],
    registry=REGISTRY,
)
STREAMS = Gauge("upbeat_gateway_worker_streams", "Worker streams that stand", registry=REGISTRY)
LIMITED = Counter(
    "upbeat_gateway_limited",
    "Requests refused with 429, what: requests, tokens, concurrent, day, month (of those for text), queries",
    ["what"],
    registry=REGISTRY,
)
SHED = Counter(
    "upbeat_gateway_shed",
    "Refused with 503, what there was too much of: bodies, decoding, requests, connections",
    ["what"],
    registry=REGISTRY,
)
HEAVY = Counter("upbeat_gateway_heavy_bodies", "Bodies decoded in a helper process", registry=REGISTRY)
CUT = Counter("upbeat_gateway_cut", "Connections closed for slowness, why: headers, write", ["why"], registry=REGISTRY)
HANDSHAKES = Counter(
    "upbeat_gateway_handshakes_failed",
    "TLS handshakes of clients that failed or took longer than header_s",
    registry=REGISTRY,
)
BODY_BYTES = Gauge("upbeat_gateway_body_bytes", "Bytes of request bodies that are held", registry=REGISTRY)


from_zero(TURN_RECORDS, "told", "lost", "dropped")
from_zero(HINTS, *((kind, what) for kind in ("advisory", "invalidation") for what in ("told", "lost", "dropped")))
from_zero(HINTS, ("advisory", "limited"))
from_zero(RETRIES, "no node", "unreachable", "worker lost", "worker failed", "late")
from_zero(POISONOUS, "found", "refused")
from_zero(PLACED, "hint", "scheduler", "standby", "direct")
from_zero(LIMITED, "requests", "tokens", "concurrent", "day", "month", "queries")
from_zero(SHED, "bodies", "decoding", "requests", "connections")
from_zero(CUT, "headers", "write")


@cache
def child(metric: Any, *labels: str) -> Any:
    """`metric.labels(*labels)`, cached. For labels with few values."""
    return metric.labels(*labels)
