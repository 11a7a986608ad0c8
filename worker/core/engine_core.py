"""An engine's decisions: what is admitted, computed, loaded, saved, preempted and evicted.

Events in (`handle`), instructions out (`take`), and a step when there is something to compute (`turn`). No clock,
thread or bytes: the shell (worker/engine) executes, and the simulator drives the same object. In each turn the shell
delivers events, asks for a step, executes instructions, runs the step and reports its result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from contracts.counts import Counts
from contracts.kv import Manifest, leading
from contracts.turn_times import Phase
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.admission import Admission
from worker.core.block import Block
from worker.core.counting import counts_of
from worker.core.lending import Lending
from worker.core.pace import Pace
from worker.core.prefetching import Prefetching
from worker.core.saving import Saving
from worker.core.scheduling import Scheduling
from worker.core.sequence import Event, Sequence, State
from worker.core.state import CoreState
from worker.core.supply import FIXED
from worker.core.turn_times import TurnTimes

#: Longest time between two looks for memory that other models may have freed, in seconds.
LOOKS_S = 0.05
#: A step that takes more than this many times its expected time while other KV moves counts as slowed by that.
SLOW = 1.1


class EngineCore:
    """See the module. Invariants (`validate`): those of its parts; a sequence is `live` until it ends, and only live
    sequences have blocks."""

    def __init__(self, state: CoreState) -> None:
        self.state = state
        self.saving, self.prefetching = Saving(state), Prefetching(state)
        self.admission = Admission(state, self.prefetching)
        self.scheduling = Scheduling(self.admission, self.saving)
        #: Sequences that have not ended, by request id.
        self.live: dict[str, Sequence] = {}
        self._arrivals = 0
        self._coming: dict[str, list[do.Coming]] = {}
        #: The last turn gave a step.
        self.stepping = False
        #: Obtainable pages after the last turn without a step.
        self._obtainable = 0
        #: When the last turn began.
        self._turned_s = 0.0
        #: Expected time of the step under way.
        self._expected_s = 0.0
        #: Whether requests may get memory, and steps run: off while the model's weights are not here.
        self.admits = self.computes = True
        #: The last turn had requests, and could not compute.
        self._held = False
        #: In the last turn no request could compute, or load, for lack of memory.
        self.starved = False
        #: Learns how fast steps are while layers are lent.
        self.lending: Lending | None = None
        #: Number of live sequences at the last `quiet_steps`.
        self._quiet_live = 0

    @property
    def pace(self) -> Pace:
        """This worker's measured speed."""
        return self.admission.pace

    @property
    def arrivals(self) -> int:
        """Number of requests that have come."""
        return self._arrivals

    @property
    def going_on(self) -> bool:
        """Whether the next turn has something to do without an event."""
        released = self._held and self.computes
        due = self.admission.restarted or self.prefetching.due or self.scheduling.denied
        return self.admits and (self.stepping or due or released)

    @property
    def may_fit(self) -> bool:
        """Whether requests lacked memory in the last turn and more can be obtained since, from other models."""
        waits = self.admits and self.live and not self.stepping
        return bool(waits) and self.state.cache.obtainable > self._obtainable

    def interrupted(self) -> bool:
        """Whether a quiet stretch must end: a request came or left, or a hint or a waiting request may fit."""
        return (
            len(self.live) != self._quiet_live
            or self.admission.restarted
            or self.prefetching.due
            or not self.scheduling.closed
        )

    @property
    def quiet(self) -> bool:
        """No request is live and all write-back is done."""
        return not self.live and not self.saving.busy and not (self.admits and self.prefetching.due)

    def due_in_s(self, now: float) -> float:
        """Seconds until a turn may have something to do without an event; infinite if never."""
        self.state.now = now
        if not self.admits:
            return math.inf
        due_s, rest_s = max(self.prefetching.due_in_s, 0.0), self.scheduling.trials.rest_s(now)
        cache = self.state.cache
        if self.live and cache.supply is not FIXED:  # another model may have let go of memory, or of its turn
            due_s = min(due_s, max(self._turned_s + LOOKS_S - now, 0.0))
        if cache.hold_hinted and self.live:  # a request may wait for pages that only the end of a hint frees
            due_s = min(due_s, cache.standings.ends_s(now) - now)
        return due_s if rest_s is None else min(due_s, rest_s)

    def take(self) -> list[do.Instruction]:
        """Instructions to execute now, in this order; clears them."""
        taken, self.state.out = self.state.out, []
        return taken

    # ---- turns -------------------------------------------------------------------------------------------------
    def turn(self, now: float, enough: Callable[[], bool] = lambda: False) -> do.Step | None:
        """Admit requests and compose the next step. None: nothing can be computed.

        enough: called after each admission while sequences run; True ends admission for this turn. It may call `take`.
        """
        self.state.now, self.admission.restarted, self.stepping = now, False, False
        self._turned_s = now
        self.saving.expire()
        self.state.cache.supply.waits(None)
        if not self.admits:
            self.starved = False
            return None
        self.scheduling.preempts = self.computes
        self.scheduling.admit(self.live.values(), enough)
        if self.prefetching.pump():
            self.scheduling.hints_load()
        trials = self.scheduling.trials
        tried = trials.told
        batch = self.scheduling.batch(self.live.values()) if self.computes else []
        self._held = not self.computes and bool(self.live)
        if trials.told != tried:
            self.state.out.append(do.Trial(trials.told))
        self.stepping = bool(batch)
        loading = any(s.state is State.LOADING for s in self.live.values())
        held_up = not (batch or loading or self.scheduling.denied)
        self.starved = self.computes and self.scheduling.takes and held_up and bool(self.live)
        if not batch:
            self._obtainable = self.state.cache.obtainable
            return None
        ahead = self.saving.ahead_of(batch)
        self._coming = {s.request.request_id: coming for s, _ in batch if (coming := self._awaited_layers(s))}
        prefill_tokens, decodes = _composition(batch)
        self._expected_s = self.pace.decode_s(decodes) + prefill_tokens * self.pace.prefill_token_s
        for s, _ in batch:
            if not s.spoken:
                s.times.enter(Phase.COMPUTE, now)
        return do.Step(tuple(batch), self._coming, self._expected_s, ahead)

    def quiet_steps(self, step: do.Step) -> int:
        """Number of identical decode-only steps, this one included, before the core must decide again without an event:
        until an answer ends, a chunk becomes full or a block is passed. 1 if a waiting request may be admitted or a
        load is awaited. Timers fall due in `quiet_s`."""
        size, batch, scheduling = self.state.shape.chunk_tokens, step.batch, self.scheduling
        self._quiet_live = len(self.live)
        if step.coming or scheduling.trials.told or self.admission.restarted or not scheduling.closed:
            return 1
        if any(
            s.request.alone or not s.spoken or s.computed + 1 < len(s.tokens) for s, _ in batch
        ) or not scheduling.all_fit(len(batch)):
            return 1
        if len(batch) < len(self.live) - sum(s.state is State.WAITING for s in self.live.values()):
            return 1
        steps = self.state.cache.windowed.steps
        return min(steps(s.computed, min(size - s.computed % size, s.max_tokens - s.generated)) for s, _ in batch)

    @property
    def quiet_s(self) -> float:
        """Seconds from the turn on until a timer falls due (a hint, or an unanswered save); infinite if never."""
        return min(self.prefetching.due_in_s, self.saving.expires_in_s)

    def _awaited_layers(self, s: Sequence) -> list[do.Coming]:
        found = s.found or 0
        while s.whole < found and self.state.cache.windowed.whole(s.blocks[s.whole], s.whole < s.passed):
            s.whole += 1
        return self.state.coming(s.blocks[s.whole : found], s.passed - s.whole) if s.whole < found else []

    # ---- events ------------------------------------------------------------------------------------------------
    def handle(self, event: ev.Event, now: float) -> None:
        """Process one event. The resulting instructions are in `take`."""
        state = self.state
        state.now = now
        match event:
            case ev.Submitted():
                self._submitted(event.sequence)
            case ev.Cancelled():
                if (sequence := self.live.get(event.request_id)) is not None:
                    self._end(sequence)
            case ev.Stepped():
                self._stepped(event)
            case ev.PiecesCame():
                state.came(event)
            case ev.LoadClosed():
                self._load_closed(event)
            case ev.SaveCopied():
                self.saving.copied(event)
                self.prefetching.try_again()
            case ev.StoreUp():
                state.attached = True
                state.heard()
            case ev.StoreDown():
                self._store_down()
            case _:
                state.heard()
                self._from_store(event)

    def _from_store(self, event: ev.Found | ev.Offered | ev.Withdrawn | ev.Erased | ev.Queried) -> None:
        match event:
            case ev.Found():
                load = self.state.loads.get(event.load_id)
                if load is not None and load.sequence is not None:
                    self.admission.found(load.sequence, load, event.chunks, list(event.sources), event.due_s)
            case ev.Offered():
                self.prefetching.offered(event)
            case ev.Withdrawn():
                self.prefetching.withdrawn(event.session)
            case ev.Erased():
                self._erase(event)
            case ev.Queried():
                self.state.out.append(self.holds(event))

    def _submitted(self, sequence: Sequence) -> None:
        way = self.scheduling.make_way(len(self.live), self.live.values, sequence.request)
        if way is False:
            self.state.out.append(do.Refuse(sequence.request.request_id, full=True))
            return
        if isinstance(way, Sequence):
            self._refuse(way, full=True)
        sequence.arrival, sequence.arrival_s = self._arrivals, self.state.now
        sequence.times = TurnTimes(self.state.now)
        self._arrivals += 1
        self.live[sequence.request.request_id] = sequence
        self.scheduling.joined(sequence)
        self.prefetching.came_true(sequence.request.session)

    def _load_closed(self, event: ev.LoadClosed) -> None:
        load = self.state.closed(event)
        sequence = load.sequence if load is not None else None
        if sequence is not None and sequence.load_id == event.load_id:
            sequence.load_id = 0
            blocks, whole = sequence.blocks[: sequence.found or 0], self.state.cache.windowed.whole
            if any(not whole(b, n < sequence.passed) and not b.moving for n, b in enumerate(blocks)):
                self.admission.restart(sequence, Event.LOST)

    def _store_down(self) -> None:
        self.state.attached = False
        self.prefetching.store_down()
        self.saving.store_down()
        for load in list(self.state.loads.values()):
            load.cancelled = True
            self.state.out.append(do.CloseLoad(load.load_id))
            if load.sequence is not None and load.sequence.found is None and load.sequence.load_id == load.load_id:
                self.admission.found(load.sequence, load, 0, [])

    def _erase(self, event: ev.Erased) -> None:
        for key in event.keys:
            self.state.cache.erase(key)
        for session in event.sessions:
            self.prefetching.withdrawn(session)
        if event.sessions:
            self.state.cache.forget(event.sessions)
        for sequence in self.live.values():
            sequence.erased = sequence.erased or sequence.request.session in event.sessions

    def holds(self, event: ev.Queried) -> do.HbmHolds:
        """How much of these chunks is in HBM."""
        shape, index = self.state.shape, self.state.cache.index
        none = np.zeros(shape.layers, bool)
        blocks = (index.get(key) for key in event.keys)
        ready = np.array([none if b is None else b.ready for b in blocks], bool).reshape(-1, shape.layers)
        per_layer = ready.sum(axis=0, dtype=int).tolist()
        tokens = leading(bool(each.all()) for each in ready) * shape.chunk_tokens
        return do.HbmHolds(event.query_id, per_layer, tokens, sum(per_layer) * shape.piece_bytes)

    # ---- after a step ------------------------------------------------------------------------------------------
    def _stepped(self, event: ev.Stepped) -> None:
        if event.timed and not self._coming:
            composition = _composition(event.batch)
            self.pace.stepped(event.seconds, *composition, event.steps)
            if self.lending is not None:
                self.lending.stepped(event.seconds, *composition, event.steps)
        if event.steps > 1:
            self.scheduling.went_on(event.seconds)
        self._attribute_time(event)
        for s, count in event.batch:
            request_id = s.request.request_id
            if request_id in event.failed:
                self._end(s, failed=True)
            elif request_id in event.void:
                self.admission.restart(s, Event.LOST)
            else:
                if event.steps > 1:
                    s.tokens.extend([event.tokens[request_id]] * (event.steps - 1))
                self.scheduling.computed(s, count, event.steps)
                if request_id in event.mute:
                    self._end(s, failed=True)
                elif request_id in event.doubtful:
                    if not self.admission.distrust(s):
                        self._refuse(s, full=False)
                elif (token := event.tokens.get(request_id)) is not None:
                    s.tokens.append(token)
                    ended = request_id in event.ended
                    if ended or s.times.phase is not Phase.DECODE:
                        self.state.out.append(do.Timed(request_id, s.times.take(self.state.now, Phase.DECODE)))
                    if ended:
                        self._end(s)

    def _attribute_time(self, event: ev.Stepped) -> None:
        """Attribute a step's time to phases, for sequences that wait for their first token."""
        slowed_s = 0.0
        if event.seconds - event.stalled_s > SLOW * self._expected_s and self._other_kv_moves(event.batch):
            slowed_s = event.seconds - event.stalled_s - self._expected_s
        for s, _ in event.batch:
            if s.times.phase is Phase.COMPUTE:
                stalled = None if s.request.request_id in self._coming else Phase.OTHERS
                s.times.stepped(self.state.now, stalled, event.stalled_s, slowed_s)

    def _other_kv_moves(self, batch: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether KV of sequences outside this batch is being copied into or out of HBM."""
        mine = {id(s) for s, _ in batch}
        return self.saving.busy or any(
            load.sequence is None or id(load.sequence) not in mine for load in self.state.loads.values()
        )

    def _refuse(self, s: Sequence, *, full: bool) -> None:
        self._end(s, failed=True)
        self.state.out.append(do.Refuse(s.request.request_id, full))

    def _end(self, s: Sequence, failed: bool = False) -> None:
        """Remove the sequence. Its KV stays cached unless it failed."""
        state = self.state
        del self.live[s.request.request_id]
        self.scheduling.left(s)
        if not failed:
            self.pace.ended(s.prompt_tokens - s.cached, s.generated)
        # A manifest of a sequence that ended inside its prompt would only shorten the session's known cache.
        if (
            state.policy.cache
            and not failed
            and s.state is State.RUNNING
            and s.computed >= s.prompt_tokens
            and not s.erased
        ):
            full = s.computed // state.shape.chunk_tokens
            if full and not s.request.choice:  # of several choices only the first continues the conversation
                manifest = Manifest(s.request.session, state.model_name, state.shape.fingerprint, s.keys[:full], 0, 0.0)
                index, pairs = state.cache.index, zip(s.keys, s.blocks[:full], strict=False)
                kept = [index.get(key, block) for key, block in pairs]
                self.saving.turn_ended(manifest, kept, s.request.request_id)
        s.on(Event.DONE)
        self.admission.release(s)
        if s.erased:
            state.cache.forget({s.request.session})
        self.prefetching.turn_ended(s.request.session)

    # ---- reports -----------------------------------------------------------------------------------------------
    def counts(self) -> Counts:
        """Current load, for the scheduler."""
        return counts_of(self.live, self.state, self.pace)

    def validate(self, others: Iterable[Block] = ()) -> None:
        """Raise AssertionError when an invariant does not hold. others: blocks of ended sequences with pages."""
        users, passed = Counter[int](), Counter[int]()
        blocks = {id(b): b for b in [*others, *self.saving.blocks]}
        for s in self.live.values():
            assert len(s.blocks) * self.state.shape.chunk_tokens >= s.computed
            assert s.state is not State.WAITING or not s.blocks
            assert not any(self.state.cache.windowed.gaps(s.blocks, s.passed)), "a page that is read is not there"
            blocks |= {id(block): block for block in s.blocks}
            users.update(map(id, s.blocks))
            passed.update(map(id, s.blocks[: s.passed]))
        self.state.validate(list(blocks.values()))
        for at, block in blocks.items():
            assert (block.users, block.passed) == (users[at], passed[at]), "a page is held for nobody"
        here = sum(s.state in (State.RUNNING, State.LOADING) for s in self.live.values())
        assert here <= self.state.policy.max_batch
        self.scheduling.service.validate()


def _composition(batch: Iterable[tuple[Sequence, int]]) -> tuple[int, int]:
    """(prefill tokens, number of decodes) of a step."""
    counts = [count for _, count in batch]
    decodes = sum(count == 1 for count in counts)
    return sum(counts) - decodes, decodes
