"""Many models on devices that they share: the scheduler's production core places requests by model, and the devices
(`shared_device`) report to it. Requests in, their times out."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from contracts.counts import Counts
from contracts.ids import DEFAULT_TENANT, SessionKey
from contracts.models import ModelState
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import REPORT_EVERY_S, TICK_EVERY_S
from loadtest.simulate.mechanisms import IN_MEMORY, Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.shared_device import SharedDevice, Sharing
from loadtest.simulate.shared_kind import GRANULE_BYTES, SharedKind
from scheduler.core.commands import Spare, Wake
from scheduler.core.control import Ask, Control, Settings
from scheduler.core.fleet import LoadReport, Model, Rates
from scheduler.core.models import ModelLoad
from worker.core.resident import Expected

#: Requests between two validations.
_VALIDATE_EVERY = 1_000


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of a trace. time_s: from its start. output_tokens: at least 1."""

    time_s: float
    model: str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and its times. first_s, end_s: from the trace's start; -1: no first token, or no end. device: its last
    one."""

    asked: ModelRequest
    first_s: float
    end_s: float
    device: str

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite without one."""
        return self.first_s - self.asked.time_s if self.first_s >= 0 else float("inf")

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first; infinite without an end, 0 for answers of one token."""
        if self.end_s < 0:
            return float("inf")
        return (self.end_s - self.first_s) / max(self.asked.output_tokens - 1, 1)


@dataclass(slots=True)
class SharedFleet:
    """Devices, and the scheduler's core. where: models of each device, by number; None: all models on all."""

    events: Events
    devices: dict[str, SharedDevice]
    control: Control
    answered: int = 0

    @classmethod
    def of(
        cls,
        events: Events,
        kind: SharedKind,
        count: int,
        sharing: Sharing,
        where: Sequence[Sequence[str]] | None = None,
        *,
        has: Mechanisms = IN_MEMORY,
        remap_cap: float = 0.0,
    ) -> SharedFleet:
        """`count` devices. has, remap_cap: see `SharedDevice`. Raises ValueError where the models do not fit."""
        names = tuple(model.name for model in kind.models)
        control = Control(Settings(models=names))
        fleet = cls(events, {}, control)
        for number in range(count):
            name = f"device-{number}"
            own = kind if where is None else kind.of(where[number])
            if own.models:
                make = functools.partial(SharedDevice, name, own, sharing, events, has=has, remap_cap=remap_cap)
                fleet._add(make, REPORT_EVERY_S * number / count)
        fleet._tick()
        return fleet

    def _add(self, make: Callable[..., SharedDevice], first_s: float) -> None:
        device = make(ended=self._ended)
        name, kind = device.name, device.kind
        self.devices[name] = device
        models = tuple(
            Model(
                model.name,
                model.kind.shape,
                model.kind.max_tokens,
                0,
                state=_state(device, model.name),
                weight_bytes=int(model.weight_bytes),
            )
            for model in kind.models
        )
        first = kind.models[0].kind
        rates = Rates(first.link_bytes_per_s, first.ssd_bytes_per_s, first.blob_bytes_per_s)
        device_bytes = kind.granules * GRANULE_BYTES
        self.control.fleet.worker_joined(name, f"{name}:1", models, self.events.now, rates, device_bytes)
        self.control.fleet.store_joined(name, f"{name}:2")
        reporter = _Reporter(device, self.control, self.events)
        reporter.report()
        self.events.at(self.events.now + first_s, reporter.run)

    def ask(self, name: str, asked: ModelRequest) -> Request:
        """Place a request, and submit it."""
        request = Request(
            name,
            SessionKey(DEFAULT_TENANT, name),
            0,
            asked.input_tokens,
            0,
            asked.output_tokens,
            self.events.now,
            lambda request: None,
        )
        placement = self.control.place(Ask(name, request.session, asked.model), self.events.now)
        request.node = placement.node
        device = self.devices[request.node]
        delay_s = device.models[asked.model].kind.request_s
        self.events.at(self.events.now + delay_s, lambda: device.submit(asked.model, request))
        return request

    def _ended(self, request: Request) -> None:
        self.answered += 1

    def _tick(self) -> None:
        for command in self.control.tick(self.events.now):
            if isinstance(command, Wake):
                self.devices[command.node].expect(
                    command.model, Expected(command.arrival_s, command.expires_s, command.moves)
                )
            elif isinstance(command, Spare):
                self.devices[command.node].spare(command.model, command.expires_s)
        self.events.at(self.events.now + TICK_EVERY_S, self._tick)

    def validate(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self.control.validate()
        for device in self.devices.values():
            device.validate()


class _Reporter:
    """Reports as `runtime.reporter`. A model's counts are those after its engine's last turn."""

    def __init__(self, device: SharedDevice, control: Control, events: Events) -> None:
        self._device, self._control, self._events = device, control, events
        self._counts: dict[str, Counts] = {}
        self._number = 0

    def run(self) -> None:
        """Report now and every `REPORT_EVERY_S`."""
        self.report()
        self._events.at(self._events.now + REPORT_EVERY_S, self.run)

    def report(self) -> None:
        """Report now."""
        device, now = self._device, self._events.now
        for name, hosted in device.models.items():
            if name not in self._counts or hosted.outstanding or self._counts[name].in_flight:
                hosted.engine.catch_up()
                self._counts[name] = hosted.core.counts()
        each = self._counts.values()
        work: Counter[int] = Counter()
        for counts in each:
            work.update(counts.outstanding_s)
        load = LoadReport(
            running=sum(counts.running for counts in each),
            waiting=sum(counts.waiting for counts in each),
            outstanding_tokens=sum(counts.outstanding_tokens for counts in each),
            outstanding_s=sum(work.values()),
            request_s=max(counts.request_s for counts in each),
            prefill_token_s=max(counts.prefill_token_s for counts in each),
            by_priority=dict(work),
            models={name: self._of(name, counts) for name, counts in self._counts.items()},
        )
        here = [request for hosted in device.models.values() for request in hosted.outstanding]
        self._number += 1
        self._control.fleet.loaded(device.name, load, here, device.ended_ids, now, self._number)
        device.ended_ids.clear()

    def _of(self, name: str, counts: Counts) -> ModelLoad:
        residency, page_bytes = self._device.residency, self._device.models[name].shape.piece_bytes
        return ModelLoad(
            state=_state(self._device, name),
            running=counts.running,
            waiting=counts.waiting,
            outstanding_tokens=counts.outstanding_tokens,
            by_priority=counts.outstanding_s,
            request_s=counts.request_s,
            prefill_token_s=counts.prefill_token_s,
            kv_bytes_used=(counts.pages_total - counts.pages_free) * page_bytes,
            kv_bytes_cached=counts.pages_cached * page_bytes,
            kv_bytes_limit=counts.pages_total * page_bytes,
            token_rate=counts.token_rate,
            idle_s=self._idle_s(name),
            activation_s=residency.activation_s(name) if residency is not None else 0.0,
        )

    def _idle_s(self, name: str) -> float:
        """As `NativeEngine.idle_s`."""
        residency = self._device.residency
        if residency is None or self._device.models[name].outstanding:
            return 0.0
        return self._events.now - max(residency.models[name].used_s, 0.0)


def _state(device: SharedDevice, name: str) -> ModelState:
    return ModelState.ACTIVE if device.residency is None else device.residency.models[name].state


@dataclass(frozen=True, slots=True)
class ManyRun:
    """What to simulate. where: see `SharedFleet`. drain_s: after the last request, for running ones to end. lead_s:
    before the trace. By default models that were loaded at the start and never used are idle long enough to be
    evicted. has, remap_cap: see `SharedDevice`. prepare: called with the fleet before it runs."""

    kind: SharedKind
    devices: int
    sharing: Sharing
    where: Sequence[Sequence[str]] | None = None
    drain_s: float = 300.0
    lead_s: float = 60.0
    has: Mechanisms = IN_MEMORY
    remap_cap: float = 0.0
    prepare: Callable[[SharedFleet], object] = lambda fleet: None


@dataclass(frozen=True, slots=True)
class ManyOutcome:
    """Answers in the order of the trace, and the fleet for a closer look."""

    answers: list[Answered]
    fleet: SharedFleet

    @property
    def totals(self) -> Mapping[str, float]:
        """What the devices did, in all."""
        devices = self.fleet.devices.values()
        residents = [each for d in devices if d.residency is not None for each in d.residency.models.values()]
        cores = [hosted.core for d in devices for hosted in d.models.values()]
        return {
            "activations": sum(each.activations for each in residents),
            "evictions": sum(each.evictions for each in residents),
            "preemptions": sum(core.scheduling.preemptions for core in cores),
            "lendings": sum(each.lending.lendings for each in residents if each.lending is not None),
            "returns": sum(each.lending.returns for each in residents if each.lending is not None),
            "busy_s": sum(hosted.engine.busy_s for d in devices for hosted in d.models.values()),
        }


def simulate_many(
    run: ManyRun, requests: Sequence[ModelRequest], watch: Callable[[SharedFleet], None] | None = None
) -> ManyOutcome:
    """Run a trace to its end. Deterministic. watch: called after every event. Raises ValueError for a model that no
    device has, or that does not fit."""
    events = Events()
    fleet = SharedFleet.of(events, run.kind, run.devices, run.sharing, run.where, has=run.has, remap_cap=run.remap_cap)
    run.prepare(fleet)
    trace = sorted(requests, key=lambda asked: asked.time_s)
    sent: list[Request] = []

    def send() -> None:
        number = len(sent)
        sent.append(fleet.ask(f"r{number}", trace[number]))
        if number % _VALIDATE_EVERY == _VALIDATE_EVERY - 1:
            fleet.validate()
        if len(sent) < len(trace):
            events.at(run.lead_s + trace[len(sent)].time_s, send)

    def over() -> bool:
        if watch is not None:
            watch(fleet)
        return fleet.answered == len(trace)

    if trace:
        events.at(run.lead_s + trace[0].time_s, send)
        events.run(over, limit_s=run.lead_s + trace[-1].time_s + run.drain_s)
    fleet.validate()
    return ManyOutcome([_answered(asked, made, run.lead_s) for asked, made in zip(trace, sent, strict=True)], fleet)


def _answered(asked: ModelRequest, made: Request, lead_s: float) -> Answered:
    first_s, end_s = (at_s - lead_s if at_s >= 0 else -1.0 for at_s in (made.first_s, made.end_s))
    return Answered(asked, first_s, end_s, made.node)
