"""Who is on the device and what the next step computes: carries out what `core.batching` and `core.preemption` decide, over real pages.

Invariants: at most `max_batch` sequences are RUNNING or LOADING. Nobody is admitted past somebody more urgent who waits, or who is
here and lacks pages. The most urgent sequence here can always have what all others hold, so there is always one that goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from runtime.config import WorkerSection
from worker.admission import Admission
from worker.core.batching import Budget, choose, due_s, mixed_tokens
from worker.core.preemption import holding, spare_pages, victim
from worker.core.sequence import Event, Sequence, State
from worker.core.shared_prompt import awaits_prompt
from worker.core.trials import Trials
from worker.saving import Saving


class Scheduling:
    """Admits waiting sequences and puts batches together; mutates sequences and the device's cache. Engine thread only."""

    def __init__(self, admission: Admission, saving: Saving, settings: WorkerSection) -> None:
        self.admission, self.saving, self.settings = admission, saving, settings
        self.device = admission.device
        #: Sequences that were preempted, and those of their tokens whose KV neither was below nor on its way there.
        self.preemptions = self.dropped_tokens = 0
        #: Tokens that were computed again, by what had taken their sequence off the device.
        self.recomputed_tokens: Counter[Event] = Counter()
        self.trials = Trials()
        self._lacking: list[Sequence] = []
        self._choices = 0

    # ---- admission ---------------------------------------------------------------------------------------------
    def full(self, sequences: Iterable[Sequence], priority: int) -> bool:
        """As many requests wait before one of this priority as may."""
        waiting = sum(s.state is State.WAITING and s.request.priority <= priority for s in sequences)
        return waiting >= self.settings.max_waiting

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Give waiting sequences their blocks as far as there is room, and start those whose first layers are near.

        By priority, then by when they are due, as prompts are computed; what the scheduler knows of their cache counts, and what they
        take of HBM. Nobody passes one that does not fit: so a large one gets its room when others end, and is passed only by what
        arrived before it was due. For one of a more urgent class, less urgent ones are preempted.
        """
        live = list(sequences)
        here = self.admission.here = _here(live)
        for s in self._in_order([s for s in live if s.state is State.WAITING], len(here)):
            if self.device.settings.cache and awaits_prompt(s, live, self.device.shape.chunk_tokens):
                continue
            if any(other.priority < s.priority for other in self._lacking if other.state is State.RUNNING) or not self._admit(s, here):
                break
            here += [s] if s.state is State.LOADING else []
        for s in live:
            if s.state is State.LOADING:
                self.admission.try_start(s, alone=not any(other.state is State.RUNNING for other in live))

    def _in_order(self, waiting: list[Sequence], running: int) -> list[Sequence]:
        pace, pool, shape = self.admission.pace, self.device.cache.pool, self.device.shape
        hbm_tokens, step_s = pool.total * shape.chunk_tokens / shape.layers, pace.decode_s(max(running, 1))
        due = {s.arrival: due_s(s, pace.device_s(s, s.uncached, hbm_tokens, step_s)) for s in waiting}
        return sorted(waiting, key=lambda s: (s.request.priority, due[s.arrival], s.arrival))

    def _admit(self, s: Sequence, here: list[Sequence]) -> bool:
        d, priority = self.device, s.request.priority
        spare = spare_pages(sum(other.request.priority <= priority for other in here), d.shape.layers, d.cache.pool.total)
        while True:
            lacking = 0
            if len(here) < self.settings.max_batch and not (lacking := self.admission.admit(s, spare)):
                return True
            if not self._preempt([other for other in here if other.request.priority > priority], here, lacking):
                return False

    # ---- batches -----------------------------------------------------------------------------------------------
    def batch(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """(sequence, tokens) of the next step; their blocks are there.

        The most urgent take pages first. One that finds none preempts who is less urgent, or sits this step out with what it has.
        """
        here = _here(sequences)
        running = [s for s in here if s.state is State.RUNNING]
        able, lacking = self.trials.turn(running, self.device.clock.now()), []
        while True:
            chosen = choose(able, self._budget(able))
            found_none = [s for s, count in sorted(chosen, key=lambda c: c[0].priority) if not self._extend(s, s.computed + count, here)]
            if not found_none:
                break
            lacking += found_none
            able = [s for s in able if s.state is State.RUNNING and s not in found_none]
        self._lacking = lacking
        chosen = [(s, count) for s, count in chosen if s.state is State.RUNNING]
        for s, _ in chosen:
            self._choices += 1
            s.last_chosen = self._choices
        return chosen

    def _budget(self, running: list[Sequence]) -> Budget:
        pace, settings = self.admission.pace, self.settings
        decodes = sum(s.pending == 1 for s in running)
        mixed = mixed_tokens(settings.mixed_step_s, pace.decode_s(decodes), pace.prefill_token_s)
        return Budget(settings.step_tokens, settings.step_tokens if mixed is None else mixed, pace.prefill_token_s)

    def _extend(self, s: Sequence, upto_tokens: int, here: list[Sequence]) -> bool:
        """False when there is no room now. One that was preempted for somebody more urgent needs none."""
        while s.state is State.RUNNING and (lacking := self.admission.extend(s, upto_tokens)):
            if not self._preempt([other for other in here if other.priority > s.priority], here, lacking):
                return False
        return True

    def computed(self, s: Sequence, count: int) -> None:
        """A step has computed the next `count` tokens of the sequence."""
        if s.restarted is not None and s.computed < s.reached:
            self.recomputed_tokens[s.restarted] += min(s.computed + count, s.reached) - s.computed
        s.computed += count
        self.saving.keep_full_chunks(s, s.computed - count)

    # ---- preemption --------------------------------------------------------------------------------------------
    def _preempt(self, candidates: list[Sequence], here: list[Sequence], lacking: int) -> bool:
        """Take one of the candidates off the device. False when waiting is right."""
        holdings = [holding(s) for s in candidates]
        s = victim(holdings, lacking, self.device.cache.coming() if lacking else 0)
        if s is None:
            return False
        self.preemptions += 1
        self.dropped_tokens += max(s.computed - self.saving.keep(s), 0)
        self.admission.restart(s, Event.PREEMPTED)
        here.remove(s)
        return True


def _here(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [s for s in sequences if s.state in (State.LOADING, State.RUNNING)]
