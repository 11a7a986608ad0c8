"""The engine: one thread whose `step` is schedule -> run -> postprocess.

Everything else reaches it as events in its inbox, and its results leave as one frame a step and gateway stream. Who runs is
decided in `scheduling`, the step itself is in `stepping`.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import InvalidRequest, RequestError, Unavailable, to_wire
from contracts.frames import StepFrame
from contracts.kv import Manifest
from contracts.request import Accepted, Failed, GenerateRequest, Output
from contracts.v1 import kvstore_pb2
from runtime import telemetry
from runtime.config import WorkerSection
from runtime.niceness import step_back
from worker.core.faults import NoFiniteLogits, told
from worker.core.load_plan import Source
from worker.core.sequence import Event, Sequence, State
from worker.core.token_counts import Row
from worker.devices.runner import Steps
from worker.engine.admission import Admission
from worker.engine.device import Device
from worker.engine.inquiries import answer_store
from worker.engine.prefetching import Prefetching
from worker.engine.readiness import Ready, make_ready
from worker.engine.saving import Saving
from worker.engine.scheduling import Scheduling
from worker.engine.stepping import Stepping
from worker.link.loads import FromStore, LoadClosed, PiecesCame, SaveCopied, StoreDown, StoreUp
from worker.sampling.output import Guide
from worker.text.codec import TextCodec

log = telemetry.logger("worker.engine.engine")
IDLE_S = 0.5
#: How often the counts for the scheduler are taken, in seconds.
REPORT_EVERY_S = 0.1


class Stream(Protocol):
    """Where a gateway's frames go; callable from the engine's thread."""

    def put(self, frame: StepFrame) -> None:
        """Send the frame."""
        ...


@dataclass(frozen=True, slots=True)
class Submit:
    """A valid, tokenised request. guide: its grammar, after `resume_tokens`. thinking: see `Accepted`."""

    request: GenerateRequest
    prompt: list[int]
    max_tokens: int
    stream: Stream
    guide: Guide | None = None
    #: What was made of it off the engine's thread; None: the engine makes it.
    ready: Ready | None = None
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client went away."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What the scheduler is told. outstanding_s: by priority."""

    running: int
    waiting: int
    outstanding_tokens: int
    outstanding_s: dict[int, float]
    request_s: float
    prefill_token_s: float
    pages_total: int
    pages_free: int
    in_flight: tuple[str, ...]


@dataclass(slots=True)
class _Live:
    ready: Ready
    stream: Stream

    @property
    def sequence(self) -> Sequence:
        return self.ready.sequence


class Engine:
    """Runs one model on one device."""

    def __init__(
        self,
        device: Device,
        runner: Steps,
        codec: TextCodec,
        eos_ids: set[int],
        model_name: str,
        settings: WorkerSection,
        niceness: int = 0,
    ) -> None:
        """niceness: of its thread (`runtime.niceness`)."""
        self.device, self.codec, self.eos_ids, self.model_name = device, codec, eos_ids, model_name
        self.saving, self.prefetching = Saving(device), Prefetching(device)
        self.admission = Admission(device, self.prefetching)
        self.scheduling = Scheduling(self.admission, self.saving, settings)
        self.stepping = Stepping(device, runner, self.admission.pace)
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.counts = Counts(0, 0, 0, {}, 0.0, 0.0, device.cache.pool.total, device.cache.pool.total, ())
        self._live: dict[str, _Live] = {}
        #: Ended requests the scheduler has not been told of; the reporter takes them.
        self.finished: collections.deque[str] = collections.deque(maxlen=100_000)
        #: Requests that failed after they were accepted, by the code of their error.
        self.failed: collections.Counter[str] = collections.Counter()
        self._reported_s = 0.0
        self._arrivals = 0
        self._frames: dict[Stream, StepFrame] = defaultdict(StepFrame)
        self._stopping = False
        self._quiet = True
        self._going_on = False
        #: Called from the engine's thread when the set of requests has changed.
        self.on_requests: Callable[[], None] = lambda: None
        #: The same, when steps begin to hold one request only, of this id; empty: they no longer do.
        self.on_trial: Callable[[str], None] = lambda request_id: None
        self.on_crash: Callable[[BaseException], None] = lambda error: None
        self._niceness = niceness
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # ---- life --------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs."""
        self._stopping = True
        self.inbox.put(None)
        self._thread.join(timeout=5)

    @property
    def idle(self) -> bool:
        """Nothing runs, and everything finished is below."""
        return self._quiet and self.inbox.empty()

    @property
    def stalled_s(self) -> float:
        """How long it has done nothing beyond the time its step should have taken; any thread."""
        return self.stepping.beats.stalled_s(self.device.clock.now())

    @property
    def going_on(self) -> bool:
        """The next turn has something to do without an event."""
        return self._going_on or self.prefetching.due

    def _main(self) -> None:
        step_back(self._niceness)
        try:
            while not self._stopping:
                self.turn(block=not self.going_on)
        except BaseException as error:
            log.exception("engine died")
            self.on_crash(error)

    def turn(self, block: bool) -> None:
        """Take what came, admit, and run one step if somebody can. Without a thread, whoever owns the engine calls it."""
        self._take_events(block)
        self.stepping.beats.seen(self.device.clock.now())
        self.saving.expire()
        self.scheduling.admit(self._sequences())
        self.prefetching.pump()
        tried = self.scheduling.trials.told
        batch = self.scheduling.batch(self._sequences())
        if self.scheduling.trials.told != tried:
            self.on_trial(self.scheduling.trials.told)
        if batch:
            self._step(batch)
        # When nothing ran and nobody was sent back, only an event changes anything.
        self._going_on, self.admission.restarted = bool(batch) or self.admission.restarted, False
        self._flush_frames()
        self._report()
        self._quiet = not self._live and not self.saving.busy and not self.prefetching.due

    # ---- events ------------------------------------------------------------------------------------------------
    def _sequences(self) -> list[Sequence]:
        return [live.sequence for live in self._live.values()]

    def _take_events(self, block: bool) -> None:
        if block:
            self.stepping.beats.rests()
        rest_s = self.scheduling.trials.rest_s(self.device.clock.now())
        idle_s = IDLE_S if rest_s is None else min(rest_s, IDLE_S)
        try:
            event = self.inbox.get(timeout=min(max(self.prefetching.due_in_s, 0.0), idle_s)) if block else self.inbox.get_nowait()
            self._quiet = False
            while True:
                self._on(event)
                event = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _on(self, event: object) -> None:
        match event:
            case Submit():
                self._submit(event)
            case Cancel(request_id):
                if (live := self._live.get(request_id)) is not None:
                    self._frames[live.stream].outputs.append(Output(request_id, "", [], live.sequence.cached, None, "cancelled"))
                    self._finish(live)
            case FromStore(message):
                self.device.heard()
                self._from_store(message)
            case LoadClosed(load):
                self.device.close_load(load)
                sequence = load.sequence
                if sequence is not None and sequence.load_id == load.load_id:
                    sequence.load_id = 0
                    if any(not b.complete and not b.moving for b in sequence.blocks[: sequence.found or 0]):
                        self.admission.restart(sequence, Event.LOST)
            case SaveCopied():
                self.saving.copied(event)
                self.prefetching.try_again()
            case StoreUp():
                self.device.attached = True
                self.device.heard()
            case StoreDown():
                self._store_down()
            case PiecesCame() | None:
                pass  # it woke us

    def _submit(self, event: Submit) -> None:
        request = event.request
        try:
            if request.request_id in self._live:
                raise InvalidRequest("a request with this id runs already", param="request_id")
            ready = event.ready or self.make_ready(request, event.prompt, event.max_tokens, event.guide)
        except BaseException as error:
            self._refuse(event, told("its preparation", error))
            return
        way = self.scheduling.make_way(len(self._live), self._sequences, request)
        if way is not True:
            full = Unavailable("too many requests wait on this node; try again", code="overloaded")
            if way is False:
                self._refuse(event, full)
                return
            self._fail(self._live[way.request.request_id], full)
        ready.sequence.arrival, ready.sequence.arrival_s = self._arrivals, self.device.clock.now()
        self._arrivals += 1
        self._live[request.request_id] = _Live(ready, event.stream)
        self.scheduling.joined(ready.sequence)
        self._frames[event.stream].accepted.append(Accepted(request.request_id, len(event.prompt), event.thinking))
        self.prefetching.came_true(request.session)

    def _refuse(self, event: Submit, error: RequestError) -> None:
        self._frames[event.stream].failed.append(Failed(event.request.request_id, to_wire(error)))
        if event.request.request_id not in self._live:
            self.finished.append(event.request.request_id)

    def make_ready(self, request: GenerateRequest, prompt: list[int], max_tokens: int, guide: Guide | None) -> Ready:
        """See `worker.engine.readiness`. Any thread."""
        return make_ready(request, prompt, max_tokens, guide, self.device, self.codec, frozenset(self.eos_ids))

    def _from_store(self, message: kvstore_pb2.StoreToWorker) -> None:
        match message.WhichOneof("kind"):
            case "found":
                load = self.device.table.open.get(message.found.load_id)
                if load is not None and load.sequence is not None:
                    sources = [Source(min(x, Source.BLOB)) for x in message.found.sources]
                    self.admission.found(load.sequence, load.load_id, message.found.chunks, sources)
            case "offer":
                self.prefetching.offered(message.offer)
            case _:
                answer_store(self.device, self.prefetching, self._sequences(), message)

    def _store_down(self) -> None:
        self.device.attached = False
        self.prefetching.store_down()
        self.saving.store_down()
        for load in list(self.device.table.open.values()):
            load.cancelled = True
            self.device.loader.cancel(load)
            if load.sequence is not None and load.sequence.found is None and load.sequence.load_id == load.load_id:
                self.admission.found(load.sequence, load.load_id, 0, [])

    # ---- postprocess -------------------------------------------------------------------------------------------
    def _step(self, batch: list[tuple[Sequence, int]]) -> None:
        outcome = self.stepping.run(batch, self.saving.ahead_of(batch))
        for s, count in batch:
            request_id = s.request.request_id
            live = self._live[request_id]
            if (raised := outcome.failed.get(request_id)) is not None:
                self._fail(live, told("computing a step", raised))
            elif request_id in outcome.void:
                self.admission.restart(s, Event.LOST)
            else:
                self.scheduling.computed(s, count)
                if (row := outcome.rows.get(request_id)) is not None:
                    self._speak(live, row)

    def _speak(self, live: _Live, row: Row) -> None:
        """Choose and write the next token. What raises here is of this request alone, and fails it and nobody else."""
        try:
            output = live.ready.next_output(row)
        except NoFiniteLogits as error:
            if not self.admission.distrust(live.sequence):
                self._fail(live, error)
        except BaseException as error:
            if not isinstance(error, RequestError):
                log.exception("a request failed", request=live.sequence.request.request_id)
            self._fail(live, told("choosing its next token", error))
        else:
            self._frames[live.stream].outputs.append(output)
            if output.finish_reason:
                self._finish(live)

    def _fail(self, live: _Live, error: RequestError) -> None:
        self.failed[error.code or ""] += 1
        self._frames[live.stream].failed.append(Failed(live.sequence.request.request_id, to_wire(error)))
        self._finish(live, failed=True)

    def _finish(self, live: _Live, failed: bool = False) -> None:
        s = live.sequence
        del self._live[s.request.request_id]
        self.scheduling.left(s)
        self.finished.append(s.request.request_id)
        if not failed:
            self.admission.pace.ended(s.prompt_tokens - s.cached, s.generated)
        # One that was cut off in its prompt would only shorten what its session is known to have.
        if self.device.settings.cache and not failed and s.state is State.RUNNING and s.computed >= s.prompt_tokens and not s.erased:
            full = s.computed // self.device.shape.chunk_tokens
            if full and not s.request.choice:  # of several answers, a conversation goes on with the first
                fingerprint, now = self.device.shape.fingerprint, self.device.clock.wall()
                manifest = Manifest(s.request.session, self.model_name, fingerprint, s.keys[:full], 0, now)
                index = self.device.cache.index
                self.saving.turn_ended(manifest, [index.get(key, block) for key, block in zip(s.keys, s.blocks[:full], strict=False)])
        s.on(Event.DONE)
        self.admission.vacate(s)
        if s.erased:
            self.device.cache.forget({s.request.session})
        self.prefetching.turn_ended(s.request.session)

    def _report(self) -> None:
        now = self.device.clock.now()
        if now - self._reported_s < REPORT_EVERY_S and self._live:
            return
        self._reported_s = now
        sequences = self._sequences()
        running = sum(s.state is State.RUNNING for s in sequences)
        before = self.counts.in_flight
        self.counts = Counts(
            running=running,
            waiting=len(sequences) - running,
            outstanding_tokens=sum(s.pending + max(s.max_tokens - s.generated, 0) for s in sequences),
            outstanding_s=self.admission.pace.outstanding_s(sequences, self.device.shape.chunk_tokens),
            request_s=self.admission.pace.request_s,
            prefill_token_s=self.admission.pace.prefill_token_s,
            pages_total=self.device.cache.pool.total,
            pages_free=self.device.cache.available(),
            in_flight=tuple(self._live),
        )
        if self.counts.in_flight != before:
            self.on_requests()

    def _flush_frames(self) -> None:
        for stream, frame in self._frames.items():
            stream.put(frame)
        self._frames.clear()
