"""Who is on the device and what the next step computes: carries out what `core.batching` and `core.preemption` decide, over real pages.

Invariants: at most `max_batch` sequences are RUNNING or LOADING. Nobody is admitted past somebody more urgent who waits, or who is
here and lacks pages. Sequences here have a total order (`_rank`: priority, whether they are within their tenant's share, arrival), and the
first can always have what all others hold, so there is always one that goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from contracts.request import GenerateRequest
from contracts.turn_times import Phase
from worker.core.admission import Admission
from worker.core.batching import Budget, choose, due_s, mixed_tokens
from worker.core.fairness import Company, Group, Service, Shares, group_of, in_turns
from worker.core.preemption import holding, spare_pages, victim
from worker.core.queue import Queue
from worker.core.saving import Saving
from worker.core.sequence import Event, Sequence, State
from worker.core.shared_prompt import awaits_prompt
from worker.core.shared_step import Room, room_of, share
from worker.core.trials import Trials

#: Nobody was put in order.
_NO_ORDER: tuple[list[Sequence], int, list[Sequence]] = ([], 0, [])


class Scheduling:
    """Admits waiting sequences and puts batches together; mutates sequences and the device's cache."""

    def __init__(self, admission: Admission, saving: Saving) -> None:
        self.admission, self.saving = admission, saving
        self.state = admission.state
        #: Sequences that were preempted, and those of their tokens whose KV neither was below nor on its way there.
        self.preemptions = self.dropped_tokens = 0
        #: Tokens that were computed again, by what had taken their sequence off the device.
        self.recomputed_tokens: Counter[Event] = Counter()
        self.trials = Trials()
        #: What tenants were served, and who holds more than its share (None: not known as of now), by priority; their weights.
        self.service, self.company = Service(), Company()
        self._shares: Shares | None = None
        self._groups: dict[Group, float] = {}
        #: Who waits, between two looks at everybody; None: somebody may have moved since.
        self._queue: Queue[Sequence] | None = None
        #: Those who waited, and how many were here, when they were put in order last; and that order.
        self._ordered = _NO_ORDER
        #: None of those who wait is admitted before more pages than so many are obtainable, or somebody comes or goes; None: one may be.
        self._closed_at: float | None = math.inf
        self._lacking: list[Sequence] = []
        self._choices = 0
        #: What a token in HBM for a step counts as, in seconds of the device.
        self._hbm_token_s = 0.0

    # ---- admission ---------------------------------------------------------------------------------------------
    def make_way(self, count: int, sequences: Callable[[], Iterable[Sequence]], newcomer: GenerateRequest) -> Sequence | bool:
        """Whether one more request may wait: True, False, or when the one that is returned is refused instead.

        At most `max_waiting` wait of one priority or more urgent, and twice as many in all. count: of `sequences`, which are asked for only
        when there are many.
        """
        if self._queue is None:
            if count < self.state.policy.max_waiting:
                return True
            waiting = (s for s in sequences() if s.state is State.WAITING)
            self._queue = Queue(
                waiting, lambda s: not s.reached and s.generated == len(s.request.resume_tokens), self.state.policy.max_waiting
            )
        return self._queue.way(newcomer)

    def joined(self, s: Sequence) -> None:
        """A request waits from now on."""
        if self._queue is not None:
            self._queue.joined(s)

    def left(self, s: Sequence) -> None:
        """A request has ended."""
        if self._queue is not None:
            self._queue.left(s)

    def admit(self, sequences: Iterable[Sequence], enough: Callable[[], bool]) -> None:
        """Give waiting sequences their blocks as far as there is room, and start those whose first layers are near.

        By priority, then tenant by tenant (`core.fairness`), then by when they are due, as prompts are computed; what the scheduler knows
        of their cache counts, and what they take of HBM. Nobody passes one that does not fit: so a large one gets its room when others
        end, and is passed only by what arrived before it was due. For one of a more urgent class, less urgent ones are preempted; for one
        whose tenant has little here, those of a tenant that holds more than its share.

        enough: see `EngineCore.turn`.
        """
        self._queue = None
        live = list(sequences)
        here = self.admission.here = _here(live)
        self._look(live, here)
        waiting = [s for s in live if s.state is State.WAITING]
        running = any(s.state is State.RUNNING for s in here)
        self._closed_at = None if self._contended else math.inf
        for s in self._in_order(waiting, len(here)) if self._some_may_come(waiting, here) else ():
            if self.state.policy.cache and awaits_prompt(s, live, self.state.shape.chunk_tokens):
                continue
            if self._owes_pages(s, here):
                s.times.enter(Phase.MEMORY, self.state.now)
                self._closed_at = None
                break
            if not self._admit(s, here) and (here or not self.state.cache.free_held() or not self._admit(s, here)):
                self._closed_at = None if self._closed_at is None else self._room_for(s, here)
                break
            here += [s] if s.state is State.LOADING else []
            self._shares, self._closed_at, self._ordered = None, None, _NO_ORDER
            if running and enough():
                break  # the others are admitted after a step
        for s in live:
            if s.state is State.LOADING:
                self.admission.try_start(s, alone=not any(other.state is State.RUNNING for other in live))

    @property
    def closed(self) -> bool:
        """None of those who wait is admitted at the next turn, if nobody comes or goes before it and all who are here go on decoding."""
        return self._closed_at is not None and self.state.cache.obtainable <= self._closed_at

    def hints_load(self) -> None:
        """A load of a hint has begun: one that was refused ends it if it needs the same chunks."""
        if self._closed_at != math.inf:
            self._closed_at = None

    def _room_for(self, s: Sequence, here: list[Sequence]) -> int | None:
        """How many pages have to be obtainable at least, and one more, before the one that was refused is admitted; None: that is not all
        that it depends on."""
        if any(other.request.priority > s.request.priority for other in here):
            return None  # whether one of them is preempted depends on what its pages come to
        return self.admission.refused_at

    @property
    def _contended(self) -> bool:
        """Tenants share a priority: who is next depends on what they are served."""
        return len(self._groups) > len({priority for priority, _ in self._groups})

    def all_fit(self, decodes: int) -> bool:
        """Steps that hold all of so many that decode, and nothing else, go on doing so: where tenants share them there is room for twice as
        much."""
        if decodes > self.state.policy.step_tokens:
            return False
        if not any(self.company.has(group) for group in self._groups):
            return True
        room = self._room()
        return decodes <= room.tokens and 2 * decodes * room.decode_s <= room.seconds

    def _room(self) -> Room:
        pace, settings = self.admission.pace, self.state.policy
        return room_of(settings.step_tokens, settings.shared_step_s, pace.decode_s(1), pace.marginal_token_s, pace.prefill_token_s)

    def _some_may_come(self, waiting: list[Sequence], here: list[Sequence]) -> bool:
        """There is a place, or somebody who may have to give his up. Else a long queue costs nothing."""
        if not waiting or len(here) < self.state.policy.max_batch:
            return bool(waiting)
        if min(s.request.priority for s in waiting) < max(s.request.priority for s in here):
            return True
        if len(self._groups) == 1 or not self._share(here).beyond:
            return False
        return any(self._share(here).may_claim(group) for group in {group_of(s) for s in waiting})

    def _in_order(self, waiting: list[Sequence], running: int) -> list[Sequence]:
        """By priority, then tenant by tenant, then by when they are due. That is reckoned when somebody comes or goes: an order does not
        change because steps took a little longer."""
        if self._contended or self._ordered[:2] != (waiting, running):
            self._ordered = (waiting, running, self._order(waiting, running))
        return self._ordered[2]

    def _order(self, waiting: list[Sequence], running: int) -> list[Sequence]:
        pace, pool, shape = self.admission.pace, self.state.cache.pool, self.state.shape
        hbm_tokens, step_s = pool.total * shape.chunk_tokens / shape.layers, pace.decode_s(max(running, 1))
        cost_s = {s.arrival: pace.device_s(s, s.uncached, hbm_tokens, step_s) for s in waiting}
        due = sorted(waiting, key=lambda s: (s.request.priority, due_s(s, cost_s[s.arrival]), s.arrival))
        return in_turns(due, self.service.of, lambda s: cost_s[s.arrival])

    def _look(self, live: list[Sequence], here: list[Sequence]) -> None:
        """Who is here, and who of them wants to be admitted or to compute a prompt."""
        self._groups = {group_of(s): s.request.weight for s in live}
        self._shares = None
        pool, shape = self.state.cache.pool, self.state.shape
        self._hbm_token_s = self.admission.pace.decode_s(max(len(here), 1)) * shape.layers / (pool.total * shape.chunk_tokens)
        self.service.seen(self._groups, {group_of(s) for s in live if s.pending > 1 or s.state is not State.RUNNING})
        self.company.seen(self._groups, self.state.now)

    def _share(self, here: list[Sequence]) -> Shares:
        if self._shares is None:
            pages, layers = self.state.cache.pool.total, self.state.shape.layers
            self._shares = Shares(here, self._groups, self.state.policy.max_batch, pages, lambda s: len(s.blocks) * layers)
        return self._shares

    def _rank(self, s: Sequence, here: list[Sequence]) -> tuple[int, bool, int]:
        """Smaller may have what larger ones hold."""
        return (s.request.priority, len(self._groups) > 1 and s in self._share(here).beyond, s.arrival)

    def _owes_pages(self, s: Sequence, here: list[Sequence]) -> bool:
        """Somebody who is here and lacks pages goes before this one, which waits."""
        for other in self._lacking:
            same = other.request.tenant == s.request.tenant
            before = other.state is State.RUNNING and other.priority < s.priority
            if before and (same or self._rank(other, here) < (s.request.priority, False, s.arrival)):
                return True
        return False

    def _admit(self, s: Sequence, here: list[Sequence]) -> bool:
        d, priority = self.state, s.request.priority
        spare = spare_pages(sum(other.request.priority <= priority for other in here), d.shape.layers, d.cache.pool.total)
        while True:
            lacking = 0
            if len(here) < self.state.policy.max_batch and not (lacking := self.admission.admit(s, spare)):
                return True
            giving = [other for other in here if other.request.priority > priority]
            if len(self._groups) > 1:
                share, pages = self._share(here), (len(s.tokens) // d.shape.chunk_tokens + 1) * d.shape.layers
                if share.claims(s, pages):
                    served = self.service.of(group_of(s))
                    giving += [
                        other
                        for other in here
                        if other.request.priority == priority and other in share.beyond and self.service.of(group_of(other)) >= served
                    ]
            if not self._preempt(giving, here, lacking):
                s.times.enter(Phase.MEMORY if lacking else Phase.QUEUE, d.now)
                return False

    # ---- batches -----------------------------------------------------------------------------------------------
    def batch(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """(sequence, tokens) of the next step; their blocks are there.

        The most urgent take pages first. One that finds none preempts who is less urgent, or sits this step out with what it has.
        """
        here = _here(sequences)
        running = [s for s in here if s.state is State.RUNNING]
        able, lacking = self.trials.turn(running, self.state.now), []
        while True:
            chosen = self._choose(able)
            ranked = sorted(chosen, key=lambda c: self._rank(c[0], here))
            found_none = [s for s, count in ranked if not self._extend(s, s.computed + count, here)]
            if not found_none:
                break
            if len(found_none) == len(here) and self.state.cache.free_held():
                continue  # nobody goes on, and nobody else is here whose end would make room
            lacking += found_none
            able = [s for s in able if s.state is State.RUNNING and s not in found_none]
        self._lacking = lacking
        chosen = [(s, count) for s, count in chosen if s.state is State.RUNNING]
        for s, _ in chosen:
            self._choices += 1
            s.last_chosen = self._choices
        return chosen

    def _choose(self, running: list[Sequence]) -> list[tuple[Sequence, int]]:
        if any(self.company.has(group) for group in {group_of(s) for s in running}):
            return share(running, self._room(), self.service.of)
        return choose(running, self._budget(running))

    def _budget(self, running: list[Sequence]) -> Budget:
        pace, settings = self.admission.pace, self.state.policy
        decodes = sum(s.pending == 1 for s in running)
        decode_s = pace.decode_s(decodes)
        mixed = mixed_tokens(settings.mixed_step_s, decode_s, pace.prefill_token_s)
        return Budget(settings.step_tokens, settings.step_tokens if mixed is None else mixed, pace.prefill_token_s)

    def _extend(self, s: Sequence, upto_tokens: int, here: list[Sequence]) -> bool:
        """False when there is no room now. One that was preempted for somebody more urgent needs none."""
        while s.state is State.RUNNING and (lacking := self.admission.extend(s, upto_tokens)):
            rank = self._rank(s, here)
            if not self._preempt([other for other in here if self._rank(other, here) > rank], here, lacking):
                return False
        return True

    def computed(self, s: Sequence, count: int, steps: int = 1) -> None:
        """A step has computed the next `count` tokens of the sequence, or each of `steps` one token, whose values are there already."""
        if s.restarted is not None and s.computed < s.reached:
            self.recomputed_tokens[s.restarted] += min(s.computed + count * steps, s.reached) - s.computed
        self._charge(s, s.computed + count * steps - max(s.computed, s.reached), steps, decodes=s.pending == steps)
        s.computed += count * steps
        self.saving.keep_full_chunks(s, s.computed - count * steps)

    def went_on(self, step_s: float) -> None:
        """Whoever is here was still here when the last of several steps began, which took so long."""
        self.company.seen(self._groups, self.state.now - step_s)

    def _charge(self, s: Sequence, tokens: int, steps: int, decodes: bool) -> None:
        """Steps have computed so many tokens that it had not before: its tenant was served that, and HBM for as long."""
        pace = self.admission.pace
        computing_s = max(tokens, 0) * (pace.marginal_token_s if decodes else pace.prefill_token_s)
        held = steps * len(s.tokens) - steps * (steps - 1) / 2
        self.service.charge(group_of(s), computing_s + held * self._hbm_token_s, s.request.weight)

    # ---- preemption --------------------------------------------------------------------------------------------
    def _preempt(self, candidates: list[Sequence], here: list[Sequence], lacking: int) -> bool:
        """Take one of the candidates off the device. False when waiting is right."""
        holdings = [holding(s) for s in candidates]
        beyond = self._share(here).beyond if len(self._groups) > 1 else frozenset()
        s = victim(holdings, lacking, self.state.cache.coming() if lacking else 0, beyond)
        if s is None:
            return False
        self.preemptions += 1
        self.dropped_tokens += max(s.computed - self.saving.keep(s), 0)
        self.admission.restart(s, Event.PREEMPTED)
        here.remove(s)
        self._shares = None
        return True


def _is_new(s: Sequence) -> bool:
    """It has never been on the device."""
    return not s.reached and s.generated == len(s.request.resume_tokens)


def _here(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [s for s in sequences if s.state in (State.LOADING, State.RUNNING)]
