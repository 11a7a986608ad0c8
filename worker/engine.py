"""The engine: one thread whose `step` is schedule -> run -> postprocess.

Everything else reaches it as events in its inbox, and its results leave as one frame a step and gateway stream. While a
step runs, copies of later layers go on under earlier layers' compute (`_wait_for_layer`); a piece that does not come voids
the sequence's step, never the batch.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from contracts.frames import StepFrame
from contracts.kv import Manifest, chunk_keys
from contracts.request import Accepted, GenerateRequest, Output
from contracts.v1 import kvstore_pb2
from runtime import telemetry
from runtime.config import WorkerSection
from worker.admission import Admission
from worker.core.batching import choose, victim
from worker.core.hbm import Block, Save
from worker.core.sequence import Event, Sequence, State
from worker.device import Device
from worker.inquiries import answer_store
from worker.loads import FromStore, LoadClosed, PiecesCame, SaveCopied, StoreDown, StoreUp
from worker.output import Writer
from worker.prefetching import Prefetching
from worker.runner import Slice, Steps
from worker.sampler import Sampler, SamplingState
from worker.saving import Saving
from worker.text import TextCodec

log = telemetry.logger("worker.engine")
#: A layer that has not come after this long is lost, in seconds.
LAYER_TIMEOUT_S = 10.0
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
    """A valid, tokenised request."""

    request: GenerateRequest
    prompt: list[int]
    max_tokens: int
    stream: Stream


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client went away."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What the scheduler is told."""

    running: int
    waiting: int
    outstanding_tokens: int
    outstanding_s: float
    request_s: float
    pages_total: int
    pages_free: int
    in_flight: tuple[str, ...]


@dataclass(slots=True)
class _Live:
    sequence: Sequence
    writer: Writer
    sampling: SamplingState
    stream: Stream


class Engine:
    """Runs one model on one device."""

    def __init__(
        self, device: Device, runner: Steps, codec: TextCodec, eos_ids: set[int], model_name: str, settings: WorkerSection
    ) -> None:
        self.device, self.runner, self.codec, self.eos_ids = device, runner, codec, eos_ids
        self.model_name, self.settings = model_name, settings
        self.saving, self.prefetching = Saving(device), Prefetching(device)
        self.admission = Admission(device, self.prefetching)
        self.sampler = Sampler()
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.counts = Counts(0, 0, 0, 0.0, 0.0, device.cache.pool.total, device.cache.pool.total, ())
        self._live: dict[str, _Live] = {}
        #: Ended requests the scheduler has not been told of; the reporter takes them.
        self.finished: collections.deque[str] = collections.deque(maxlen=100_000)
        self._reported_s = 0.0
        self._arrivals = 0
        self._frames: dict[Stream, StepFrame] = defaultdict(StepFrame)
        self._stopping = False
        self._quiet = True
        self.on_crash: Callable[[BaseException], None] = lambda error: None
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

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.exception("engine died")
            self.on_crash(error)

    def _turn(self) -> None:
        self._take_events(block=not self._can_step() and not self.prefetching.due)
        self._admit()
        self.prefetching.pump()
        batch = self._schedule()
        if batch:
            self._step(batch)
        self._report()
        self._flush_frames()
        self._quiet = not self._live and not self.saving.busy and not self.prefetching.due

    # ---- events ------------------------------------------------------------------------------------------------
    def _can_step(self) -> bool:
        return any(live.sequence.state is State.RUNNING for live in self._live.values())

    def _take_events(self, block: bool) -> None:
        try:
            event = self.inbox.get(timeout=IDLE_S) if block else self.inbox.get_nowait()
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
                self.device.store_here = True
            case StoreDown():
                self._store_down()
            case PiecesCame() | None:
                pass  # it woke us

    def _submit(self, event: Submit) -> None:
        request = event.request
        sequence = Sequence(request, len(event.prompt), event.prompt + request.resume_tokens, event.max_tokens, self._arrivals)
        self._arrivals += 1
        writer = Writer(sequence, self.codec, self.eos_ids)
        sampling = SamplingState.start(request.sampling, event.prompt, request.resume_tokens)
        self._live[request.request_id] = _Live(sequence, writer, sampling, event.stream)
        self._frames[event.stream].accepted.append(Accepted(request.request_id, len(event.prompt)))
        self.prefetching.came_true(request.session)

    def _from_store(self, message: kvstore_pb2.StoreToWorker) -> None:
        match message.WhichOneof("kind"):
            case "found":
                load = self.device.table.open.get(message.found.load_id)
                if load is not None and load.sequence is not None:
                    self.admission.found(load.sequence, load.load_id, message.found.chunks)
            case "grant":
                self.saving.granted(message.grant)
            case "offer":
                self.prefetching.offered(message.offer)
            case _:
                answer_store(self.device, self.prefetching, message)

    def _store_down(self) -> None:
        self.device.store_here = False
        self.prefetching.store_down()
        self.saving.store_down()
        for load in list(self.device.table.open.values()):
            load.cancelled = True
            self.device.loader.cancel(load)
            if load.sequence is not None and load.sequence.found is None and load.sequence.load_id == load.load_id:
                self.admission.found(load.sequence, load.load_id, 0)

    # ---- schedule ----------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        waiting = sorted((x.sequence for x in self._live.values() if x.sequence.state is State.WAITING), key=lambda s: s.priority)
        for sequence in waiting:
            if not self.admission.admit(sequence):
                break
        for live in list(self._live.values()):
            if live.sequence.state is State.LOADING:
                self.admission.try_start(live.sequence)

    def _schedule(self) -> list[tuple[_Live, int]]:
        while True:
            running = [x.sequence for x in self._live.values() if x.sequence.state is State.RUNNING]
            chosen = choose(running, self.settings.max_batch, self.settings.step_tokens)
            if all(self.admission.extend(s, s.computed + count) for s, count in chosen):
                return [(self._live[s.request.request_id], count) for s, count in chosen]
            self.admission.restart(victim(running), Event.PREEMPTED)

    # ---- run ---------------------------------------------------------------------------------------------------
    def _step(self, batch: list[tuple[_Live, int]]) -> None:
        slices = []
        arriving: list[tuple[Sequence, list[Block]]] = []
        for live, count in batch:
            s = live.sequence
            chunks = -(-(s.computed + count) // self.device.shape.chunk_tokens)
            pages = np.stack([b.pages for b in s.blocks[:chunks]], axis=1)
            slices.append(Slice(s.tokens[s.computed : s.computed + count], s.computed, pages, s.computed + count == len(s.tokens)))
            coming = [b for b in s.blocks[: s.found or 0] if not b.complete]
            if coming:
                arriving.append((s, coming))
        void: set[str] = set()

        def before_layer(layer: int) -> None:
            for sequence, blocks in arriving:
                if sequence.request.request_id not in void and not self._wait_for_layer(blocks, layer):
                    void.add(sequence.request.request_id)

        began = self.device.clock.now()
        logits = self.runner.step(slices, before_layer, lambda layer: None)
        if not arriving:
            decodes = sum(count == 1 for _, count in batch)
            prefill_tokens = sum(count for _, count in batch) - decodes
            self.admission.pace.stepped(self.device.clock.now() - began, prefill_tokens, decodes)
        self._postprocess(batch, logits, void)

    def _wait_for_layer(self, blocks: list[Block], layer: int) -> bool:
        """Until this layer of these blocks is here. False when it will not come."""
        deadline = self.device.clock.now() + LAYER_TIMEOUT_S
        with self.device.table.progress:
            while not all(b.ready[layer] for b in blocks):
                coming = any(not load.closed for load in self.device.table.open.values())
                if not coming or any(b.lost for b in blocks) or self.device.clock.now() > deadline:
                    return False
                self.device.table.progress.wait(0.2)
        return True

    # ---- postprocess -------------------------------------------------------------------------------------------
    def _postprocess(self, batch: list[tuple[_Live, int]], logits: object, void: set[str]) -> None:
        speaking = [live for live, count in batch if live.sequence.computed + count == len(live.sequence.tokens)]
        choices = self.sampler.choose(logits, [live.sampling for live in speaking]) if speaking else []  # type: ignore[arg-type]
        chosen = {live.sequence.request.request_id: choice for live, choice in zip(speaking, choices, strict=True)}
        for live, count in batch:
            s, request_id = live.sequence, live.sequence.request.request_id
            if request_id in void:
                self.admission.restart(s, Event.LOST)
                continue
            s.computed += count
            self._keep_full_chunks(s)
            if request_id in chosen:
                choice = chosen[request_id]
                live.sampling.took(choice.token)
                output = live.writer.take(choice)
                self._frames[live.stream].outputs.append(output)
                if output.finish_reason:
                    self._finish(live)

    def _keep_full_chunks(self, s: Sequence) -> None:
        """Name the chunks that are full now, and offer them to the store."""
        if not self.device.settings.cache:
            return
        size = self.device.shape.chunk_tokens
        full = s.computed // size
        if full > len(s.keys):
            salt = self.device.salt_of(s.request.tenant)
            s.keys = chunk_keys(salt, self.device.shape, s.tokens[: full * size], s.keys)
        fresh = []
        for block, key in zip(s.blocks[s.found or 0 : full], s.keys[s.found or 0 : full], strict=True):
            if block.ready.all():
                continue
            block.ready[:] = True
            if self.device.cache.enter(block, key):
                fresh.append(block)
            else:
                block.save = Save.BELOW  # an equal block is cached already, and is the one that goes down
        self.saving.offer(s.request.session, fresh)

    def _finish(self, live: _Live) -> None:
        s = live.sequence
        del self._live[s.request.request_id]
        self.finished.append(s.request.request_id)
        self.admission.pace.ended(s.prompt_tokens - s.cached, s.generated)
        if self.device.settings.cache and s.state is State.RUNNING:
            full = s.computed // self.device.shape.chunk_tokens
            if full:
                fingerprint, now = self.device.shape.fingerprint, self.device.clock.wall()
                manifest = Manifest(s.request.session, self.model_name, fingerprint, s.keys[:full], 0, now)
                index = self.device.cache.index
                self.saving.turn_ended(manifest, [index.get(key, block) for key, block in zip(s.keys, s.blocks[:full], strict=False)])
        s.on(Event.DONE)
        self.admission.vacate(s)
        self.prefetching.turn_ended(s.request.session)

    def _report(self) -> None:
        now = self.device.clock.now()
        if now - self._reported_s < REPORT_EVERY_S and self._live:
            return
        self._reported_s = now
        sequences = [live.sequence for live in self._live.values()]
        running = sum(s.state is State.RUNNING for s in sequences)
        self.counts = Counts(
            running=running,
            waiting=len(sequences) - running,
            outstanding_tokens=sum(s.pending + max(s.max_tokens - s.generated, 0) for s in sequences),
            outstanding_s=self.admission.pace.outstanding_s(sequences, self.device.shape.chunk_tokens),
            request_s=self.admission.pace.request_s,
            pages_total=self.device.cache.pool.total,
            pages_free=self.device.cache.available(),
            in_flight=tuple(self._live),
        )

    def _flush_frames(self) -> None:
        for stream, frame in self._frames.items():
            stream.put(frame)
        self._frames.clear()
