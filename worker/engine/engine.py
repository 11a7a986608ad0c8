"""The engine: delivers events to its core, executes the core's instructions, runs steps and samples tokens.

Events arrive in its inbox; results leave as one frame per step and gateway stream. Decisions are in
`worker.core.engine_core`, the step in `stepping`, loads and saves in `executor`.
"""

from __future__ import annotations

import collections
import itertools
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import InvalidRequest, RequestError, Unavailable, to_wire
from contracts.frames import StepFrame
from contracts.kv import KvShape
from contracts.request import Accepted, Failed, GenerateRequest, Output
from runtime import telemetry, tracing
from runtime.sections import WorkerSection
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.engine_core import EngineCore
from worker.core.events import LoadClosed, SaveCopied, StoreDown, StoreUp
from worker.core.faults import NoFiniteLogits, told
from worker.core.request_figures import RequestFigures
from worker.core.sequence import NO_ADAPTER, Adapter
from worker.core.state import CoreState
from worker.devices.runner import Steps
from worker.engine.contract import Tallies
from worker.engine.executor import Executor
from worker.engine.policies import policy_of
from worker.engine.readiness import Ready, make_ready
from worker.engine.stepping import Stepping
from worker.engine.tallying import tallies_of
from worker.engine.turn_traces import TurnTraces
from worker.engine.wire import from_store
from worker.link.loads import FromStore, StepProgress
from worker.sampling.output import Guide
from worker.text.codec import TextCodec

log = telemetry.logger("worker.engine.engine")
#: Interval of the counts for the scheduler, in seconds.
REPORT_EVERY_S = 0.1
#: Maximum time of admission between two steps, in seconds (at least one sequence is admitted): running sequences wait.
ADMIT_S = 0.005
_FULL = Unavailable("too many requests wait on this node; try again", code="overloaded")


class Stream(Protocol):
    """The stream of frames to a gateway; callable from the engine's thread."""

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
    #: Prepared off the engine's thread; None: the engine prepares it.
    ready: Ready | None = None
    thinking: bool = False
    #: When the worker got it, if it is traced.
    received_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client went away."""

    request_id: str


@dataclass(slots=True)
class _Live:
    ready: Ready
    stream: Stream
    accepted: bool = False


class Inbox:
    """Events for an engine. woken: called after each `put`, on its thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.woken: Callable[[], object] = lambda: None

    def put(self, event: object) -> None:
        """Any thread."""
        self._events.put(event)
        self.woken()

    def get(self) -> object:
        """The next event. Raises queue.Empty."""
        return self._events.get_nowait()

    def empty(self) -> bool:
        """Whether no event is queued."""
        return self._events.empty()


class NativeEngine:
    """`contract.Engine` with our own kernels. Has no thread: `worker.engine.device_loop` gives it turns."""

    def __init__(
        self,
        executor: Executor,
        runner: Steps,
        codec: TextCodec,
        eos_ids: set[int],
        model_name: str,
        settings: WorkerSection,
        ids: Iterator[int] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """ids: for its loads and saves, unique among the store's engines. adapters: the model's, by name."""
        self._adapters = adapters or {}
        self.executor, self.codec, self.eos_ids, self.model_name = executor, codec, eos_ids, model_name
        policy = policy_of(executor.settings, settings)
        self.core = EngineCore(
            CoreState(executor.shape, executor.cache, policy, executor.salt_of, model_name, ids or itertools.count(1))
        )
        self.stepping = Stepping(executor, runner, model_name)
        self.figures = RequestFigures()
        tracer = tracing.tracer()
        #: None while traces are off.
        self.traces = TurnTraces(tracer, model_name, executor.shape.chunk_tokens) if tracer is not None else None
        executor.traces = self.traces
        self.inbox = Inbox()
        self.counts = self.core.counts()
        self._live: dict[str, _Live] = {}
        #: See `Engine.finished`.
        self.finished: collections.deque[str] = collections.deque(maxlen=100_000)
        #: Accepted requests that failed, by error code.
        self.failed: collections.Counter[str] = collections.Counter()
        self._reported_s = 0.0
        #: When it last had a request, or began.
        self._used_s = executor.clock.now()
        self._frames: dict[Stream, StepFrame] = defaultdict(StepFrame)
        #: Outputs of the step that has just run, by request id.
        self._outputs: dict[str, Output] = {}
        self._quiet = True
        #: Called during a turn when the set of requests has changed.
        self.on_requests: Callable[[], None] = lambda: None
        #: Called during a turn when a trial of this request id begins (`worker.core.trials`); empty: it is over.
        self.on_trial: Callable[[str], None] = lambda request_id: None

    # ---- turns -------------------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """See `Engine.idle`."""
        return self._quiet and self.inbox.empty()

    @property
    def stalled_s(self) -> float:
        """See `Engine.stalled_s`. Any thread."""
        return self.stepping.beats.stalled_s(self.executor.clock.now())

    @property
    def idle_s(self) -> float:
        """Seconds since it had a request; before the first one, since it began. Any thread."""
        return 0.0 if self._live else max(self.executor.clock.now() - self._used_s, 0.0)

    @property
    def shape(self) -> KvShape:
        """See `Engine.shape`."""
        return self.executor.shape

    def tallies(self) -> Tallies:
        """See `Engine.tallies`."""
        return tallies_of(self.core, self.executor.loader, self.failed)

    def due_in_s(self) -> float:
        """Seconds until a turn has something to do; infinite: not without an event."""
        if self.core.going_on or not self.inbox.empty() or self.core.may_fit:
            return 0.0
        return self.core.due_in_s(self.executor.clock.now())

    def rest(self) -> None:
        """It gets no turn for a while: no progress is expected."""
        self.stepping.beats.rests()

    def let_go(self) -> None:
        """Unmap what another model of the device has taken over. On the device's thread, between turns."""
        self.core.state.unmap()
        self._execute()

    def turn(self) -> None:
        """Take events, admit, and run one step if any sequence can compute."""
        self._take_events()
        clock = self.executor.clock
        began_s = clock.now()
        self.stepping.beats.seen(began_s)
        if self._live:
            self._used_s = began_s

        def enough() -> bool:
            self._execute()
            return clock.now() - began_s > ADMIT_S

        step = self.core.turn(began_s, enough)
        self._execute()
        if step is not None:
            self._step(step)
        self._flush_frames()
        self._report()
        self._quiet = self.core.quiet

    # ---- events ------------------------------------------------------------------------------------------------
    def _take_events(self) -> None:
        while True:
            try:
                event = self.inbox.get()
            except queue.Empty:
                break
            self._quiet = False
            self._on(event)
        self._take_arrived()

    def _on(self, event: object) -> None:
        match event:
            case Submit():
                self._submit(event)
            case Cancel(request_id):
                self._cancel(request_id)
            case FromStore(message):
                if (decoded := from_store(message, self.executor.shape.fingerprint)) is not None:
                    if self.traces is not None and isinstance(decoded, ev.Found):
                        self.traces.found(decoded)
                    self._deliver(decoded)
            case LoadClosed(load_id):
                self._take_arrived()
                self._deliver(event)
                self.executor.table.open.pop(load_id, None)
            case StoreUp() | StoreDown() | SaveCopied():
                if self.traces is not None and isinstance(event, SaveCopied):
                    self.traces.saved(event, self.executor.clock.now())
                self._take_arrived()
                self._deliver(event)
            case _:
                pass  # `Wake` only wakes the thread

    def _take_arrived(self) -> None:
        """Deliver the pieces that the loader has copied."""
        arrived = self.executor.table.arrived
        while arrived:
            self._deliver(arrived.popleft())

    def _deliver(self, event: ev.Event) -> None:
        self.core.handle(event, self.executor.clock.now())
        self._execute()

    def _execute(self) -> None:
        for instruction in self.core.take():
            match instruction:
                case do.Refuse(request_id, full):
                    self._fail(request_id, _FULL if full else NoFiniteLogits())
                case do.Trial(request_id):
                    self.on_trial(request_id)
                case do.Timed(request_id, times):
                    self._outputs[request_id].times = {str(phase): seconds for phase, seconds in times.items()}
                case _:
                    self.executor.execute(instruction)

    def _submit(self, event: Submit) -> None:
        request = event.request
        try:
            if request.request_id in self._live:
                raise InvalidRequest("a request with this id runs already", param="request_id")
            ready = event.ready or self.make_ready(request, event.prompt, event.max_tokens, event.guide)
        except BaseException as error:
            self._frames[event.stream].failed.append(
                Failed(request.request_id, to_wire(told("its preparation", error)))
            )
            if request.request_id not in self._live:
                self.finished.append(request.request_id)
            return
        self._live[request.request_id] = _Live(ready, event.stream)
        self._deliver(ev.Submitted(ready.sequence))
        if (live := self._live.get(request.request_id)) is not None:
            live.accepted = True
            if self.traces is not None and request.trace:
                self.traces.accepted(ready.sequence, event.received_s, self.executor.clock.now())
            log.debug("accepted", request=request.request_id, prompt_tokens=len(event.prompt))
            self.figures.accepted(request.request_id, ready.sequence, self.executor.clock.now())
            self._frames[event.stream].accepted.append(Accepted(request.request_id, len(event.prompt), event.thinking))

    def make_ready(self, request: GenerateRequest, prompt: list[int], max_tokens: int, guide: Guide | None) -> Ready:
        """See `worker.engine.readiness`. Any thread. Raises Unavailable for an unknown adapter, as another node may
        serve it."""
        adapter = self._adapters.get(request.adapter) if request.adapter else NO_ADAPTER
        if adapter is None:
            raise Unavailable(f"this node does not serve the adapter {request.adapter[:100]!r} of {self.model_name}")
        ends = frozenset(self.eos_ids)
        return make_ready(request, prompt, max_tokens, guide, self.executor, self.codec, ends, adapter)

    def _cancel(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._frames[live.stream].outputs.append(
                Output(request_id, "", [], live.ready.sequence.cached, None, "cancelled")
            )
            self.finished.append(request_id)
            self.figures.gone(request_id, "abort")
            self._deliver(ev.Cancelled(request_id))
            self._gone(request_id, "cancelled")

    # ---- steps -------------------------------------------------------------------------------------------------
    def _step(self, step: do.Step) -> None:
        outcome = self.stepping.run(step, self.executor.progress if step.ahead else None)
        self.executor.progress = StepProgress()
        tokens: dict[str, int] = {}
        ended, mute, doubtful = set[str](), set[str](), set[str]()
        for request_id, raised in outcome.failed.items():
            self._fail(request_id, told("computing a step", raised))
        for request_id, row in outcome.rows.items():
            if request_id in outcome.void:
                continue
            try:
                output = self._live[request_id].ready.next_output(row)
            except NoFiniteLogits:
                doubtful.add(request_id)
            except BaseException as error:
                if not isinstance(error, RequestError):
                    log.exception("a request failed", request=request_id)
                self._fail(request_id, told("choosing its next token", error))
                mute.add(request_id)
            else:
                tokens[request_id] = output.tokens[0]
                self._frames[self._live[request_id].stream].outputs.append(output)
                self._outputs[request_id] = output
                if output.finish_reason:
                    ended.add(request_id)
                    del self._live[request_id]
                    self.finished.append(request_id)
        self._take_arrived()
        done = ev.Stepped(
            step.batch,
            outcome.seconds,
            tokens,
            ended=ended,
            failed=outcome.failed.keys(),
            void=outcome.void,
            mute=mute,
            doubtful=doubtful,
            timed=outcome.attempts == 1,
            stalled_s=outcome.stalled_s,
        )
        self._deliver(done)
        self._count(step)
        self._outputs.clear()

    def _count(self, step: do.Step) -> None:
        """The step has ended, and its outputs have their times."""
        self.figures.step_tokens.add(sum(count for _, count in step.batch))
        now = self.executor.clock.now()
        for output in self._outputs.values():
            self.figures.spoke(output, now)
            if self.traces is not None and self.traces.live:
                self.traces.spoke(output, now)
            if output.finish_reason is not None:
                log.debug("ended", request=output.request_id, reason=output.finish_reason)

    def _fail(self, request_id: str, error: RequestError) -> None:
        live = self._live.pop(request_id)
        self.failed[error.code or ""] += live.accepted
        self.figures.gone(request_id, "error")
        self._frames[live.stream].failed.append(Failed(request_id, to_wire(error)))
        self.finished.append(request_id)
        self._gone(request_id, error.code or "failed")

    def _gone(self, request_id: str, why: str) -> None:
        """It ended without its last token."""
        if self.traces is not None:
            self.traces.gone(request_id, why, self.executor.clock.now())
        log.debug("ended", request=request_id, reason=why)

    # ---- reports -----------------------------------------------------------------------------------------------
    def _report(self) -> None:
        now = self.executor.clock.now()
        if now - self._reported_s < REPORT_EVERY_S and self._live:
            return
        self._reported_s = now
        before, self.counts = self.counts.in_flight, self.core.counts()
        if self.counts.in_flight != before:
            self.on_requests()

    def _flush_frames(self) -> None:
        for stream, frame in self._frames.items():
            stream.put(frame)
        self._frames.clear()
