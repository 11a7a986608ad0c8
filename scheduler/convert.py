"""The scheduler's own values from their messages and back."""

from __future__ import annotations

from contracts.convert import session_from_wire, session_to_wire, shape_from_wire, shape_to_wire
from contracts.v1 import common_pb2, scheduler_pb2
from contracts.workflow import Hop
from scheduler.core.advisories import Hint
from scheduler.core.decisions import Decision
from scheduler.core.fleet import Load, Model, Rates


def hint_from_wire(m: common_pb2.Advisory, place_in_list: int, now: float) -> Hint:
    """A hint that came at `now`. Ordered ones that say no time are expected in the order of the list, and nothing else is meant."""
    arrival_s = now + place_in_list * 1e-3 if m.ordered else None
    if m.HasField("expected_arrival_s"):
        arrival_s = now + m.expected_arrival_s
    expires_s = (now if arrival_s is None else arrival_s) + m.ttl_s
    return Hint(session_from_wire(m.session), m.advisory_id, m.model_id, arrival_s, expires_s, m.priority, m.pin_node, m.caller)


def hint_to_wire(hint: Hint, now: float) -> common_pb2.Advisory:
    """The hint as of `now`."""
    arrival_s = None if hint.arrival_s is None else max(hint.arrival_s - now, 0.0)
    return common_pb2.Advisory(
        session=session_to_wire(hint.session),
        model_id=hint.model,
        expected_arrival_s=arrival_s,
        priority=hint.priority,
        ttl_s=max(hint.expires_s - now - (arrival_s or 0.0), 0.0),
        advisory_id=hint.advisory_id,
        pin_node=hint.pin,
    )


def hop_from_wire(m: scheduler_pb2.PlaceRequest) -> Hop | None:
    """What a request is in a workflow, if it is of one."""
    return Hop(m.hop.workflow, m.hop.agent, m.hop.run, tuple(m.hop.ended)) if m.HasField("hop") else None


def rates_from_wire(hello: scheduler_pb2.WorkerHello) -> Rates:
    """What a worker's profile has measured, and what is usual for the rest."""
    usual = Rates()
    return Rates(
        hello.peer_bytes_per_s or usual.link_bytes_per_s,
        hello.ssd_bytes_per_s or usual.ssd_bytes_per_s,
        hello.blob_bytes_per_s or usual.blob_bytes_per_s,
    )


def load_from_wire(r: scheduler_pb2.WorkerLoad) -> Load:
    """A worker's report."""
    return Load(
        running=r.running,
        waiting=r.waiting,
        outstanding_tokens=r.outstanding_tokens,
        outstanding_s=r.outstanding_s,
        request_s=r.request_s,
        hbm_pages_total=r.hbm_pages_total,
        hbm_pages_free=r.hbm_pages_free,
        prefill_token_s=r.prefill_token_s,
        by_priority=dict(r.outstanding_by_priority),
        stalled_s=r.stalled_s,
    )


def models_from_wire(hello: scheduler_pb2.WorkerHello) -> tuple[Model, ...]:
    """What a worker serves."""
    return tuple(
        Model(m.name, shape_from_wire(m.shape), m.max_tokens, m.created_s, m.longest_token_bytes, m.message_token_bytes)
        for m in hello.models
    )


def model_to_wire(m: Model) -> scheduler_pb2.ModelInfo:
    """A model as gateways are told of it."""
    return scheduler_pb2.ModelInfo(
        name=m.name,
        shape=shape_to_wire(m.shape),
        max_tokens=m.max_tokens,
        created_s=m.created_s,
        longest_token_bytes=m.longest_token_bytes,
        message_token_bytes=m.message_token_bytes,
    )


def decision_to_wire(d: Decision, now: float) -> scheduler_pb2.Decision:
    """A decision as of `now`."""
    return scheduler_pb2.Decision(
        what=d.what,
        ago_s=max(now - d.at_s, 0.0),
        node=d.node,
        request_id=d.request_id,
        hinted=d.hinted,
        prefetched_node=d.prefetched,
        prefetched_s=d.prefetched_s if d.prefetched else 0.0,
        moves=d.moves,
        pin_node=d.pin,
        taken=d.taken,
        avoided=d.avoided,
        source_nodes=d.sources,
        worth=d.worth,
        scores=[scheduler_pb2.NodeScore(node=node, terms=scores) for node, scores in d.choice.scores],
    )
