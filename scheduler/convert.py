"""Converts between the scheduler's values and protobuf messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from contracts.convert import (
    may_lend_to_wire,
    move_to_wire,
    session_from_wire,
    session_to_wire,
    shape_from_wire,
    shape_to_wire,
)
from contracts.errors import InvalidRequest
from contracts.kv import KvShape
from contracts.models import ModelState, ModelWire, state_of
from contracts.residency import MOST_MOVES, MOST_SHARES, MayLend, MemoryShare, Never, WeightsMove, Why
from contracts.v1 import common_pb2, scheduler_pb2
from contracts.workflow import Hop
from scheduler.core.advisories import Hint
from scheduler.core.decisions import Decision
from scheduler.core.device import Device, LoadReport, Model, Rates
from scheduler.core.models import ModelLoad


def hint_from_wire(m: common_pb2.Advisory, place_in_list: int, now: float) -> Hint:
    """A hint received at `now`. In an ordered list, hints without a time get arrivals 1 ms apart, only to keep their
    order."""
    arrival_s = now + place_in_list * 1e-3 if m.ordered else None
    if m.HasField("expected_arrival_s"):
        arrival_s = now + m.expected_arrival_s
    expires_s = (now if arrival_s is None else arrival_s) + m.ttl_s
    return Hint(
        session_from_wire(m.session),
        m.advisory_id,
        m.model_id,
        arrival_s,
        expires_s,
        m.priority,
        m.pin_node,
        m.caller,
        trace=m.trace,
    )


def hint_to_wire(hint: Hint, now: float) -> common_pb2.Advisory:
    """The hint, with times relative to `now`."""
    arrival_s = None if hint.arrival_s is None else max(hint.arrival_s - now, 0.0)
    return common_pb2.Advisory(
        session=session_to_wire(hint.session),
        model_id=hint.model,
        expected_arrival_s=arrival_s,
        priority=hint.priority,
        ttl_s=max(hint.expires_s - now - (arrival_s or 0.0), 0.0),
        advisory_id=hint.advisory_id,
        pin_node=hint.pin,
        trace=hint.trace,
    )


def hop_from_wire(m: scheduler_pb2.PlaceRequest) -> Hop | None:
    """The request's place in a workflow, if it has one."""
    return Hop(m.hop.workflow, m.hop.agent, m.hop.run, tuple(m.hop.ended)) if m.HasField("hop") else None


def rates_from_wire(hello: scheduler_pb2.WorkerHello) -> Rates:
    """The rates of a worker's profile; defaults for those not measured."""
    usual = Rates()
    return Rates(
        hello.peer_bytes_per_s or usual.link_bytes_per_s,
        hello.ssd_bytes_per_s or usual.ssd_bytes_per_s,
        hello.blob_bytes_per_s or usual.blob_bytes_per_s,
    )


def load_from_wire(r: scheduler_pb2.WorkerLoad) -> LoadReport:
    """A worker's load report."""
    return LoadReport(
        running=r.running,
        waiting=r.waiting,
        outstanding_tokens=r.outstanding_tokens,
        outstanding_s=r.outstanding_s,
        request_s=r.request_s,
        hbm_pages_total=r.hbm_pages_total,
        hbm_pages_free=r.hbm_pages_free,
        hbm_pages_cached=r.hbm_pages_cached,
        prefill_token_s=r.prefill_token_s,
        by_priority=dict(r.outstanding_by_priority),
        stalled_s=r.stalled_s,
        models={m.model: _model_load(m) for m in r.models},
        device_bytes_free=r.device_bytes_free,
        memory=tuple(MemoryShare(m.use, m.name, m.bytes) for m in r.memory[:MOST_SHARES]),
    )


def moves_from_wire(sent: scheduler_pb2.WeightsMoves, now: float) -> dict[str, tuple[WeightsMove, ...]]:
    """By model: when its weights came and went, as told at `now`; the latest `MOST_MOVES`. Moves without a reason that
    this version knows, and those whose times are no numbers, are left out."""
    found: dict[str, tuple[WeightsMove, ...]] = {}
    for m in sent.moves:
        if m.why in _WHY and math.isfinite(m.ago_s) and math.isfinite(m.seconds):
            at_s, seconds = now - max(m.ago_s, 0.0), max(m.seconds, 0.0)
            move = WeightsMove(at_s, state_of(m.state), Why(m.why), m.other, seconds, m.layers_lent)
            found[m.model] = (*found.get(m.model, ())[1 - MOST_MOVES :], move)
    return found


_WHY = frozenset(Why)
_NEVER = frozenset(Never)


def _may_lend(m: scheduler_pb2.ModelLoad) -> MayLend | None:
    """None: it does not say, or with a reason or times that are none."""
    told = m.may_lend
    if not m.HasField("may_lend") or (told.never and told.never not in _NEVER):
        return None
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (told.transfer_s, told.layer_s)):
        return None
    never = Never(told.never) if told.never else None
    return MayLend(told.idle, told.computing, told.transfer_s, told.layer_s, never)


def memory_to_wire(device: Device) -> list[scheduler_pb2.MemoryShare]:
    """Who holds a device's memory, for gateways."""
    return [scheduler_pb2.MemoryShare(use=m.use, name=m.name, bytes=m.bytes_) for m in device.load.memory]


def model_explanation(name: str, devices: Iterable[Device], now: float) -> scheduler_pb2.ModelExplanation:
    """When a model's weights came to each of these devices that has it, and left it, and why; and what it lends."""
    found = scheduler_pb2.ModelExplanation()
    for device in devices:
        if (load := device.loads.get(name)) is not None and device.worker_here:
            found.devices.add(
                node=device.name,
                state=load.state.value,
                moves=[move_to_wire(name, move, now) for move in device.moves.get(name, ())],
                layers=next(model.shape.layers for model in device.models if model.name == name),
                layers_lent=load.layers_lent,
                may_lend=may_lend_to_wire(load.may_lend),
            )
    return found


def _model_load(m: scheduler_pb2.ModelLoad) -> ModelLoad:
    return ModelLoad(
        state=state_of(m.state),
        by_priority=dict(m.outstanding_by_priority),
        may_lend=_may_lend(m),
        **{name: getattr(m, name) for name in _SAME},
    )


#: Fields of `ModelLoad` with the same name in the proto.
_SAME = (
    *("running", "waiting", "outstanding_tokens", "request_s", "prefill_token_s", "token_rate"),
    *("kv_bytes_used", "kv_bytes_cached", "kv_bytes_limit", "layers_lent", "idle_s", "activation_s"),
)


def loads_to_wire(device: Device) -> list[scheduler_pb2.ModelLoad]:
    """The load of each model of a device, for gateways."""
    return [
        scheduler_pb2.ModelLoad(
            model=name,
            state=load.state.value,  # type: ignore[arg-type]
            outstanding_by_priority=load.by_priority,
            may_lend=may_lend_to_wire(load.may_lend),
            **{field: getattr(load, field) for field in _SAME},
        )
        for name, load in device.loads.items()
    ]


_ENGINES = {ModelWire.FRAMES: "an engine of Upbeat's", ModelWire.HTTP: "a server of its own HTTP"}


def models_from_wire(hello: scheduler_pb2.WorkerHello, known: Mapping[str, ModelWire]) -> tuple[Model, ...]:
    """A worker's models. known: the wire of models that other devices have. Raises InvalidRequest for an unknown wire,
    one that differs from the other devices', or an impossible KV shape."""
    for m in hello.models:
        wire = int(m.wire)
        if wire not in tuple(ModelWire):
            raise InvalidRequest(
                f"{hello.node} registers the model {m.name[:100]!r} with wire = {wire}, which this scheduler "
                "does not know; run the same version of Upbeat on every node",
                param="wire",
                code="unsupported_wire",
            )
        other = known.get(m.name, ModelWire(wire))
        if wire != other:
            raise InvalidRequest(
                f"{hello.node} serves the model {m.name[:100]!r} with {_ENGINES[ModelWire(wire)]}, other nodes with "
                f"{_ENGINES[other]}; give it another name there",
                param="wire",
                code="unsupported_wire",
            )
    return tuple(
        Model(
            m.name,
            _shape(hello.node, m),
            m.max_tokens,
            m.created_s,
            m.longest_token_bytes,
            m.message_token_bytes,
            state_of(m.state),
            m.weight_bytes,
            m.ttft_slo_s,
            m.tpot_slo_s,
            m.engine,
            ModelWire(m.wire),
        )
        for m in hello.models
    )


def _shape(node: str, m: scheduler_pb2.ModelInfo) -> KvShape:
    try:
        return shape_from_wire(m.shape)
    except InvalidRequest as e:
        raise InvalidRequest(f"{node}'s model {m.name[:100]!r}: {e}", param=e.param) from e


def model_to_wire(m: Model, state: ModelState) -> scheduler_pb2.ModelInfo:
    """A model in its present state on a device, for gateways."""
    return scheduler_pb2.ModelInfo(
        name=m.name,
        shape=shape_to_wire(m.shape),
        max_tokens=m.max_tokens,
        created_s=m.created_s,
        longest_token_bytes=m.longest_token_bytes,
        message_token_bytes=m.message_token_bytes,
        state=state.value,  # type: ignore[arg-type]
        weight_bytes=m.weight_bytes,
        ttft_slo_s=m.ttft_slo_s,
        tpot_slo_s=m.tpot_slo_s,
        engine=m.engine,
        wire=m.wire.value,  # type: ignore[arg-type]
    )


def decision_to_wire(d: Decision, now: float) -> scheduler_pb2.Decision:
    """A decision, with its age at `now`."""
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
        until_first_s={str(phase): s for phase, s in d.until_first_s.items()},
        after_s={str(phase): s for phase, s in d.after_s.items()},
        scores=[scheduler_pb2.NodeScore(node=node, terms=scores) for node, scores in d.choice.scores],
    )
